#!/bin/bash
# Makes a column of a data folder on all nodes of a SLURM job, with a Ray cluster that exists as long as the job:
#
#     sbatch --nodes 4 scripts/slurm_prep_ray.sh chunk --data DATA --len 15s
#
# The first node is the head of the cluster. Nodes that join late or are lost do not end the run. Unlike an array
# (slurm_prep.sh), the job waits until all of its nodes are free at the same time, but no node is idle before the last
# shard. Near its time limit, and after a node failure or a preemption, the job returns to the queue and continues later.
#SBATCH --job-name=clipmill-prep-ray
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Use a port per job, so that two jobs on a node do not conflict.
port=$((20000 + SLURM_JOB_ID % 20000))
# Only processes that know the token may send work to the cluster.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0
export head_node port

# A lost node ends only its own task.
# shellcheck disable=SC2016 # expanded on the nodes
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill bash -c '
    flags=(--node-ip-address "$SLURMD_NODENAME" --block)
    flags+=(--num-cpus "${SLURM_CPUS_PER_TASK:-1}" --num-gpus "${SLURM_GPUS_ON_NODE:-0}")
    if [[ $SLURM_NODEID == 0 ]]; then
        exec ray start --head --port "$port" --include-dashboard false "${flags[@]}"
    fi
    until ray status --address "$head_node:$port" >/dev/null 2>&1; do sleep 2; done
    exec ray start --address "$head_node:$port" "${flags[@]}"' &
nodes=$!
until ray status --address "$head_node:$port" >/dev/null 2>&1; do
    kill -0 "$nodes" # a head that cannot start ends the job
    sleep 2
done

is_out_of_time=no
was_signalled=no
# shellcheck disable=SC2317 # called by the traps
stop_prep() {
    was_signalled=yes
    kill -TERM "$prep" 2>/dev/null || true # prep may have just ended
}
trap 'is_out_of_time=yes; stop_prep' USR1
trap stop_prep TERM

prep "$@" --engine ray --address "$head_node:$port" &
prep=$!

status=0
wait "$prep" || status=$?
# A signal interrupts `wait` while prep is still stopping its workers.
while [[ $was_signalled == yes ]]; do
    was_signalled=no
    status=0
    wait "$prep" || status=$?
done

kill "$nodes" 2>/dev/null || true
wait "$nodes" || true
if [[ $is_out_of_time == yes && $status != 0 ]]; then
    echo "the time limit is near: job $SLURM_JOB_ID is requeued"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
