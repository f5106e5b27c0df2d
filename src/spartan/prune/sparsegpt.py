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
    # What is chosen at once may be as wide as the layer. It goes by in parts all the same: less memory is written that way.
    step, choose = (wide, (n, m)) if layout.of_every_m else (BLOCK, None)
    for start in range(0, layout.columns, wide):
        here = slice(start, min(start + wide, layout.columns))
        kept = torch.ones_like(w[:, :, here], dtype=torch.bool)
        if choose is None:
            kept = _choose(w[:, :, here] * alive[:, None, here], upper[:, here, here], sides, shares)
        for first in range(start, here.stop, step):
            part = slice(first, min(first + step, here.stop))
            mine = kept[:, :, first - start : part.stop - start]
            w[:, :, part], errors = eliminate(w[:, :, part].clone(), upper[:, part, part], mine, choose)
            w[:, :, part.stop :] -= errors @ upper[:, part, part.stop :]
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
    """U, upper triangular with H⁻¹ = UᵀU, for each H of a stack, dampened; and which inputs are ever other than zero.

    H is overwritten: beside it there is never more than one matrix of its size. With rows and columns in reverse H = LLᵀ,
    and U is L⁻¹, in reverse again.
    """
    diagonal = h.diagonal(dim1=1, dim2=2)
    alive = diagonal > 0
    diagonal += torch.where(alive, DAMPENING * diagonal.mean(1, keepdim=True), 1.0)
    reverse = h.flip(1, 2)
    if reverse.is_contiguous():
        reverse = reverse.mT  # symmetric; columns one after the other, as LAPACK wants them, or it makes a copy
    failed = torch.empty(len(h), dtype=torch.int32, device=h.device)
    torch.linalg.cholesky_ex(reverse, out=(reverse, failed))
    if bool(failed.any()):  # by rounding, where H is large and its inputs are all but equal
        if h.dtype == torch.float64:
            raise ValueError("calibration: the inputs' second moments have no inverse")
        del reverse
        return inverse_factor(h.double())[0].to(h.dtype), alive
    unit = h.zero_()
    diagonal.fill_(1.0)
    torch.linalg.solve_triangular(reverse, unit, upper=False, out=unit)
    del reverse
    return unit.flip(1, 2), alive


def eliminate(w: Tensor, upper: Tensor, kept: Tensor, choose: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Columns with their zeros, and E, what each lost; `choose` (n, m) fills in `kept` as the columns come."""
    errors, scales = torch.empty_like(w), upper.diagonal(dim1=1, dim2=2)[:, None]
    lost = torch.where(kept, 0.0, 1 / scales)  # what a weight's error is of the weight
    for j in range(w.shape[2]):
        if choose is not None and j % choose[1] == 0:
            n, m = choose
            here = slice(j, j + m)
            scores = (w[:, :, here] / scales[:, :, here]).square()
            kept[:, :, here] = top(scores.reshape(-1, m), n).view_as(scores)
            lost[:, :, here] = torch.where(kept[:, :, here], 0.0, 1 / scales[:, :, here])
        # Two operations for a column: a GPU waits for their launches.
        error = torch.mul(w[:, :, j], lost[:, :, j], out=errors[:, :, j])
        w[:, :, j + 1 :].addcmul_(error[:, :, None], upper[:, None, j, j + 1 :], value=-1)
    return torch.where(kept, w, 0.0), errors


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
