"""Answers problems of single weights on a CPU: pieces that stay in the cache go through all operations before the next.

Everything is arithmetic on floats: torch's operations on bools take up to seven times as long as a product (25.5M
weights on 2 cores: a product 2 ms, a sigmoid 5, a comparison into floats 1.4, into bools 6, `where` 12, `nonzero` 11).

The threshold and τ start from the last step's. The former is exact wherever the search starts; the latter is saved with
the former, so that a resumed run goes on as if it had never stopped.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spartan.ops.newton import Dual, Root, search
from spartan.ops.parts import CHUNK, CostGrid, Limit, Part, check_budget, product, total_cost
from spartan.ops.select import Above, Threshold, boundary_within
from spartan.problem.problem import Problem
from spartan.solvers.base import Flags, Grads
from spartan.solvers.forms import KEPT, Form, Mask
from spartan.solvers.pools import Budgets, Duals, Selection, numbers
from spartan.solvers.torch import TorchSolver

WORTH = 1 << 16  # more weights than these are worth going through in chunks: a few are done before a loop has begun
PASSES = 12
WINDOW = 4e-3  # of the threshold, up and down: where it is looked for, at first
ROW = 64  # so many weights are passed over at once where none is near the threshold

# out = x · m(1−m), and out = x where |u| > λ, exactly +0.0 elsewhere: one operation each.
_times_slope = torch.ops.aten.sigmoid_backward.grad_input
_where_above = torch.ops.aten.hardshrink_backward.grad_input


class Piece(NamedTuple):
    """A part of one target that fits the cache."""

    i: int  # number of the target
    segment: int
    cost: float  # of a weight
    factor: float  # u = factor · |θ|
    position: int  # of its first weight in the segment
    here: slice  # where it is in the target
    theta: Tensor
    room: tuple[Tensor, ...]  # three tensors of its length, for whatever is computed


@dataclass
class Known:
    """What is known of a segment's masks: a start for the next search."""

    threshold: Threshold | None = None
    dual: Dual | None = None
    window: float = WINDOW


@dataclass
class Window:
    """Where a segment's threshold is looked for: how many lie above, by cost, and a few weights that hold all within."""

    least: float
    most: float
    above: dict[float, int] = field(default_factory=dict)
    around: list[tuple[Piece, list[Tensor]]] = field(default_factory=list)

    def threshold(self, limit: Limit, grid: CostGrid) -> Threshold | None:
        """The threshold within the window, when what lies above it is kept; None if it is not there."""
        least, most, around = self.least, self.most, self.around
        few = torch.cat([x for _, some in around for x in some])
        owner = torch.repeat_interleave(torch.tensor([sum(map(len, some)) for _, some in around]))
        there = few.ge(least).logical_and_(few.le(most))
        few, owner = few[there], owner[there]
        counts = torch.bincount(owner, minlength=len(around)).tolist()
        pieces = [piece for piece, _ in around]
        parts = [Part(u, piece.cost) for u, piece in zip(few.split(counts), pieces, strict=True)]
        above = Above(terms=lambda: [x for price, count in self.above.items() for x in product(count, price)])
        for price, count in self.above.items():
            above.add(count, price, grid)
        inside = total_cost(parts)
        cost, room = above.coarse + above.fine, limit.k + limit.over
        margin = 1e-12 * (cost + inside)  # more than these sums are off by
        if room < cost + margin or room + margin >= cost + inside:
            return None
        found = boundary_within(parts, limit, above, grid).threshold
        if not math.isfinite(found.value):
            return None
        if not found.cut:
            return found
        # So many of those equal to it are kept; the next one is in this piece.
        ties = (few == found.value).nonzero().squeeze(1)
        if found.cut == len(ties):
            return replace(found, cut=pieces[-1].position + len(pieces[-1].theta))
        piece = pieces[int(owner[ties[found.cut]])]
        kept = int((owner[ties[: found.cut]] == owner[ties[found.cut]]).sum())
        return replace(found, cut=piece.position + int((_scores(piece) == found.value).nonzero()[kept]))


