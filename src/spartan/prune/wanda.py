"""Wanda: keeps the weights of largest |W| · ‖x‖ in every row."""

import torch
from torch import Tensor

from spartan.ops import hard_topk
from spartan.ops.rows import top
from spartan.prune.layout import Layout


def wanda(layout: Layout, squares: Tensor) -> Tensor:
    """The pruned matrix of a layer, from Σx² of its inputs (groups × columns).

    S = |W| · ‖x‖₂ (Sun et al., A simple and effective pruning approach for large language models, ICLR 2024), of a unit
    the sum over it. Every output row keeps as many; of the rest that does not go up, the rows whose next weight has the
    highest score keep one more each. With blocks the rows are rows of blocks, and units that have no others beside them
    (whole rows, heads) compete in the whole layer.
    """
    w = layout.read()
    norms = layout.in_order(squares).sqrt().to(w.dtype)
    scores = (w.abs().view(layout.groups, -1, layout.columns) * norms[:, None]).view_as(w)
    return torch.where(keep(layout, scores), w, 0.0)


def keep(layout: Layout, scores: Tensor) -> Tensor:
    """Bool per weight: what the budget keeps, by scores in the shape of the matrix."""
    rows, columns = scores.shape
    if layout.of_every_m is not None:
        n, m = layout.of_every_m
        return top(scores.view(-1, m), n).view_as(scores)
    if layout.sides is None:
        return _by_pattern(layout, scores)
    h, w = layout.sides
    units = scores.view(rows // h, h, columns // w, w).sum((1, 3))
    kept = keep_evenly(units, layout.kept)
    return kept[:, None, :, None].expand(rows // h, h, columns // w, w).reshape(rows, columns)


def keep_evenly(scores: Tensor, count: int) -> Tensor:
    """Bool: `count` of all entries, as many of each row (or one more of some); ties by position.

    Example:
        >>> keep_evenly(torch.tensor([[3.0, 1.0, 2.0], [9.0, 7.0, 8.0]]), 3)
        tensor([[ True, False, False],
                [ True, False,  True]])
    """
    rows, columns = scores.shape
    if columns == 1:
        return hard_topk(scores, count)
    each, rest = divmod(count, rows)
    values, order = scores.sort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order[:, :each], True)
    if rest:
        more = hard_topk(values[:, each], rest)
        kept[more, order[more, each]] = True
    return kept


def _by_pattern(layout: Layout, scores: Tensor) -> Tensor:
    """The same for units of any form, which only their pattern knows: they compete in the whole layer."""
    axes, pattern = layout.target.axes, layout.problem.pattern
    whole = axes.turned(layout.in_its_shape(scores))
    kept = hard_topk(axes.reduce(pattern, whole), layout.kept)
    spread = axes.expand(pattern, kept, layout.target.shape).expand(layout.target.shape)
    return axes.rows(spread).contiguous()
