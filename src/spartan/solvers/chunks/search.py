"""Finds thresholds near where they were, and duals from the last τ, in passes over pieces."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from spartan.ops.newton import Dual, Root
from spartan.ops.parts import CostGrid, Limit, Part, product, total_cost
from spartan.ops.select import Above, Threshold, boundary_within
from spartan.problem.problem import Problem
from spartan.solvers.chunks.pieces import Piece, Reader, soft_mask

PASSES = 12
WINDOW = 4e-3  # of the threshold, up and down: where it is looked for, at first
FEW = 1 << 23  # with more numbers near a window a search from nothing is faster
ROW = 64  # so many weights are passed over at once where none is near the threshold


@dataclass
class Known:
    """What is known of a segment's masks: a start for the next search."""

    threshold: Threshold | None = None
    dual: Dual | None = None
    drift: float = 0.0  # how far it moved last, and is expected to move again
    width: float | None = None  # how far from there it is looked for

    def follow(self, new: Threshold, dual: Dual | None) -> None:
        """Look next where it moves to; the answer does not depend on this."""
        old = self.threshold
        moved = math.inf if old is None else new.value - old.value
        if math.isfinite(moved):
            least = max(0.5 * (self.width or 0.0), 0.5 * abs(moved), 1e-4 * abs(new.value))
            self.width, self.drift = max(2 * abs(moved - self.drift), least), moved
        else:
            self.width, self.drift = None, 0.0
        self.threshold, self.dual = new, dual


@dataclass
class Window:
    """Where a segment's threshold is looked for: how many lie above, by cost, and a few weights that hold all within."""

    least: float
    most: float
    above: dict[float, int] = field(default_factory=dict)
    around: list[tuple[Piece, list[Tensor]]] = field(default_factory=list)

    def threshold(self, limit: Limit, grid: CostGrid, read: Reader) -> Threshold | None:
        """The threshold within the window, when what lies above it is kept; None if it is not there."""
        least, most, around = self.least, self.most, self.around
        if sum(len(x) for _, some in around for x in some) > FEW:
            return None
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
        return replace(found, cut=piece.position + int((read(piece) == found.value).nonzero()[kept]))


def first_pass(
    problem: Problem,
    pieces: Sequence[Piece],
    read: Reader,
    known: Sequence[Known],
    k: Sequence[float],
    roots: Mapping[int, Root],
) -> dict[int, Threshold]:
    """The thresholds that are near the last ones; on the way, F and D for the roots."""
    windows: dict[int, Window] = {}
    for s, (last, segment) in enumerate(zip(known, problem.segments, strict=True)):
        value = -math.inf if last.threshold is None else last.threshold.value
        if math.isfinite(value) and k[s] < segment.total:
            width = WINDOW * abs(value) if last.width is None else last.width
            windows[s] = Window(value + last.drift - width, value + last.drift + width)
    pending = {s: root for s, root in roots.items() if not root.done}
    for root, (f, d) in zip(pending.values(), one_pass(pieces, read, pending, windows), strict=True):
        root.hear(f, d)
    found = {}
    for s, window in windows.items():
        prices = [problem.unit_costs[i] for i in problem.members(s)]
        inside = window.threshold(Limit.of(k[s], prices), CostGrid(problem.segments[s].total), read)
        if inside is not None:
            found[s] = inside
    return found


def one_pass(
    pieces: Sequence[Piece], read: Reader, roots: Mapping[int, Root], windows: Mapping[int, Window]
) -> list[tuple[float, float]]:
    """Once over the weights: what lies in the windows of some segments, and F and D of some at their roots' duals."""
    sums = {s: [0.0, 0.0] for s in roots}
    for piece in pieces:
        window, root, cost = windows.get(piece.segment), roots.get(piece.segment), piece.cost
        if window is None and root is None:
            continue
        u = read(piece)
        if window is not None:
            larger, some = near(u, window.least, window.most, piece.room)
            window.above[cost] = window.above.get(cost, 0) + larger
            window.around.append((piece, some))
        if root is not None:
            m = soft_mask(u, root.center, root.offset, root.beta, piece.room[1])
            one, two = float(m.sum()), float(torch.dot(m, m))
            sums[piece.segment][0] += cost * one
            sums[piece.segment][1] += cost * (one - two)
    return [(f, d) for f, d in sums.values()]


def near(u: Tensor, least: float, most: float, room: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """How many of a piece lie above a window, and a few that hold all that lie in it; takes rooms 1 and 2."""
    # Ones and zeros in the data's own type; counts up to 2²⁴ are exact.
    over = torch.gt(u, most, out=room[1])
    larger, whole = int(over.sum()), u.numel() - u.numel() % ROW
    inside = torch.ge(u, least, out=room[2]).sub_(over)
    rows = inside[:whole].view(-1, ROW).amax(1).nonzero().view(-1)
    some = [u[:whole].view(-1, ROW).index_select(0, rows).view(-1)]
    return larger, some if whole == u.numel() else [*some, u[whole:].clone()]


def warm_roots(
    problem: Problem, known: Sequence[Known], k: Sequence[float], beta: Sequence[float], dtype: torch.dtype
) -> dict[int, Root]:
    """Searches that begin at the last τ under the new β, where there is one."""
    roots = {}
    for s, (last, segment) in enumerate(zip(known, problem.segments, strict=True)):
        dual = last.dual
        if dual is not None and dual.beta > 0 and beta[s] > 0 and math.isfinite(dual.offset):
            tau = dual.center - dual.offset / dual.beta
            roots[s] = Root(k[s], segment.total, beta[s], tau, None, dtype, plain=True, most=PASSES)
    return roots


def largest_below(pieces: Sequence[Piece], read: Reader, thresholds: Sequence[Threshold]) -> list[float]:
    """The largest u of every segment strictly below every kept one; −∞ where there is none.

    This is the threshold, unless units equal to it are kept: then the next smaller u.
    """
    found = [-math.inf if t.cut else t.value for t in thresholds]
    for piece in pieces:
        threshold = thresholds[piece.segment]
        if threshold.cut:
            u = read(piece)
            smaller = u[u < threshold.value]
            if smaller.numel():
                found[piece.segment] = max(found[piece.segment], float(smaller.max()))
    return found
