#!/usr/bin/env bash
# One machine, all its GPUs (without a GPU: two CPU processes). A worker that dies is started again, and the run goes on.
#
#   examples/torchrun.sh resnet50-imagenet runs/r50 --set data.path=/data/imagenet
#
# Set PROCESSES to use another number; batch_size in the recipe is the images of all of them together.
# Where weights fit a GPU, but not with gradients, θ and the optimizer's state: --set parallel=fsdp2 --set checkpoint_async=true.
set -euo pipefail

if (( $# < 2 )); then
    echo "usage: $0 RECIPE DIR [--set KEY=VALUE ...]" >&2
    exit 2
fi
recipe=$1 out=$2
shift 2

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
processes=${PROCESSES:-$(( gpus > 0 ? gpus : 2 ))}

# A run that is there already is continued.
if [[ -e $out/recipe.yaml ]]; then
    arguments=(--resume "$out")
else
    arguments=("$recipe" --out "$out" "$@")
fi

exec torchrun --standalone --nproc-per-node="$processes" --max-restarts=3 -m spartan train "${arguments[@]}"
