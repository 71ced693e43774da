#!/bin/bash
# Measure all-reduce, all-gather and reduce-scatter over two nodes of a Slurm cluster, one rank a GPU,
# from 1 KiB to 1 GiB:
#     sbatch examples/slurm_collectives.sh [DIRECTORY]
# Nodes without GPUs measure gloo instead: remove the line --gpus-per-node. GLOO_SOCKET_IFNAME and
# NCCL_SOCKET_IFNAME name the network interface where there are several. All nodes must be equal, with the
# same software. The table calls the link between nodes "network": add --link to the command below to give it
# another name, as in --link infiniband.
#SBATCH --job-name=ddlkit-collectives
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --time=00:15:00
set -euo pipefail

if [[ -z ${SLURM_JOB_ID-} || -z ${SLURM_JOB_NODELIST-} ]]; then
    echo "slurm_collectives.sh: this is no job of Slurm: submit it, as in sbatch examples/slurm_collectives.sh" >&2
    exit 2
fi
out=${1:-collectives-$SLURM_JOB_ID}

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # jobs that share a node do not meet
export MASTER_ADDR MASTER_PORT

# Slurm numbers the ranks (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID), and rank 0 saves the table.
# --kill-on-bad-exit ends the job when one of them dies. srun does not take --cpus-per-task from the job, and
# without it each rank may have a single core for itself and the threads of NCCL. Slurm sets the variable only if
# the job asked for the cores of a task.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    python -m ddlkit measure collectives --minutes 5 --out "$out"
for table in "$out"/collectives-*.csv; do
    printf 'fit a cost: ddlkit fit %q --collective all_reduce --form alpha_beta\n' "$table"
done
