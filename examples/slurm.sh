#!/usr/bin/env bash
# Several machines under Slurm: one torchrun on each, which starts a process for every GPU.
#
#   sbatch examples/slurm.sh resnet50-imagenet runs/r50 --set data.path=/data/imagenet
#
# Where weights fit a GPU, but not with gradients, θ and the optimizer's state: --set parallel=fsdp2 --set checkpoint_async=true.
# DIR must be on a file system that all machines share. Before its time is up, or when it is preempted, the job gets SIGTERM:
# the run saves, the job goes back to the queue, and the next one continues.
#SBATCH --job-name=spartan
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

if (( $# < 2 )); then
    echo "usage: sbatch $0 RECIPE DIR [--set KEY=VALUE ...]" >&2
    exit 2
fi
recipe=$1 out=$2
shift 2

# A run that is there already is continued: this job may be the second of its kind.
if [[ -e $out/recipe.yaml ]]; then
    arguments=(--resume "$out")
else
    arguments=("$recipe" --out "$out" "$@")
fi

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(( 20000 + SLURM_JOB_ID % 20000 ))

srun --kill-on-bad-exit=1 torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-8}" --max-restarts=3 \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:$port" --rdzv-conf=join_timeout=600 \
    -m spartan train "${arguments[@]}" &
work=$!

# SIGTERM comes to this script alone; it is passed on, and the job is put back once the run has saved.
stopped=
trap 'stopped=yes; kill -TERM "$work" 2>/dev/null || true' TERM
code=0
wait "$work" || code=$?
if [[ -n $stopped ]]; then
    wait "$work" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