class ChunkSolver(TorchSolver):
    """Goes through the weights in chunks; what they cannot do, plain torch does."""

    name = "chunks"

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        super().__init__(problem, flags, alias)
        self._pieces = [] if alias else cut_up(problem, self.theta.views)
        self._known = [Known() for _ in problem.segments]
        self._mine = False  # whether the masks in use were chosen here

    @classmethod
    def why_not(cls, problem: Problem, kernels: str) -> str:
        """Single weights on a CPU, and many of them."""
        kinds = {(t.parameter.device.type, t.parameter.dtype) for t in problem.targets}
        if kernels != "auto":
            return f"kernels={kernels!r}"
        if kinds not in ({("cpu", torch.float32)}, {("cpu", torch.float64)}):
            return "not float32 or float64 on a CPU"
        if not problem.pattern.single:
            return "units of several weights"
        if not problem.ranks.alone or not all(t.parameter.is_contiguous() for t in problem.targets):
            return "weights in shards, or not in row-major order"
        return "few weights" if sum(problem.units) <= WORTH else ""

    def _beside(self, tensors: Sequence[Tensor | None]) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece and that of other tensors, where there are any and they lie as the weights do."""
        flat = [None if x is None else self.problem.targets[i].flatten(x.detach()) for i, x in enumerate(tensors)]
        for piece in self._pieces:
            other = flat[piece.i]
            if other is not None:
                yield piece, other[piece.here]

    # ------------------------------------------------------------------ masks

    def solve(
        self, k: Budgets, beta: Sequence[float] | None = None, ranks: Tensor | None = None, learned: str | None = None
    ) -> None:
        """The threshold of the largest weights, and with a β the soft mask."""
        self._mine = ranks is None and learned is None and self.power == 1.0
        if not self._mine:
            super().solve(k, beta, ranks, learned)
            return
        budgets = [check_budget(x, s.total) for x, s in zip(numbers(k), self.problem.segments, strict=True)]
        roots = {} if beta is None else self._warm_roots(budgets, beta)
        found = self._first_pass(budgets, roots)
        search(roots, lambda pending: self._pass(pending, {}))
        duals = {s: root.dual for s, root in roots.items() if root.dual is not None}
        self._from_nothing(budgets, beta, found, duals)
        for s, known in enumerate(self._known):
            new, old = found[s], known.threshold
            if old is not None and new.value:  # look where it moves to; the answer does not depend on this
                moved = abs(new.value - old.value) / abs(new.value)
                known.window = min(max(4 * moved, 0.5 * known.window, 1e-4), 0.1) if math.isfinite(moved) else WINDOW
            known.threshold, known.dual = new, duals.get(s)
        self.a = Selection.of([known.threshold for known in self._known if known.threshold], self.device)
        self.dual = None if beta is None else Duals.of([duals[s] for s in range(len(budgets))], self.device)

    def _warm_roots(self, k: Sequence[float], beta: Sequence[float]) -> dict[int, Root]:
        """Searches that begin at the last τ under the new β, where there is one."""
        roots = {}
        for s, (known, segment) in enumerate(zip(self._known, self.problem.segments, strict=True)):
            last = known.dual
            if last is not None and last.beta > 0 and beta[s] > 0 and math.isfinite(last.offset):
                tau = last.center - last.offset / last.beta
                roots[s] = Root(k[s], segment.total, beta[s], tau, None, self.dtype, plain=True, most=PASSES)
        return roots

    def _from_nothing(
        self, k: list[float], beta: Sequence[float] | None, found: dict[int, Threshold], duals: dict[int, Dual]
    ) -> None:
        """Fill in what a start from the last masks did not find."""
        missing = {s: x for s, x in enumerate(k) if s not in found or (beta is not None and s not in duals)}
        if not missing:
            return
        ranks = torch.empty(self.count, dtype=self.dtype)  # of the other segments nothing is read
        for piece in self._pieces:
            if piece.segment in missing:
                start = self.problem.slices[piece.i].start
                ranks[start + piece.here.start : start + piece.here.stop] = _scores(piece)
        if beta is None:
            found |= {s: edge.threshold for s, (edge, _) in self.pools.boundaries(ranks, missing, ends=False).items()}
            return
        for s, (threshold, dual) in self.pools.solve_some(ranks, missing, beta).items():
            found.setdefault(s, threshold)
            duals.setdefault(s, dual)

    def _first_pass(self, k: Sequence[float], roots: Mapping[int, Root]) -> dict[int, Threshold]:
        """The thresholds that are near the last ones; on the way, F and D for the roots."""
        windows: dict[int, Window] = {}
        for s, (known, segment) in enumerate(zip(self._known, self.problem.segments, strict=True)):
            value = -math.inf if known.threshold is None else known.threshold.value
            if math.isfinite(value) and k[s] < segment.total:
                windows[s] = Window(value - known.window * abs(value), value + known.window * abs(value))
        pending = {s: root for s, root in roots.items() if not root.done}
        for root, (f, d) in zip(pending.values(), self._pass(pending, windows), strict=True):
            root.hear(f, d)
        inside = {s: window.threshold(*_limit_of(self.problem, s, k[s])) for s, window in windows.items()}
        return {s: threshold for s, threshold in inside.items() if threshold is not None}

    def _pass(self, roots: Mapping[int, Root], windows: Mapping[int, Window]) -> list[tuple[float, float]]:
        """Once over the weights: what lies in the windows of some segments, and F and D of some at their roots' duals."""
        sums = {s: [0.0, 0.0] for s in roots}
        for piece in self._pieces:
            window, root, cost = windows.get(piece.segment), roots.get(piece.segment), piece.cost
            if window is None and root is None:
                continue
            u = _scores(piece)
            if window is not None:
                larger, some = _near(u, window.least, window.most, piece.room)
                window.above[cost] = window.above.get(cost, 0) + larger
                window.around.append((piece, some))
            if root is not None:
                m = _mask(u, root.center, root.offset, root.beta, piece.room[1])
                one, two = float(m.sum()), float(torch.dot(m, m))
                sums[piece.segment][0] += cost * one
                sums[piece.segment][1] += cost * (one - two)
        return [(f, d) for f, d in sums.values()]

    def sinkhorn(self, k: Budgets, beta: Sequence[float], init: Any) -> None:
        """By plain torch."""
        self._mine = False
        super().sinkhorn(k, beta, init)

    def go_on_from(self, solution: Mapping[str, Any]) -> None:
        """Take over masks that were saved, and start from them."""
        super().go_on_from(solution)
        duals = None if self.dual is None else self.dual.each()
        # A rescaled mask is a Sinkhorn iteration's.
        self._mine = self.a is not None and (duals is None or all(dual.scale == 1.0 for dual in duals))
        self._known = [Known() for _ in self.problem.segments]
        if self._mine:
            for s, (known, x) in enumerate(zip(self._known, self.a.saved(), strict=True)):
                known.threshold = Threshold(x["value"], int(x["cut"]), x["cost"])
                known.dual = None if duals is None else duals[s]

    def redivided(self) -> None:
        """The problem has other segments now."""
        super().redivided()
        self._pieces = cut_up(self.problem, self.theta.views)
        self._known = [Known() for _ in self.problem.segments]

    # ------------------------------------------------------------------ weights and gradients

    def _only_kept(self, piece: Piece, u: Tensor, x: Tensor, out: Tensor) -> None:
        """x where a weight is kept, exactly +0.0 elsewhere."""
        for place, bound in _bounds(piece, self._known[piece.segment]):
            _where_above(x[place], u[place], bound, grad_input=out[place])

    def _soft(self, piece: Piece, u: Tensor, out: Tensor) -> Tensor:
        """The soft mask of a piece."""
        dual = self._known[piece.segment].dual
        assert dual is not None
        return _mask(u, dual.center, dual.offset, dual.beta, out)

    def serves(self, form: Form) -> bool:
        """Whether chunks can write what the form says."""
        return self._chosen(form) and form.project and isinstance(form.mask, Mask)

    def turns(self, form: Form) -> bool:
        """Whether chunks can turn gradients as the form says."""
        return self._chosen(form) and (form.couples or form.back == KEPT)

    def _chosen(self, form: Form) -> bool:
        """Whether what is kept follows from θ by the thresholds found here."""
        return self._mine and self.power == 1.0 and form.by_magnitude

    def write(self, form: Form | None) -> None:
        """w = [kept] ⊙ θ, or [kept] ⊙ m ⊙ θ, into the parameters; exactly +0.0 where not kept."""
        assert form is not None
        if not self.serves(form):
            super().write(form)
            return
        soft = form.mask is Mask.SOFT
        for piece, parameter in self._beside([t.local for t in self.problem.targets]):
            if piece.factor != 1.0:
                u = _scores(piece)
                x = self._soft(piece, u, piece.room[1]).mul_(piece.theta) if soft else piece.theta
                self._only_kept(piece, u, x, out=parameter)
                continue
            # u is |θ| itself: half the time of the above.
            for place, bound in _bounds(piece, self._known[piece.segment]):
                torch.hardshrink(piece.theta[place], bound, out=parameter[place])
            if soft:
                parameter.mul_(self._soft(piece, _scores(piece), piece.room[0]))

    def turn(self, form: Form | None, grads: Grads) -> Grads:
        """Gradients through the soft mask, or zero where not kept, in place."""
        assert form is not None
        pairs = zip(grads, self.problem.targets, strict=True)
        alike = all(g is None or g.stride() == t.local.stride() for g, t in pairs)
        if not (alike and self.turns(form)):
            return super().turn(form, grads)
        if form.couples:
            grads = self.with_missing(form, grads)
            self._pull(grads)
        else:
            for piece, g in self._beside(grads):
                self._only_kept(piece, _scores(piece), g, out=g)
        return list(grads)

    def _pull(self, grads: Grads) -> None:
        """m·g + sign(θ)·(∂u/∂|θ|)·βm(1−m)·(g·θ − c·a₁/a₂), in place."""
        problem = self.problem
        a1, a2 = [0.0] * len(problem.targets), [0.0] * len(problem.segments)
        for piece, g in self._beside(grads):
            m = self._soft(piece, _scores(piece), piece.room[0])
            slope = float(torch.dot(m, torch.sub(1.0, m, out=piece.room[1])))
            a2[piece.segment] += piece.cost * slope
            a1[piece.i] += float(torch.dot(g, _times_slope(piece.theta, m, grad_input=piece.room[2])))
        ratios = []
        for s, segment in enumerate(problem.segments):
            # A target with a NaN or infinite gradient is left out, as in `Pools.pulled_back`.
            finite = math.fsum(a1[i] for i in segment.targets if math.isfinite(a1[i]))
            ratios.append(finite / a2[s] if a2[s] else 0.0)
        for piece, g in self._beside(grads):
            m = self._soft(piece, _scores(piece), piece.room[0])
            # q = sign(θ)·m(1−m) makes it g·(m + βqu'θ) − βqu'c·a₁/a₂, with u' = ∂u/∂|θ|.
            q = torch.sign(piece.theta, out=piece.room[1])
            q = _times_slope(q, m, grad_input=q)
            slope = self.dual.beta[piece.segment] * piece.factor
            g.mul_(m.addcmul_(q, piece.theta, value=slope))
            g.sub_(q, alpha=slope * piece.cost * ratios[piece.segment])


