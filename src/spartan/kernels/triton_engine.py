"""The kernels of one group: its top-k, its weights and its gradients, launched without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.kernels import gradient, weights
from spartan.kernels.engine import Engine
from spartan.kernels.replay import Replay
from spartan.kernels.state import State
from spartan.kernels.tables import Addresses, Pieces
from spartan.kernels.topk import DTYPES, TopK
from spartan.ops.select import Threshold
from spartan.ops.soft_topk import Dual

FINE = torch.iinfo(torch.int32).max  # a flag that names no tensor


class Launcher:
    """Launches kernels over the parameters of a group and their gradients.

    Args:
        parameters: the model's tensors.
        pieces: how their entries are divided among programs.
        bad: two flags: the first tensor with a gradient, and with a weight, that is not finite.
        first: the number of the first tensor there.
    """

    def __init__(self, parameters: Sequence[Tensor], pieces: Pieces, bad: Tensor, first: int) -> None:
        device = parameters[0].device
        self.parameters, self.pieces, self.bad, self.first = list(parameters), pieces, bad, first
        self._to_parameters, self._to_grads = Addresses(device), Addresses(device)
        self._replay = Replay(device)

    def check(self, grads: Sequence[Tensor | None]) -> None:
        """Name the first gradient that is not finite, and take them all away if there is one."""
        grad_type, table = self._kinds(grads)["GRAD"], self.pieces.table
        to_grads = self._to_grads.of(grads)

        def launch() -> None:
            self._run(gradient.check, to_grads, table, self.bad, self.first, GRAD=grad_type)
            self._run(gradient.clear, to_grads, table, self.bad, FINE=FINE, GRAD=grad_type)

        self._replay(("check", grad_type), launch)

    def _run(self, kernel: Any, *arguments: Any, **kinds: Any) -> None:
        kernel[(self.pieces.count,)](*arguments, BLOCK=2048, num_warps=8, **kinds)

    def _weights(self, key: Any, launch: Callable[[], None]) -> None:
        self._replay(key, launch)
        torch.autograd.graph.increment_version(self.parameters)  # they were written behind torch's back

    @property
    def _dtype(self) -> Any:
        return DTYPES[self.parameters[0].dtype]

    def _kinds(self, grads: Sequence[Tensor | None]) -> dict[str, Any]:
        return {"GRAD": next((DTYPES[g.dtype] for g in grads if g is not None), self._dtype), "DTYPE": self._dtype}


class TritonEngine(Launcher, Engine):
    """Launches the kernels of one group of single weights.

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
    topk: TopK

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
        device = thetas[0].device
        super().__init__(parameters, Pieces([t.numel() for t in thetas], costs, factors, device), bad, first)
        self.thetas, self.out = list(thetas), out
        self.state = State.new(device)
        self._to_thetas = Addresses(device)
        self._cold = True
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

    # ------------------------------------------------------------------ weights

    def put(self) -> None:
        """θ into the parameters."""
        to, of = self._to_parameters.of(self.parameters), self._to_thetas.of(self.thetas)
        self._weights("put", lambda: self._run(weights.put, to, of, self.pieces.table, DTYPE=self._dtype))

    def take(self) -> None:
        """θ from the parameters, unless a gradient was not finite; entries that are not finite stay as they were."""
        of, to = self._to_parameters.of(self.parameters), self._to_thetas.of(self.thetas)
        tables = of, to, self.pieces.table, self.bad, self.first
        self._replay("take", lambda: self._run(weights.take, *tables, FINE=FINE, DTYPE=self._dtype))

    def project(self, soft: bool) -> None:
        """w = [kept] ⊙ θ, or [kept] ⊙ m ⊙ θ, into the parameters."""
        to, of, p = self._to_parameters.of(self.parameters), self._to_thetas.of(self.thetas), self.pieces
        tables = to, of, p.table, p.factors, self.state.floats, self.state.ints
        self._weights(("project", soft), lambda: self._run(weights.project, *tables, SOFT=soft, DTYPE=self._dtype))

    # ------------------------------------------------------------------ gradients

    def through_mask(self, grads: Sequence[Tensor | None]) -> None:
        """Through the soft mask, in place."""
        p, kinds = self.pieces, self._kinds(grads)
        tables = self._to_grads.of(grads), self._to_thetas.of(self.thetas), p.table, p.factors
        floats, sums = self.state.floats, self.topk.sums

        def launch() -> None:
            self._run(gradient.pull, *tables, floats, sums, **kinds)
            gradient.ratio[(1,)](sums, p.costs, p.count, floats, self.out, ROWS=512, num_warps=8)
            self._run(gradient.through_mask, *tables, p.costs, floats, self.out, **kinds)

        self._replay(("through_mask", kinds["GRAD"]), launch)

    def where_kept(self, grads: Sequence[Tensor | None]) -> None:
        """Zero where not kept, in place."""
        p, kinds = self.pieces, self._kinds(grads)
        tables = self._to_grads.of(grads), self._to_thetas.of(self.thetas), p.table, p.factors
        state = self.state.floats, self.state.ints
        self._replay(("where_kept", kinds["GRAD"]), lambda: self._run(gradient.where_kept, *tables, *state, **kinds))
