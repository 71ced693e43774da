"""NVIDIA's nccl4py, played: see `nccl.core`."""