def cut_up(problem: Problem, thetas: Sequence[Tensor]) -> list[Piece]:
    """All targets in pieces, which share their room; made once, since a view takes as long as a short operation."""
    longest = min(CHUNK, max(problem.units))
    room = [torch.empty(longest, dtype=thetas[0].dtype) for _ in range(3)]
    found = []
    for i, view in enumerate(thetas):
        theta = problem.targets[i].flatten(view)
        for start in range(0, problem.units[i], CHUNK):
            here = slice(start, min(start + CHUNK, problem.units[i]))
            # In the middle of the room, so that each half, long or short, stays with one of two threads: cores that
            # share no cache would hand it to and fro (seen: 72 ms instead of 44 for a gradient).
            skip = (longest - here.stop + start) // 32 * 16
            views = tuple(r[skip : skip + here.stop - start] for r in room)
            facts = i, problem.segment_of[i], problem.unit_costs[i], problem.factors[i]
            found.append(Piece(*facts, problem.first_position[i] + start, here, theta[here], views))
    return found


def _bounds(piece: Piece, known: Known) -> list[tuple[slice, float]]:
    """Which u are kept, by place in a piece: those above so much. Of those equal to the threshold the first are."""
    assert known.threshold is not None
    value, size = known.threshold.value, len(piece.theta)
    ties = min(max(known.threshold.cut - piece.position, 0), size)
    if not ties:
        return [(slice(0, size), value)]
    zero = piece.theta.new_zeros(())
    below = -math.inf if value <= 0 else float(torch.nextafter(zero + value, zero))
    return [(slice(0, ties), below), (slice(ties, size), value)]


