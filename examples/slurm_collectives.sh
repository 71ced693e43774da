#!/bin/bash
# Measure all-reduce, all-gather and reduce-scatter over two nodes of a Slurm cluster, one rank a GPU,
# from 1 KiB to 1 GiB:
#     sbatch examples/slurm_collectives.sh [DIRECTORY]
# Nodes without GPUs measure gloo instead: remove the line --gpus-per-node. GLOO_SOCKET_IFNAME and
# NCCL_SOCKET_IFNAME name the network interface where there are several. All nodes must be equal, with the
# same software.
#SBATCH --job-name=ddlkit-collectives
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=00:15:00
set -euo pipefail

out=${1:-collectives-$SLURM_JOB_ID}

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node do not meet
export MASTER_ADDR MASTER_PORT

# Slurm numbers the ranks (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID), and rank 0 saves the table.
# --kill-on-bad-exit ends the job when one of them dies.
srun --kill-on-bad-exit=1 python -m ddlkit measure collectives --minutes 5 --link infiniband --out "$out"
echo "fit the table: ddlkit fit $out/collectives-*.csv --form alpha_beta"
