#!/bin/bash
# Makes a column of a data folder on many nodes, with a job array and without Ray. Task K of N makes part K/N:
#
#     sbatch --array 1-16 --cpus-per-task 8 scripts/slurm_prep.sh chunk --data DATA --len 15s
#     sbatch --array 1-16 --cpus-per-task 8 --gpus-per-node 1 \
#         scripts/slurm_prep.sh latents --data DATA --vae stabilityai/sd-vae-ft-mse
#
# The tasks share DATA. They may run at any time, even one after the other (--array 1-16%4). The first task probes the
# sources while tasks that start at the same time wait. The last task writes the lists, and makes the variant the current
# one. Near its time limit, a task returns to the queue, and SLURM requeues it after a node failure or a preemption. To
# submit only a task that has failed, state the number of parts, which is then not the size of the array:
#
#     PARTS=16 sbatch --array 3 scripts/slurm_prep.sh chunk --data DATA --len 15s
#
# Use the --cpus-per-task of your nodes: SLURM rejects a job that does not fit on any node. The same command without
# SLURM, `prep chunk --data DATA --len 15s`, makes all shards that are missing.
#SBATCH --job-name=clipmill-prep
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.log
set -euo pipefail

if [[ -z ${SLURM_ARRAY_TASK_ID:-} ]]; then
    echo "error: this job is not an array" >&2
    echo "hint: submit with --array 1-N, such as sbatch --array 1-16 scripts/slurm_prep.sh $*" >&2
    exit 2
fi
parts=${PARTS:-}
if [[ -z $parts ]]; then
    parts=$SLURM_ARRAY_TASK_MAX
    # shellcheck disable=SC2153 # SLURM sets it
    if [[ $SLURM_ARRAY_TASK_MIN != 1 || $SLURM_ARRAY_TASK_COUNT != "$parts" ]]; then
        echo "error: the array is not 1-N, so the number of parts is unknown" >&2
        echo "hint: set PARTS, such as PARTS=16 sbatch --array $SLURM_ARRAY_TASK_ID scripts/slurm_prep.sh $*" >&2
        exit 2
    fi
fi

is_out_of_time=no
was_signalled=no
# shellcheck disable=SC2317 # called by the traps
stop_prep() {
    was_signalled=yes
    kill -TERM "$prep" 2>/dev/null || true # prep may have just ended
}
trap 'is_out_of_time=yes; stop_prep' USR1
trap stop_prep TERM

prep "$@" --part "$SLURM_ARRAY_TASK_ID/$parts" --engine processes --workers "${SLURM_CPUS_PER_TASK:-1}" &
prep=$!

status=0
wait "$prep" || status=$?
# A signal interrupts `wait` while prep is still stopping its workers.
while [[ $was_signalled == yes ]]; do
    was_signalled=no
    status=0
    wait "$prep" || status=$?
done

if [[ $is_out_of_time == yes && $status != 0 ]]; then
    echo "the time limit is near: job $SLURM_JOB_ID is requeued"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
