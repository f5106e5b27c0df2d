"""Chooses masks by passes over pieces, from where they were."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spartan.ops.newton import Dual, search
from spartan.ops.parts import check_budget
from spartan.ops.select import Threshold
from spartan.problem.problem import Problem
from spartan.solvers.base import Flags
from spartan.solvers.chunks.pieces import EXACT_POWERS, Piece, Reader, cut_up, magnitude, ones_where_kept, soft_mask
from spartan.solvers.chunks.search import Known, first_pass, one_pass, warm_roots
from spartan.solvers.forms import Form, Shifted
from spartan.solvers.pools import Budgets, Duals, Selection, numbers
from spartan.solvers.torch import TorchSolver

WORTH = 1 << 16  # more weights than these are worth going through in chunks: a few are done before a loop has begun


def why_no_chunks(problem: Problem, kernels: str, own: str) -> str:
    """Why weights do not go piece by piece; `own` is why those of a pattern cannot."""
    kinds = {(t.parameter.device.type, t.parameter.dtype) for t in problem.targets}
    if kernels != "auto":
        return f"kernels={kernels!r}"
    if kinds not in ({("cpu", torch.float32)}, {("cpu", torch.float64)}):
        return "not float32 or float64 on a CPU"
    if not problem.ranks.alone:
        return "weights in shards"
    return own or ("few weights" if sum(t.numel for t in problem.targets) <= WORTH else "")


class ChunkRanks(TorchSolver):
    """The pieces of a part of the problem, and what their units compete by."""

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        super().__init__(problem, flags, alias)
        self._pieces = [] if alias else cut_up(problem, self.theta.views)
        # By what they are for: "a" and "b", or a name under which a method looks for the largest of something.
        self._known: dict[str, list[Known]] = {}

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Single weights on a CPU, and many of them."""
        own = "" if problem.pattern.single else "units of several weights"
        return why_no_chunks(
            problem, kernels, own or ("" if problem.by_memory else "weights with gaps in their memory")
        )

    def beside(self, tensors: Sequence[Tensor | None]) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece and that of other tensors, where there are any and they lie as the weights do."""
        flat = self._flat(tensors)
        for piece in self._pieces:
            other = flat[piece.i]
            if other is not None:
                yield piece, other[piece.here]

    def _flat(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Tensors that lie as the weights do, flat."""
        return [None if x is None else self.problem.targets[i].flatten(x.detach()) for i, x in enumerate(tensors)]

    def known(self, what: str) -> list[Known]:
        """What is known of the last search for this."""
        return self._known.setdefault(what, [Known() for _ in self.problem.segments])

    @property
    def by_pieces(self) -> bool:
        """Whether ψ is the same to the bit in pieces as in one."""
        return self.power == 1.0 or self.power - 1.0 in EXACT_POWERS

    def searches(self) -> bool:
        """Whether thresholds are looked for by pieces."""
        return self.by_pieces

    @property
    def rescaled(self) -> bool:
        """Whether the soft mask is that of a Sinkhorn iteration, which plain torch knows about."""
        return self.dual is not None and any(scale != 1.0 for scale in self.dual.scale)

    def reader(self, learned: str | None = None, shifted: str | None = None) -> Reader:
        """What units compete by: magnitudes, those less a shift that is learned per target, or learned ranks."""
        if learned is not None:
            return reader_of(self.state.learned[learned].detach())
        power = self.power
        if shifted is None:
            return lambda piece: magnitude(piece, power)
        shifts = self.shifts(shifted)
        return lambda piece: magnitude(piece, power).sub_(shifts[piece.i])

    def reader_for(self, form: Form) -> Reader:
        """By what a form ranks."""
        return self.reader(form.learned, form.mask.name if isinstance(form.mask, Shifted) else None)

    def shifts(self, name: str) -> list[float]:
        """sigmoid(s) of every target."""
        found: list[float] = torch.sigmoid(self.state.learned_per_target[name].detach()).tolist()
        return found


