"""Wanda and SparseGPT in straight lines and float64, from inputs and weights, with inverses in the place of factors."""

from __future__ import annotations

import torch
from torch import Tensor


def wanda(w: Tensor, x: Tensor, kept: int) -> Tensor:
    """Of w (rows × columns), the `kept` weights of largest |w|·‖x‖, as many in each row; x is samples × columns."""
    rows, columns = w.shape
    scores = [[abs(float(w[i, j])) * float(x[:, j].norm()) for j in range(columns)] for i in range(rows)]
    order = [sorted(range(columns), key=lambda j, s=s: -s[j]) for s in scores]  # type: ignore[misc]
    each, rest = divmod(kept, rows)
    lucky = sorted(range(rows), key=lambda i: -scores[i][order[i][each]])[:rest] if rest else []
    found = torch.zeros_like(w)
    for i in range(rows):
        for j in order[i][: each + (i in lucky)]:
            found[i, j] = w[i, j]
    return found


def wanda_nm(w: Tensor, x: Tensor, n: int, m: int) -> Tensor:
    found = torch.zeros_like(w)
    for i in range(w.shape[0]):
        for start in range(0, w.shape[1], m):
            group = range(start, start + m)
            for j in sorted(group, key=lambda j: -abs(float(w[i, j])) * float(x[:, j].norm()))[:n]:
                found[i, j] = w[i, j]
    return found


def dampened(x: Tensor) -> Tensor:
    h = x.T @ x
    return h + 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)


def sparsegpt(w: Tensor, x: Tensor, kept: int, tile: tuple[int, int] = (1, 1), block: int = 128) -> Tensor:
    """Optimal brain surgery from left to right: zeros of every 128 columns chosen when they are next, in all rows.

    As published, weights of inputs that are always zero count for nothing.
    """
    w, h, alive = w.clone(), dampened(x), (x != 0).any(0)
    (rows, columns), (high, wide) = w.shape, tile
    step, units, done, mask = max(wide, block // wide * wide), w.numel() // (high * wide), 0, torch.ones_like(w)
    for start in range(0, columns, step):
        end = min(start + step, columns)
        losses = {}
        for j in range(start, end, wide):
            inverse = torch.linalg.inv(h[j:, j:])[:wide, :wide]  # of what is still to come
            for i in range(0, rows, high):
                part = w[i : i + high, j : j + wide] * alive[j : j + wide]
                losses[i, j] = float(torch.trace(part @ torch.linalg.inv(inverse) @ part.T))
        before, done = kept * done // units, done + len(losses)
        here = kept * done // units - before
        for i, j in sorted(losses, key=lambda at: -losses[at])[here:]:
            mask[i : i + high, j : j + wide] = 0.0
        for j in range(start, end):
            _zero_column(w, h, j, mask[:, j])
    return w * mask


def sparsegpt_nm(w: Tensor, x: Tensor, n: int, m: int) -> Tensor:
    w, h, mask = w.clone(), dampened(x), torch.zeros_like(w)
    for start in range(0, w.shape[1], m):
        scales = [float(torch.linalg.inv(h[j:, j:])[0, 0]) for j in range(start, start + m)]
        for i in range(w.shape[0]):
            losses = {j: float(w[i, j]) ** 2 / scale for j, scale in zip(range(start, start + m), scales, strict=True)}
            for j in sorted(losses, key=lambda j: -losses[j])[:n]:
                mask[i, j] = 1.0
        for j in range(start, start + m):
            _zero_column(w, h, j, mask[:, j])
    return w * mask


def _zero_column(w: Tensor, h: Tensor, j: int, keep: Tensor) -> None:
    """Set what is not kept of a column to zero, and let the columns to its right make up for it."""
    inverse = torch.linalg.inv(h[j:, j:])
    for i in range(w.shape[0]):
        if not keep[i]:
            w[i, j:] -= w[i, j] / inverse[0, 0] * inverse[0]
