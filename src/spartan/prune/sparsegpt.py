"""SparseGPT: zeros chosen and made up for by the inputs' second moments, column after column."""

import torch
from torch import Tensor

from spartan.ops import hard_topk
from spartan.ops.rows import top
from spartan.prune.layout import Layout

BLOCK = 128  # columns for which a mask is chosen at a time
DAMPENING = 0.01  # of the mean of H's diagonal


def sparsegpt(layout: Layout, grams: Tensor) -> Tensor:
    """The pruned matrix of a layer, from H = Σ x xᵀ of its inputs (groups × columns × columns).

    Frantar & Alistarh, SparseGPT: Massive language models can be accurately pruned in one-shot, ICML 2023. Columns go by
    from left to right. With H⁻¹ = UᵀU, what column j loses is spread over the columns to its right:

        E_j = (w_j − ŵ_j) / U_jj,        w_i ← w_i − E_j · U_ji   for i > j

    For every 128 columns, when their turn comes, the weights of largest w²/U_jj² are kept, in all rows together; with n
    of every m, the n of largest w²/U_jj² in each row, when the m are next. Of a unit of several columns the loss is that
    of all of them: ‖w_B U_B⁻¹‖², in all its rows. Each 128 columns keep their share of the layer's budget, so that the
    sum is exact.

    An input that is always zero says nothing: its weights go first, and those that are kept stay as they are.
    """
    w = layout.read().view(layout.groups, -1, layout.columns)
    h = layout.in_order(layout.in_order(grams).transpose(1, 2)).to(w.dtype)
    upper, alive = inverse_factor(h)
    sides = layout.sides
    assert sides is not None, "`check` refuses units that are no tiles"
    n, m = layout.of_every_m or (0, sides[1])
    wide = max(m, BLOCK // m * m)
    shares = Shares(layout.kept, layout.problem.all_units[layout.number])
    for start in range(0, layout.columns, wide):
        here = slice(start, min(start + wide, layout.columns))
        block, u = w[:, :, here].clone(), upper[:, here, here]
        if layout.of_every_m:
            kept, choose = torch.ones_like(block, dtype=torch.bool), (n, m)
        else:
            kept, choose = _choose(block * alive[:, None, here], u, sides, shares), None
        w[:, :, here], errors = eliminate(block, u, kept, choose)
        w[:, :, here.stop :] -= errors @ upper[:, here, here.stop :]
    return w.flatten(0, 1)


class Shares:
    """Divides a number of kept units over parts of a layer in turn, so that any first parts together have their share."""

    def __init__(self, kept: int, units: int) -> None:
        self._kept, self._units, self._done = kept, units, 0

    def next(self, units: int) -> int:
        """How many of the next so many units are kept."""
        before = self._kept * self._done // self._units
        self._done += units
        return self._kept * self._done // self._units - before


def inverse_factor(h: Tensor) -> tuple[Tensor, Tensor]:
    """U, upper triangular with H⁻¹ = UᵀU, for each H of a stack, dampened; and which inputs are ever other than zero."""
    diagonal = h.diagonal(dim1=1, dim2=2)
    alive = diagonal > 0
    damp = DAMPENING * diagonal.mean(1, keepdim=True)
    h = h + torch.diag_embed(torch.where(alive, damp, 1.0).to(h.dtype))
    upper, failed = _factor_of_inverse(h)
    if failed:  # by rounding, where H is large and its inputs are all but equal
        upper, _ = _factor_of_inverse(h.double())
    return upper.to(h.dtype), alive


def _factor_of_inverse(h: Tensor) -> tuple[Tensor, bool]:
    """U, and whether it could not be computed in this precision."""
    factor, failed = torch.linalg.cholesky_ex(h)
    if bool(failed.any()):
        return factor, True
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
    return upper, bool(failed.any())


def eliminate(w: Tensor, upper: Tensor, kept: Tensor, choose: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Columns with their zeros, and E, what each lost; `choose` (n, m) fills in `kept` as the columns come."""
    errors = torch.zeros_like(w)
    diagonal = upper.diagonal(dim1=1, dim2=2)
    for j in range(w.shape[2]):
        if choose is not None and j % choose[1] == 0:
            n, m = choose
            scores = (w[:, :, j : j + m] / diagonal[:, None, j : j + m]).square()
            kept[:, :, j : j + m] = top(scores.reshape(-1, m), n).view_as(scores)
        column = w[:, :, j].clone()
        w[:, :, j] = torch.where(kept[:, :, j], column, 0.0)
        errors[:, :, j] = (column - w[:, :, j]) / diagonal[:, j, None]
        w[:, :, j + 1 :] -= errors[:, :, j, None] * upper[:, None, j, j + 1 :]
    return w, errors


def _choose(w: Tensor, upper: Tensor, sides: tuple[int, int], shares: Shares) -> Tensor:
    """What is kept of some columns: the tiles whose loss would be the largest."""
    (groups, rows, columns), (high, wide) = w.shape, sides
    tiles = w.view(groups, rows, -1, wide).transpose(1, 2)  # groups × tiles across × rows × columns of a tile
    starts = range(0, columns, wide)
    own = torch.stack([upper[:, i : i + wide, i : i + wide] for i in starts], 1)
    losses = torch.linalg.solve_triangular(own, tiles, upper=True, left=False).square().sum(3)
    scores = losses.view(groups, len(starts), -1, high).sum(3).transpose(1, 2)
    kept = hard_topk(scores, shares.next(scores.numel()))
    across = kept[:, :, None, :, None].expand(-1, -1, high, -1, wide)
    return across.reshape(groups, rows, columns)
