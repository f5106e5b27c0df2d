"""Prunes layer by layer, by what calibration data say of the inputs of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spartan.distributed import is_dtensor
from spartan.problem.problem import Problem
from spartan.problem.targets import Globs, unwrap
from spartan.prune.batches import Batch, as_in_use
from spartan.prune.blocks import find_blocks
from spartan.prune.devices import Mover
from spartan.prune.layout import Layout
from spartan.prune.products import Product, Products
from spartan.prune.progress import PruningProgress
from spartan.prune.report import PrunedLayer
from spartan.prune.sparsegpt import sparsegpt
from spartan.prune.stages import Stages
from spartan.prune.statistics import Statistics
from spartan.prune.wanda import wanda

# The criteria that look at data: what they make of a layer, and whether they want Σ x xᵀ of its inputs, or only Σx².
CRITERIA: dict[str, tuple[Callable[[Layout, Tensor], Tensor], bool]] = {
    "wanda": (wanda, False),
    "sparsegpt": (sparsegpt, True),
}


@dataclass(frozen=True)
class Calibrated:
    """What was done: the layers in order, the blocks in order, and why there are none."""

    layers: list[PrunedLayer]
    blocks: list[str]
    why_whole: str


@dataclass
class Undo:
    """Has the weights as they were before each was pruned, in main memory; or, where nobody wants that, only their names."""

    wanted: bool
    names: list[str] = field(default_factory=list)
    _weights: list[tuple[Layout, Tensor]] = field(default_factory=list)

    def remember(self, layout: Layout) -> None:
        """A layer is about to be pruned."""
        self.names.append(layout.target.name)
        if self.wanted:
            self._weights.append((layout, layout.target.local.to("cpu", copy=True)))

    def restore(self, error: BaseException) -> None:
        """Put all weights back, or have the error say which are pruned."""
        for layout, before in self._weights:
            layout.target.local.copy_(before)
        if self.names and not self.wanted:
            error.add_note(
                f"undo=False: these weights of the model are pruned, the others not: {', '.join(self.names)}"
            )


def check(problem: Problem, criterion: str, budget: object) -> list[Layout]:
    """The layers; ValueError for what a criterion cannot do."""
    if any(len(segment.targets) > 1 for segment in problem.segments) and problem.pattern.rows is None:
        raise ValueError(
            f"budget={budget!r} with criterion={criterion!r}, whose scores mean something within a layer only; pass "
            '"uniform", "erk" or {glob: sparsity}'
        )
    layouts = [Layout(problem, i) for i in range(len(problem.targets))]
    for layout in layouts:
        name = layout.target.name
        if is_dtensor(layout.target.parameter):
            raise ValueError(
                f"{name} is sharded over several processes, and criterion={criterion!r} needs it whole; prune the model "
                "before fully_shard()"
            )
        if layout.transposed_convolution:
            raise ValueError(
                f"criterion={criterion!r} is not there for transposed convolutions: leave {name} dense with "
                f"exclude=[{name!r}], or prune it by magnitude"
            )
        if criterion == "sparsegpt" and layout.sides is None:
            raise ValueError(
                f"pattern={problem.pattern!r} with criterion='sparsegpt', which needs units that are tiles of rows × "
                'columns: single weights, blocks, channels or n of every m; criterion="wanda" takes any'
            )
    return layouts


@torch.no_grad()
def prune_with_data(
    model: nn.Module, layouts: Sequence[Layout], criterion: str, batches: Sequence[Batch], mover: Mover,
    blocks: Globs, undo: bool, progress: bool | None,
) -> Calibrated:  # fmt: skip
    """Prune every layer, in place, in the order in which they run; whatever goes wrong, the model is as it was."""
    inner = unwrap(model)
    found, why = find_blocks(inner, {id(layout.target.parameter) for layout in layouts}, blocks)
    numbered, before = dict(enumerate(layouts)), Undo(undo)
    with PruningProgress(progress, len(layouts)) as shown, as_in_use(inner):
        try:
            shown.stage("looking at the model")
            stages = Stages(inner, found, batches, mover)
            with mover.rest(stages.blocks):
                unusable = stages.explore(numbered)
            _check_uses(numbered, stages, len(batches))
            with mover.rest(stages.blocks):
                layers = _prune_stages(stages, numbered, criterion, before, shown)
        except BaseException as error:
            before.restore(error)
            raise
    return Calibrated(layers, stages.order, why or unusable)


def _check_uses(layouts: dict[int, Layout], stages: Stages, batches: int) -> None:
    unused = [layout.target.name for number, layout in layouts.items() if number not in stages.stage_of]
    if unused:
        many = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise ValueError(
            f"calibration: none of the {batches} batches reaches {unused[0]}{many}: no product of the weight with inputs "
            "was seen (it is not used, or a fused kernel such as an LSTM's computes it); leave it dense with "
            f"exclude={unused[:1]!r}, or prune it by magnitude"
        )


def _prune_stages(
    stages: Stages, layouts: dict[int, Layout], criterion: str, before: Undo, shown: PruningProgress
) -> list[PrunedLayer]:
    rule, moments = CRITERIA[criterion]
    done: list[PrunedLayer] = []
    for stage in range(len(stages.order) + 1):
        block = stages.order[stage] if stage < len(stages.order) else ""
        mine = {number: layouts[number] for number, at in stages.stage_of.items() if at == stage}
        if not mine and not block:
            break
        shown.stage(block or ("after the blocks" if stage else "the whole model"))
        with stages.at(stage):
            if mine:
                sums = _statistics(stages, mine, moments)
                for number, layout in mine.items():
                    before.remember(layout)
                    layout.write(rule(layout, sums.pop(number).sums))
                    kept = layout.kept * layout.problem.sizes[number]
                    inside = block if layout.target.name.startswith(f"{block}.") else ""
                    done.append(PrunedLayer(layout.target.name, layout.target.numel, kept, inside))
                    shown.layer_done()
            if stages.is_read(stage):
                for batch in range(len(stages.batches)):
                    stages.keep(batch, stages.run(batch))
            stages.forget()
    return done


def _statistics(stages: Stages, layouts: dict[int, Layout], moments: bool) -> dict[int, Statistics]:
    """What all batches say of the inputs of these layers."""
    sums = {number: Statistics(layout, moments) for number, layout in layouts.items()}

    def see(product: Product) -> None:
        for piece in product.inputs():
            sums[product.number].add(product.groups, piece)

    for batch in range(len(stages.batches)):
        stages.run(batch, Products(layouts, see))
    for number, layout in layouts.items():
        name, found = layout.target.name, sums[number]
        if not found.finite:
            raise ValueError(
                f"calibration: the inputs of {name} hold NaN or infinite values, or such as are too large to square in "
                f"{str(found.dtype).removeprefix('torch.')}; look at the batches, and at the model in its own precision"
            )
        empty: list[Any] = [group for group, samples in enumerate(found.samples) if not samples]
        if empty:
            raise ValueError(
                f"calibration: no batch reaches part {empty[0]} of {layout.groups} of {name} (its experts, groups, or "
                f"queries, keys and values); pass more batches, or leave it dense with exclude=[{name!r}]"
            )
    return sums
