"""PyTorch's own cost models of collectives, put on trial."""
