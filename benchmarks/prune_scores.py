"""Why Wanda may lose to magnitudes on a small decoder: whole procedures in straight lines and float64, one choice at a time.

    python benchmarks/bench_prune.py --size full --steps 1500 --seed 0 --stages dense --dense 0.pt --device cuda
    python benchmarks/prune_scores.py 0.pt --size full --device cuda [--csv benchmarks/prune_scores.csv]

Nothing here but the model, the text and the loss is the library's: inputs come from hooks on the linear layers, and the
model, the scores and their order are in float64. What is varied is the score of a weight, |w| or |w|·‖x‖ or the latter in
all layers but `down`, whose inputs are those of the hidden units; and with what it competes: the weights of its output
row, or of its whole layer. Wanda is |w|·‖x‖ in rows, and the criterion "magnitude" of `bench_prune.py` is |w| in layers.
For these two, the library's own masks are compared with those of the straight lines. Layers go block by block, with the
inputs that the pruned blocks before give.
"""

from __future__ import annotations

import argparse
import copy
import csv
import datetime
from pathlib import Path
from typing import Any

import torch
from bench_prune import SIZES, Bench, Setting, git_commit, settings
from torch import Tensor, nn

import spartan
from spartan.gpt import GPT

COLUMNS = [
    "date",
    "commit",
    "device",
    "torch",
    "size",
    "seed",
    "steps",
    "sparsity",
    "pattern",
    "score",
    "among",
    "loss",
]
COLUMNS += ["masks_differ", "of", "library_loss"]
# The score, what it competes with, and the library's criterion that is the same.
VARIANTS = [
    ("|w|", "layer", "magnitude"),
    ("|w|", "row", ""),
    ("|w|·‖x‖", "layer", ""),
    ("|w|·‖x‖", "row", "wanda"),
    ("|w|·‖x‖ but down", "row", ""),
]


def squares(model: GPT, block: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Σx² of every input of the block's linear layers, over all batches."""
    sums: dict[str, Tensor] = {}
    hooks = []
    for name, layer in block.named_modules():
        if isinstance(layer, nn.Linear):

            def see(module: nn.Module, given: Any, name: str = name) -> None:
                sums[name] = sums.get(name, 0) + given[0].flatten(0, 1).square().sum(0)

            hooks.append(layer.register_forward_pre_hook(see))
    for tokens in batches:
        model(tokens)
    for hook in hooks:
        hook.remove()
    return sums


def kept(scores: Tensor, setting: Setting, among: str) -> Tensor:
    """Of the scores of a layer (rows × columns), which are kept."""
    if setting.pattern is not None:
        n, m = setting.pattern.n, setting.pattern.m
        fours = scores.view(-1, m)
        return torch.zeros_like(fours, dtype=torch.bool).scatter_(1, fours.topk(n).indices, True).view_as(scores)
    lines = scores if among == "row" else scores.flatten()[None]
    each, rest = divmod(int((1 - setting.sparsity) * scores.numel() + 1e-6), len(lines))
    values, order = lines.sort(dim=1, descending=True, stable=True)
    found = torch.zeros_like(lines, dtype=torch.bool).scatter_(1, order[:, :each], True)
    if rest:  # one more for the rows whose next score is the highest
        more = values[:, each].topk(rest).indices
        found[more, order[more, each]] = True
    return found.view_as(scores)


@torch.no_grad()
def pruned(model: GPT, setting: Setting, score: str, among: str, batches: list[Tensor]) -> GPT:
    """A pruned copy in float64."""
    model = copy.deepcopy(model).double().eval()
    for block in model.layers:
        sums = squares(model, block, batches)
        for name, total in sums.items():
            weight = block.get_parameter(f"{name}.weight")
            by_inputs = "x" in score and not (name == "down" and "but down" in score)
            scores = weight.abs() * (total.sqrt() if by_inputs else 1.0)
            weight.mul_(kept(scores, setting, among))
    return model


def compare(ours: GPT, theirs: nn.Module) -> tuple[int, int]:
    """In how many weights of the blocks the masks of two models differ, and of how many."""
    pairs = [(p, theirs.get_parameter(n)) for n, p in ours.named_parameters() if n.startswith("layers") and p.ndim > 1]
    return sum(int(((p != 0) != (q != 0)).sum()) for p, q in pairs), sum(p.numel() for p, _ in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", type=Path, help="written by bench_prune.py --dense")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--settings", type=settings, default="0.5,0.7,0.8,2:4")
    parser.add_argument("--calibration", type=int, default=128, help="sequences")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    found = torch.load(args.dense, map_location=device)
    made = found["made"]
    if made["size"] != args.size:
        parser.error(f"{args.dense} holds a model of {made}")
    bench = Bench(SIZES[args.size], device, False)
    model = bench.model(made["seed"])
    model.load_state_dict(found["model"])
    batches = list(bench.sequences(bench.starts(args.calibration, seed=1000 + made["seed"]))[:, :-1].split(16))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    first = [datetime.date.today().isoformat(), git_commit(), where, torch.__version__, *made.values()]
    print(f"{where}, torch {torch.__version__}; {made}; dense loss {bench.loss(model):.4f}", flush=True)
    for setting in args.settings:
        for score, among, criterion in VARIANTS:
            if setting.pattern is not None and (score, among) in (("|w|", "row"), ("|w|·‖x‖", "layer")):
                continue  # n of every m compete among themselves in any case
            mine = pruned(model, setting, score, among, batches)
            loss = bench.loss(copy.deepcopy(mine).to(next(model.parameters()).dtype))
            row: list[Any] = [setting.sparsity, str(setting), score, among, f"{loss:.5f}"]
            more = ""
            if criterion:
                data: dict[str, Any] = {} if criterion == "magnitude" else {"calibration": batches, "progress": False}
                library = spartan.prune(
                    copy.deepcopy(model), setting.sparsity, criterion=criterion, **setting.asked, **data
                )
                differ, every = compare(mine, library)
                row += [differ, every, f"{bench.loss(library):.5f}"]
                more = f"; {criterion} of the library {row[-1]}, masks differ in {differ} of {every:,} weights"
            print(
                f"{setting.sparsity:4.0%} {setting!s:12} {score:16} in {among}s: loss {loss:.4f}{more}",
                flush=True,
            )
            if args.csv is not None:
                new = not args.csv.exists() or not args.csv.stat().st_size
                with args.csv.open("a", newline="") as file:
                    csv.writer(file).writerows([COLUMNS, [*first, *row]] if new else [[*first, *row]])


if __name__ == "__main__":
    main()
