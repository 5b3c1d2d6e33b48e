#!/bin/bash
# Trains on all GPUs of a SLURM job, one torchrun a node:
#
#     sbatch --nodes 2 scripts/slurm.sh dual-encoder --shards DATA --preset b16-ego4d --out RUN
#
# Two minutes before the time limit SLURM sends SIGTERM: the run saves, and the same command with --resume goes on.
#SBATCH --job-name=clipmill
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# One port a job, so that two jobs on a node do not meet.
port=$((20000 + SLURM_JOB_ID % 20000))

# Workers get as long to save as SLURM leaves them.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100
exec srun --kill-on-bad-exit=1 --ntasks-per-node=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$head_node:$port" \
    -m train "$@"
