#!/bin/bash
# Trains on all GPUs of a SLURM job, with one torchrun per node, and continues in as many jobs as the training needs:
#
#     sbatch --nodes 2 --gpus-per-node 4 --cpus-per-task 32 \
#         scripts/slurm_train.sh dual-encoder --shards DATA --preset b16-ego4d --out RUN
#
# Use the numbers of GPUs and CPUs of your nodes: SLURM rejects a job that does not fit on any node.
#
# Two minutes before the time limit, SLURM sends SIGUSR1 to this script. The run then saves a checkpoint, and the job
# returns to the queue. --resume auto starts a new run in the first job, and resumes it in the following jobs, also after
# a node failure or a preemption, when SLURM requeues the job. `scancel` stops the job permanently.
#SBATCH --job-name=clipmill
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Use a port per job, so that two jobs on a node do not conflict.
port=$((20000 + SLURM_JOB_ID % 20000))

is_out_of_time=no
is_stopped=no
was_signalled=no
# scancel sends the signal to the processes of the job, but not to this script: on SIGTERM, srun would end its step at once.
# shellcheck disable=SC2317 # called by the traps
stop_training() {
    is_stopped=yes
    was_signalled=yes
    scancel --signal=TERM "$SLURM_JOB_ID" || true # the training may have just ended
}
trap 'is_out_of_time=yes; stop_training' USR1
trap stop_training TERM

# Give the workers nearly all of the time that SLURM leaves to save a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100
srun --kill-on-bad-exit=1 --ntasks-per-node=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$head_node:$port" \
    --no-python train "$@" --resume auto &
training=$!

status=0
wait "$training" || status=$?
# A signal interrupts `wait` while the training is still saving.
while [[ $was_signalled == yes ]]; do
    was_signalled=no
    status=0
    wait "$training" || status=$?
done

if [[ $is_stopped == yes && $status != 0 ]]; then
    echo "torchrun raises the SignalException above when it stops; the same command continues the run"
fi
if [[ $is_out_of_time == yes && $status != 0 ]]; then
    echo "the time limit is near: job $SLURM_JOB_ID is requeued"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
