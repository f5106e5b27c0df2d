"""The kernels of groups: their top-k, their weights and their gradients, launched without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spartan.kernels import gradient, weights
from spartan.kernels.engine import Engine
from spartan.kernels.replay import Replay
from spartan.kernels.state import State, States
from spartan.kernels.tables import Addresses, Pieces
from spartan.kernels.topk import DTYPES, TopK
from spartan.ops.select import Threshold
from spartan.ops.soft_topk import Dual

if TYPE_CHECKING:
    from spartan.kernels.team import Team, Together

FINE = torch.iinfo(torch.int32).max  # a flag that names no tensor


class Launcher:
    """Launches kernels over parameters and their gradients; None stands for one that is left alone.

    Args:
        parameters: the model's tensors.
        pieces: how their entries are divided among programs.
        bad: two flags: the first tensor with a gradient, and with a weight, that is not finite.
        first: the number of the first tensor there.
    """

    together: Together | None = None  # who launches for this group and others at once

    def __init__(self, parameters: Sequence[Tensor | None], pieces: Pieces, bad: Tensor, first: int) -> None:
        self.parameters, self.pieces, self.bad, self.first = list(parameters), pieces, bad, first
        self.dtype = next(p.dtype for p in parameters if p is not None)
        self._to_parameters, self._to_grads = Addresses(bad.device), Addresses(bad.device)
        self._replay = Replay(bad.device)

    def check(self, grads: Sequence[Tensor | None]) -> None:
        """Name the first gradient that is not finite, and take them all away if there is one."""
        self._do(Launcher._check, grads)

    def _do(self, what: Callable[..., None], tensors: Sequence[Tensor | None], *how: Any) -> None:
        """Launch something over these tensors, now or together with others."""
        if self.together is None or not self.together.leave(self.first, what, tensors, *how):
            what(self, tensors, *how)

    def _check(self, grads: Sequence[Tensor | None]) -> None:
        grad_type, table = self._kinds(grads)["GRAD"], self.pieces.table
        to_grads = self._to_grads.of(grads)
        kinds = {"GRAD": grad_type, "ALIGNED": self._aligned(self._to_grads)}

        def launch() -> None:
            self._run(gradient.check, to_grads, table, self.bad, self.first, **kinds)
            self._run(gradient.clear, to_grads, table, self.bad, FINE=FINE, **kinds)

        self._replay(("check", *kinds.values()), launch)

    def _run(self, kernel: Any, *arguments: Any, pieces: Pieces | None = None, **kinds: Any) -> None:
        kernel[((pieces or self.pieces).count,)](*arguments, BLOCK=2048, num_warps=8, **kinds)

    def _weights(
        self, key: Any, launch: Callable[[], None], parameters: Sequence[Tensor | None] | None = None
    ) -> None:  # fmt: skip
        self._replay(key, launch)
        written = [p for p in (self.parameters if parameters is None else parameters) if p is not None]
        torch.autograd.graph.increment_version(written)  # behind torch's back

    def _aligned(self, *tables: Addresses) -> bool:
        """Whether kernels may read and write 16 bytes at a time."""
        return self.pieces.even and all(table.aligned for table in tables)

    @property
    def _dtype(self) -> Any:
        return DTYPES[self.dtype]

    def _kinds(self, grads: Sequence[Tensor | None]) -> dict[str, Any]:
        return {"GRAD": next((DTYPES[g.dtype] for g in grads if g is not None), self._dtype), "DTYPE": self._dtype}


class Kernels(Launcher):
    """Launches the kernels of single weights, of one group or of many at once.

    Args:
        parameters: the model's tensors.
        thetas: the dense weights of each, with the same strides.
        pieces, bad, first: as for `Launcher`.
        out: two numbers a group that the gradients leave: a₁/a₂, and how far the mask is from its budget.
        ranked: how those entries are divided that masks are solved for, by group, with their costs and factors.
    """

    topk: TopK
    state: State | States

    def __init__(
        self,
        parameters: Sequence[Tensor | None],
        thetas: Sequence[Tensor | None],
        pieces: Pieces,
        bad: Tensor,
        first: int,
        out: Tensor,
        ranked: Pieces,
    ) -> None:
        super().__init__(parameters, pieces, bad, first)
        self.thetas, self.out, self.ranked = list(thetas), out, ranked
        self._sums = torch.zeros(ranked.count, 4, dtype=torch.float64, device=bad.device)
        self.masks: list[Tensor | None] = [None] * len(self.parameters)  # that a method stores
        self._to_thetas, self._to_masks = Addresses(bad.device), Addresses(bad.device)

    def _put(self, parameters: Sequence[Tensor | None]) -> None:
        to, of = self._to_parameters.of(parameters), self._to_thetas.of(self.thetas)
        kinds = self._of_weights
        launch = lambda: self._run(weights.put, to, of, self.pieces.table, **kinds)  # noqa: E731
        self._weights(("put", *kinds.values()), launch, parameters)

    def _take(self, parameters: Sequence[Tensor | None]) -> None:
        of, to = self._to_parameters.of(parameters), self._to_thetas.of(self.thetas)
        tables, kinds = (of, to, self.pieces.table, self.bad, self.first), self._of_weights
        self._replay(("take", *kinds.values()), lambda: self._run(weights.take, *tables, FINE=FINE, **kinds))

    def _project(self, parameters: Sequence[Tensor | None], soft: bool) -> None:
        to, of, p = self._to_parameters.of(parameters), self._to_thetas.of(self.thetas), self.ranked
        tables = to, of, p.table, p.groups, p.factors, self.state.floats, self.state.ints
        kinds = {"SOFT": soft} | self._of_weights
        launch = lambda: self._run(weights.project, *tables, pieces=p, **kinds)  # noqa: E731
        self._weights(("project", *kinds.values()), launch, parameters)

    def _through_mask(self, grads: Sequence[Tensor | None]) -> None:
        p = self.ranked
        tables = self._to_grads.of(grads), self._to_thetas.of(self.thetas), p.table, p.groups, p.factors
        kinds, floats, sums = self._of_gradients(grads), self.state.floats, self._sums

        def launch() -> None:
            self._run(gradient.pull, *tables, floats, sums, pieces=p, **kinds)
            each = tables[0], p.limits, sums, p.costs, floats, self.out
            gradient.ratios[(len(p.limits),)](*each, ROWS=512, num_warps=8)
            self._run(gradient.through_mask, *tables, p.costs, floats, self.out, pieces=p, **kinds)

        self._replay(("through_mask", *kinds.values()), launch)

    def _where_kept(self, grads: Sequence[Tensor | None]) -> None:
        p = self.ranked
        tables = self._to_grads.of(grads), self._to_thetas.of(self.thetas), p.table, p.groups, p.factors
        kinds, state = self._of_gradients(grads), (self.state.floats, self.state.ints)
        launch = lambda: self._run(gradient.where_kept, *tables, *state, pieces=p, **kinds)  # noqa: E731
        self._replay(("where_kept", *kinds.values()), launch)

    def _project_stored(self, parameters: Sequence[Tensor | None]) -> None:
        to, of = self._to_parameters.of(parameters), self._to_thetas.of(self.thetas)
        tables = to, of, self._to_masks.of(self.masks), self.pieces.table
        launch = lambda: self._run(weights.project_stored, *tables, DTYPE=self._dtype)  # noqa: E731
        self._weights("project stored", launch, parameters)

    def _where_stored(self, grads: Sequence[Tensor | None]) -> None:
        grad_type = self._kinds(grads)["GRAD"]
        tables = self._to_grads.of(grads), self._to_masks.of(self.masks), self.pieces.table
        launch = lambda: self._run(gradient.where_stored, *tables, GRAD=grad_type)  # noqa: E731
        self._replay(("where stored", grad_type), launch)

    @property
    def _of_weights(self) -> dict[str, Any]:
        """Of what kind parameters and θ are."""
        return {"DTYPE": self._dtype, "ALIGNED": self._aligned(self._to_parameters, self._to_thetas)}

    def _of_gradients(self, grads: Sequence[Tensor | None]) -> dict[str, Any]:
        """Of what kind gradients and θ are."""
        return self._kinds(grads) | {"ALIGNED": self._aligned(self._to_grads, self._to_thetas)}


class TritonEngine(Kernels, Engine):
    """The kernels of one group of single weights.

    Args:
        parameters: the model's tensors.
        thetas: the dense weights of each, with the same strides.
        costs: what a weight of each costs.
        factors: u = factor · |θ|.
        bad: two flags: the first tensor with a gradient, and with a weight, that is not finite.
        first: the number of the first tensor there.
        out: two numbers that the gradients leave: a₁/a₂, and how far the mask is from its budget.
    """

    ranks_anything = True
    joins = True
    thetas: list[Tensor]  # type: ignore[assignment]
    state: State
    team: Team | None = None  # who solves for this group and others at once
    number = 0  # the group's, there

    def __init__(
        self,
        parameters: Sequence[Tensor],
        thetas: Sequence[Tensor],
        costs: Sequence[float],
        factors: Sequence[float],
        bad: Tensor,
        first: int,
        out: Tensor,
    ) -> None:
        pieces = Pieces([t.numel() for t in thetas], costs, factors, thetas[0].device)
        super().__init__(parameters, thetas, pieces, bad, first, out, ranked=pieces)
        self.costs, self.factors = list(costs), list(factors)
        self.state = State.new(thetas[0].device)
        self._cold = True
        self._stored: list[Tensor] = []  # the masks as the method gave them
        self._prepare(costs, factors)

    def _prepare(self, costs: Sequence[float], factors: Sequence[float]) -> None:
        """The top-k of what competes."""
        self.topk = TopK([t.numel() for t in self.thetas], costs, factors, self.thetas[0].device)

    def has(self, thetas: Sequence[Tensor]) -> bool:
        """Whether these are the dense weights that the kernels read, and not something computed from them."""
        same_start = thetas[0].data_ptr() == self.thetas[0].data_ptr()
        return same_start and sum(t.numel() for t in thetas) == self.pieces.total

    # ------------------------------------------------------------------ masks

    def choose(self, k: float, beta: float | None) -> tuple[Threshold, Dual | None]:
        """The threshold of the k largest weights, and with a β the soft mask."""
        if self.team is None or not self.team.knows(self, k, beta):
            self.topk.solve(self._values(), self.state, k, beta, self._cold)
        self._cold = False
        return self.state.threshold(), None if beta is None else self.state.dual(beta)

    def _values(self) -> Sequence[Tensor]:
        """What competes."""
        return self.thetas

    def restore(self, threshold: Threshold, dual: Dual | None) -> tuple[Threshold, Dual | None]:
        """Go on from masks that were saved."""
        self._values()
        self.state.set(threshold, dual)
        self._cold = False
        return self.state.threshold(), None if dual is None else self.state.dual(dual.beta)

    @property
    def cold(self) -> bool:
        """Whether there is no solution to start from."""
        return self._cold

    # ------------------------------------------------------------------ weights and gradients

    def put(self) -> None:
        """θ into the parameters."""
        self._do(Kernels._put, self.parameters)

    def take(self) -> None:
        """θ from the parameters, unless a gradient was not finite; entries that are not finite stay as they were."""
        self._do(Kernels._take, self.parameters)

    def project(self, soft: bool) -> None:
        """w = [kept] ⊙ θ, or [kept] ⊙ m ⊙ θ, into the parameters."""
        self._do(Kernels._project, self.parameters, soft)

    def through_mask(self, grads: Sequence[Tensor | None]) -> None:
        """Through the soft mask, in place."""
        self._do(Kernels._through_mask, grads)

    def where_kept(self, grads: Sequence[Tensor | None]) -> None:
        """Zero where not kept, in place."""
        self._do(Kernels._where_kept, grads)

    def project_stored(self, masks: Sequence[Tensor]) -> bool:
        """w = [kept] ⊙ θ into the parameters, from masks of bools as methods keep them; False where it cannot."""
        able = self._store(masks)
        if able:
            self._do(Kernels._project_stored, self.parameters)
        return able

    def where_stored(self, grads: Sequence[Tensor | None], masks: Sequence[Tensor]) -> bool:
        """Gradients zero where such masks are, in place; False where it cannot."""
        able = self._store(masks)
        if able:
            self._do(Kernels._where_stored, grads)
        return able

    def _store(self, masks: Sequence[Tensor]) -> bool:
        """Whether these are masks of single weights, one tensor over all or one each; then they are the ones to use."""
        placed = self.team is None or self.team.masks[self.first] is not None
        if placed and list(map(id, masks)) == list(map(id, self._stored)):  # as in most steps
            return True
        if type(self) is not TritonEngine or not all(m.dtype == torch.bool and m.is_contiguous() for m in masks):
            return False
        self._stored = list(masks)
        sizes = [t.numel() for t in self.thetas]
        each = masks[0].view(-1).split(sizes) if len(masks) == 1 else masks
        self.masks = list(each)
        if self.team is not None:
            self.team.masks[self.first : self.first + len(sizes)] = each
        return True