def _scores(piece: Piece) -> Tensor:
    """u of a piece, in room 0."""
    u = torch.abs(piece.theta, out=piece.room[0])
    return u if piece.factor == 1.0 else u.mul_(piece.factor)


def _mask(u: Tensor, center: float, offset: float, beta: float, out: Tensor) -> Tensor:
    """m of a piece."""
    z = u if center == 0 else torch.sub(u, center, out=out)
    # One operation for βz + offset.
    return torch.add(u.new_tensor(offset), z, alpha=beta, out=out).sigmoid_()


def _limit_of(problem: Problem, s: int, k: float) -> tuple[Limit, CostGrid]:
    """What a segment may keep, and how its costs are added up."""
    prices = [problem.unit_costs[i] for i in problem.members(s)]
    return Limit.of(k, prices), CostGrid(problem.segments[s].total)


def _near(u: Tensor, least: float, most: float, room: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """How many of a piece lie above a window, and a few that hold all that lie in it; takes rooms 1 and 2."""
    # Ones and zeros in the data's own type; counts up to 2²⁴ are exact.
    over = torch.gt(u, most, out=room[1])
    larger, whole = int(over.sum()), u.numel() - u.numel() % ROW
    inside = torch.ge(u, least, out=room[2]).sub_(over)
    rows = inside[:whole].view(-1, ROW).amax(1).nonzero().view(-1)
    some = [u[:whole].view(-1, ROW).index_select(0, rows).view(-1)]
    return larger, some if whole == u.numel() else [*some, u[whole:].clone()]
