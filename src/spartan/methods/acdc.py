"""AC/DC: alternating compressed and decompressed training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spartan.groups import Group
from spartan.methods.base import Method, masked, masked_gradients
from spartan.methods.registry import register
from spartan.ops.select import Threshold
from spartan.schedules import Moment


@register
@dataclass(frozen=True)
class ACDC(Method):
    """AC/DC: dense and sparse phases in turn; each sparse phase trains the top-k mask of its first moment.

        dense phase       θ ← θ − η · ∇L(θ)                     what was pruned starts again from zero
        sparse phase      θ ← Π_k(θ), M = [θ ≠ 0]               once, when it begins
                          θ ← M ⊙ (θ − η · M ⊙ ∇L(θ))           at every step

    The run begins dense, alternates, and ends with a longer dense phase and a longer sparse one: finetuning. Lengths are
    fractions of the run; the defaults are the paper's for 100 epochs: 10 dense, then 5 sparse, 5 dense, 5 sparse, …,
    10 dense from epoch 75, and 15 sparse (`finetune`). Its CIFAR-10 runs of 200 epochs have longer ones,
    `ACDC(first_dense=0.05, phase=0.1)`. Momentum of pruned weights is left to fade during a sparse phase.

    Args:
        first_dense: fraction of the run that is dense at the beginning.
        phase: fraction of the run that every alternating phase lasts; at least one step.
        last_dense: fraction of the run that is dense right before the final sparse phase.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> s = spartan.Sparsifier(model, sparsity=0.75, total_steps=20, method=ACDC()).attach(optimizer)
        >>> kept = []
        >>> for _ in range(20):
        ...     kept.append(s.layers()[0].kept)
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> kept
        [64, 64, 16, 64, 16, 64, 16, 64, 16, 64, 16, 64, 16, 64, 16, 64, 64, 16, 16, 16]
    """

    first_dense: float = 0.10
    phase: float = 0.05
    last_dense: float = 0.10

    name = "acdc"
    year = 2021
    mask_rule = "top-k of |θ| when a sparse phase begins, everything in the dense phases between"
    gradient_rule = "g where kept, else 0"
    reference = (
        "Peste et al., AC/DC: Alternating compressed/decompressed training of deep neural networks, NeurIPS 2021"
    )
    sparse_from = "finetune"
    refuses_nm = ""
    warmup = 0.0
    finetune = 0.15

    def __post_init__(self) -> None:
        for name in ("first_dense", "phase", "last_dense"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"ACDC: {name}={value!r} is not a fraction of the run; it must lie in [0, 1]")

    def dense_at(self, at: Moment) -> bool:
        """Whether the next step belongs to a dense phase."""
        first, phase, last = (round(f * at.total_steps) for f in (self.first_dense, self.phase, self.last_dense))
        if at.phase == "finetune":
            return False
        if at.step < first or at.step >= at.freeze_step - last:
            return True
        return (at.step - first) // max(phase, 1) % 2 == 1

    def setup(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """Everything is kept before the first phase."""
        self._everything(group, thetas)

    def choose(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> None:
        """A new mask where a phase begins; in between, momentum must not move what is pruned."""
        self._project(group, thetas)  # the step behind was taken with the mask so far
        if self.dense_at(at):
            if not _is_everything(group.threshold):
                self._everything(group, thetas)
        elif _is_everything(group.threshold) or at.phase == "finetune":
            scores = group.scores(thetas)
            group.threshold = group.select(scores, group.k)
            for i, kept in enumerate(group.keep(scores, group.threshold)):
                group.tensors[f"keep{i}"] = kept
            self._project(group, thetas)

    def keep(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        """The mask of this phase."""
        return [group.tensors[f"keep{i}"] for i in range(len(thetas))]

    def weights(self, group: Group, thetas: Sequence[Tensor], at: Moment) -> list[Tensor]:
        """M ⊙ θ."""
        return self._masked(group, thetas)

    def gradient(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None], at: Moment
    ) -> list[Tensor | None]:
        """M ⊙ g."""
        if _is_everything(group.threshold):
            return list(grads)
        keep = group.expand(self.keep(group, thetas))
        return masked_gradients(grads, keep)

    def _masked(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        keep = group.expand(self.keep(group, thetas))
        return [masked(theta, kept) for theta, kept in zip(thetas, keep, strict=True)]

    def _everything(self, group: Group, thetas: Sequence[Tensor]) -> None:
        group.threshold = Threshold(-math.inf, cost=group.total)
        for i, theta in enumerate(thetas):
            group.tensors[f"keep{i}"] = torch.ones(group.units[i], dtype=torch.bool, device=theta.device)

    def _project(self, group: Group, thetas: Sequence[Tensor]) -> None:
        """θ ← M ⊙ θ."""
        if not _is_everything(group.threshold):
            for theta, w in zip(thetas, self._masked(group, thetas), strict=True):
                theta.copy_(w)


def _is_everything(threshold: Threshold | None) -> bool:
    """Whether this is a dense phase; a threshold that is still on the device belongs to a sparse one."""
    return threshold is None or (not isinstance(threshold.value, Tensor) and threshold.value == -math.inf)
