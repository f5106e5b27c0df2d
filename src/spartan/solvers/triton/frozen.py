"""Answers problems whose masks are fixed by Triton kernels: only kept weights move."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import FINE, Flags, Grads
from spartan.solvers.forms import Form
from spartan.solvers.frozen import FrozenSolver
from spartan.solvers.triton import kept
from spartan.solvers.triton.launch import Launcher
from spartan.solvers.triton.tables import Addresses

BLOCK = 2048
INDICES = {torch.int32: tl.int32, torch.int64: tl.int64}


class FrozenTritonSolver(FrozenSolver):
    """Launches the kernels of fixed masks, over all targets at once."""

    name = "triton"

    def __init__(self, problem: Problem, flags: Flags, kept: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__(problem, flags, kept)
        if len({index.dtype for index in self.places}) > 1:  # some have 2³¹ entries or more
            self.places = [index.long() for index in self.places]
        self.kernels = Launcher(problem, flags)
        self._to_masks, self._to_indices = (Addresses(flags.bad.device, fixed=True) for _ in range(2))

    def hold(self) -> None:
        """Note launches, to run them as one."""
        self.kernels.replay.hold()

    def release(self) -> None:
        """Run them."""
        self.kernels.replay.release()

    @cached_property
    def _spans(self) -> tuple[Tensor, Tensor]:
        """The first block of each piece, and what is kept of each block."""
        device, spans = self.flags.bad.device, []
        blocks: list[int] = []
        before = 0
        for parameter, index in zip(self.kernels.parameters, self.places, strict=True):
            end = parameter.numel()
            edges = torch.arange(0, end + BLOCK, BLOCK, device=device).clamp_(max=end)
            upto = torch.searchsorted(index, edges.to(index.dtype))
            spans.append(torch.stack((upto[:-1], upto[1:]), 1))
            blocks += range(before, before + len(edges) - 1, self.kernels.pieces.length // BLOCK)
            before += len(edges) - 1
        return torch.tensor(blocks, dtype=torch.int64).to(device), torch.cat(spans)

    def _places(self) -> tuple[Tensor, ...]:
        return self._to_indices.of(self.places), self.kernels.pieces.table, *self._spans

    @property
    def _kinds(self) -> dict[str, Any]:
        return {"DTYPE": self.kernels.dtype, "INDEX": INDICES[self.places[0].dtype]}

    def put(self, which: Sequence[int]) -> None:
        """θ into the parameters of these targets, which hold w: zero where not kept."""
        self._spread(self.kernels.some(which), False)

    def write(self, form: Form | None) -> None:
        """w = θ · m into the parameters, zero where not kept."""
        self._spread(list(self.kernels.parameters), True)

    def _spread(self, parameters: Sequence[Tensor | None], weights: bool) -> None:
        x = self.kernels
        to, thetas, masks = x.to_parameters.of(parameters), x.to_thetas.of(self.thetas), self._to_masks.of(self.masks)
        tables, kinds = (to, thetas, masks, *self._places()), {"WEIGHTS": weights, **self._kinds}
        x.write(("spread", weights), lambda: x.run(kept.spread, *tables, **kinds), parameters)

    def take(self, which: Sequence[int]) -> None:
        """θ from these parameters, unless a gradient was not finite; entries that are not finite stay as they were."""
        x = self.kernels
        tables = x.to_parameters.of(x.some(which)), x.to_thetas.of(self.thetas), *self._places(), x.bad, x.numbers
        x.replay("take", lambda: x.run(kept.collect, *tables, FINE=FINE, **self._kinds))

    def check_weights(self, which: Sequence[int]) -> None:
        """Nothing: kernels look while they take."""

    def check_gradients(self, grads: Grads) -> None:
        """Name the first gradient that is not finite, and take them all away if there is one."""
        self.kernels.check(self.kernels.laid_out(grads))

    def turn(self, form: Form | None, grads: Grads) -> Grads:
        """g · m where kept, zero elsewhere, in place."""
        x, turned = self.kernels, self.kernels.laid_out(grads)
        if any(g is not None for g in turned):
            tables = x.to_grads.of(turned), self._to_masks.of(self.masks), *self._places()
            kinds = {"GRAD": x.kinds(turned)["GRAD"], **self._kinds}
            x.replay(("gradients", kinds["GRAD"]), lambda: x.run(kept.mask_gradients, *tables, **kinds))
        return turned
