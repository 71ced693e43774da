#!/bin/bash
# Measure all-reduce and all-gather over two nodes of a Slurm cluster, one rank a GPU:
#     sbatch examples/slurm_collectives.sh
# Without GPUs, ask for no --gpus-per-node and write "backend": "gloo"; GLOO_SOCKET_IFNAME and
# NCCL_SOCKET_IFNAME name the network interface where there are several.
#SBATCH --job-name=ddlkit-collectives
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=00:15:00
set -euo pipefail

out=${1:-collectives-$SLURM_JOB_ID}  # on a file system that all nodes see
mkdir -p "$out"
cat > "$out/config.json" <<EOF
{
  "out": "$out",
  "link": "infiniband",
  "sizes": [1024, 8192, 65536, 262144, 1048576, 4194304, 16777216, 67108864],
  "budget": {"max_s": 5.0},
  "join": {"backend": "nccl", "timeout_s": 120}
}
EOF

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node do not meet
export MASTER_ADDR MASTER_PORT

# Slurm numbers the ranks (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID). --kill-on-bad-exit ends the
# job when one of them dies, as `ddlkit measure` does on one machine.
srun --kill-on-bad-exit=1 python -m ddlkit.jobs.launch collectives "$out/config.json"
echo "table: $out/collectives.csv; fit it with: ddlkit fit $out/collectives.csv --form alpha_beta"