class ChunkMasks(ChunkRanks):
    """What is kept, and soft masks, by any ranks: magnitudes, learned ones, or those that a method gives."""

    def solve(
        self,
        k: Budgets,
        beta: Sequence[float] | None = None,
        ranks: Tensor | None = None,
        learned: str | None = None,
        shifted: str | None = None,
    ) -> None:
        """The thresholds of the largest units, and with a β the soft masks."""
        given = ranks if learned is None else self.state.learned[learned]
        if not self.by_pieces or (given is not None and given.dtype != self.dtype):
            super().solve(k, beta, ranks, learned, shifted)
            self._start_from_solution()
            return
        read = self.reader(learned, shifted) if ranks is None else reader_of(ranks)
        self.a, self.dual = self._search("a", read, k, beta)

    def solve_more(self, k: Budgets) -> None:
        """B for these budgets: the units of largest magnitude."""
        if self.by_pieces:
            self.b, _ = self._search("b", self.reader(), k)
        else:
            super().solve_more(k)

    def top(self, k: Budgets, ranks: Tensor, among: Tensor | None = None, near: str | None = None) -> Tensor:
        """Bool per unit: those of highest rank that fit the budgets, among all or some; exact, ties by position."""
        if among is not None or near is None or ranks.dtype != self.dtype:
            return super().top(k, ranks, among)
        read = reader_of(ranks)
        self._search(near, read, k)
        found, last = torch.empty(self.count, dtype=torch.bool), self.known(near)
        for piece in self._pieces:
            threshold = last[piece.segment].threshold
            assert threshold is not None
            ones_where_kept(piece, read(piece), threshold, out=found[piece.units])
        return found

    def _search(
        self, what: str, read: Reader, k: Budgets, beta: Sequence[float] | None = None
    ) -> tuple[Selection, Duals | None]:
        """Thresholds, and with a β soft masks, from those found last."""
        problem, known = self.problem, self.known(what)
        budgets = [check_budget(x, s.total) for x, s in zip(numbers(k), problem.segments, strict=True)]
        roots = {} if beta is None else warm_roots(problem, known, budgets, beta, self.dtype)
        found = first_pass(problem, self._pieces, read, known, budgets, roots)
        search(roots, lambda pending: one_pass(self._pieces, read, pending, {}))
        duals = {s: root.dual for s, root in roots.items() if root.dual is not None}
        self._from_nothing(budgets, beta, read, found, duals)
        for s, last in enumerate(known):
            last.follow(found[s], duals.get(s))
        chosen = Selection.of([found[s] for s in range(len(budgets))], self.device)
        return chosen, None if beta is None else Duals.of([duals[s] for s in range(len(budgets))], self.device)

    def _from_nothing(
        self,
        k: list[float],
        beta: Sequence[float] | None,
        read: Reader,
        found: dict[int, Threshold],
        duals: dict[int, Dual],
    ) -> None:
        """Fill in what a start from the last masks did not find."""
        missing = {s: x for s, x in enumerate(k) if s not in found or (beta is not None and s not in duals)}
        if not missing:
            return
        ranks = torch.empty(self.count, dtype=self.dtype)  # of the other segments nothing is read
        for piece in self._pieces:
            if piece.segment in missing:
                ranks[piece.units] = read(piece)
        if beta is None:
            found |= {s: edge.threshold for s, (edge, _) in self.pools.boundaries(ranks, missing, ends=False).items()}
            return
        for s, (threshold, dual) in self.pools.solve_some(ranks, missing, beta).items():
            found.setdefault(s, threshold)
            duals.setdefault(s, dual)

    def soft_masks(self) -> Callable[[Piece, Tensor, Tensor], Tensor]:
        """What makes the soft mask of a piece from its u, into a third tensor."""
        duals = self.dual.each()

        def soft(piece: Piece, u: Tensor, out: Tensor) -> Tensor:
            dual = duals[piece.segment]
            return soft_mask(u, dual.center, dual.offset, dual.beta, out)

        return soft

    def sinkhorn(self, k: Budgets, beta: Sequence[float], init: Any) -> None:
        """By plain torch."""
        super().sinkhorn(k, beta, init)
        self._start_from_solution()

    def go_on_from(self, solution: Mapping[str, Any]) -> None:
        """Take over masks that were saved, and start from them."""
        super().go_on_from(solution)
        self._start_from_solution()

    def _start_from_solution(self) -> None:
        """Begin the next search where others, or a run before this one, have found the masks in use."""
        self._known = {}
        if self.a is None:
            return
        duals = None if self.dual is None or self.rescaled else self.dual.each()
        for s, (last, threshold) in enumerate(zip(self.known("a"), thresholds(self.a), strict=True)):
            last.threshold, last.dual = threshold, None if duals is None else duals[s]

    def redivided(self) -> None:
        """The problem has other segments now."""
        super().redivided()
        self._pieces = cut_up(self.problem, self.theta.views)
        self._known = {}


def reader_of(ranks: Tensor) -> Reader:
    """Reads ranks that are at hand."""
    return lambda piece: ranks[piece.units]


def thresholds(chosen: Selection) -> list[Threshold]:
    """A selection in plain numbers."""
    return [Threshold(x["value"], int(x["cut"]), x["cost"]) for x in chosen.saved()]
