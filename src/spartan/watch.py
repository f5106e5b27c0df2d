"""Looking for NaN, infinity and unsolved masks without waiting: numbers on the device, read once they have arrived."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

FINE = torch.iinfo(torch.int32).max  # a flag that names nobody
FAR = 1e-3  # a mask this far from its budget, as a fraction of it, deserves a word; 1e-6 is the rule


class Watch:
    """Two flags: the first target with a gradient, and with a weight, that is not finite.

    `residuals` has a row per group, which kernels fill on the way: a₁/a₂, and |Σ c m − k| / k of the soft mask.
    """

    def __init__(self, names: Sequence[str], device: torch.device, groups: int = 1) -> None:
        self.names = list(names)
        self.residuals = torch.zeros(groups, 2, dtype=torch.float64, device=device)
        self._residuals_seen = (
            torch.zeros(groups, 2, dtype=torch.float64).pin_memory() if device.type == "cuda" else self.residuals
        )
        self._warned = False
        self.flags = torch.full((2,), FINE, dtype=torch.int32, device=device)
        self._numbers = torch.arange(len(names), dtype=torch.int32, device=device)
        self._seen = torch.full((2,), FINE, dtype=torch.int32).pin_memory() if device.type == "cuda" else self.flags
        self._arrived: torch.cuda.Event | None = None
        self._step = 0

    def note(self, kind: int, which: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Raise the flag for the first of these tensors that is not finite."""
        if not tensors:
            return
        largest = torch.stack([norm.float() for norm in torch._foreach_norm(list(tensors), float("inf"))])
        numbers = self._numbers if len(which) == len(self.names) else self._numbers[list(which)]
        bad = torch.where(torch.isfinite(largest), FINE, numbers).min().int()
        self.flags[kind] = torch.minimum(self.flags[kind], bad)

    def send(self, step: int) -> None:
        """Start fetching the flags; nothing waits for them."""
        if self.flags.device.type != "cuda":
            self._step = step
        if self._arrived is not None or self.flags.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        self._seen.copy_(self.flags, non_blocking=True)
        self._residuals_seen.copy_(self.residuals, non_blocking=True)
        self._step = step
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def look(self, wait: bool = False) -> None:
        """Raise what the flags say, if they have arrived."""
        if wait:
            self._seen.copy_(self.flags)
            self._residuals_seen.copy_(self.residuals)
        elif self.flags.device.type == "cuda":
            if self._arrived is None or not self._arrived.query():
                return
            self._arrived = None
        self._look_at_residuals()
        gradient, weight = self._seen.tolist()
        if gradient == weight == FINE:
            return
        self.flags.fill_(FINE)
        self._seen.fill_(FINE)
        self._arrived = None
        if gradient != FINE:
            raise RuntimeError(
                f"the gradient of {self.names[gradient]} held NaN or infinite values, at step {self._step} or shortly "
                "before; since then nothing was updated. Lower the learning rate, clip gradients, or use a GradScaler "
                "with float16."
            )
        raise RuntimeError(
            f"{self.names[weight]} would have held NaN or infinite weights, at step {self._step} or shortly before; "
            "those were not taken. The learning rate is probably too high: go back to a checkpoint."
        )

    def _look_at_residuals(self) -> None:
        """Warn, once, of a mask that misses its budget."""
        if self._warned:
            return
        worst, group = max((abs(row[1]), i) for i, row in enumerate(self._residuals_seen.tolist()))
        if worst > FAR:
            self._warned = True
            warnings.warn(
                f"the soft mask of group {group} was {worst:.2%} off its budget at step {self._step} or shortly before "
                "(the hard one is exact all the same); β is probably too large for these weights' precision",
                RuntimeWarning,
                stacklevel=3,
            )
