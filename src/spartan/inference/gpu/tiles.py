"""Packs a sparse weight into dense tiles, in the order in which the GPU kernel reads them.

The weight is seen as blocks of p outputs × q inputs; those that are all zero are not stored. `Tiling.outputs / p` rows
of blocks make a *group*. The columns in which any of these rows has a block are its *steps*, `Tiling.inputs / q`
columns to a step: one tensor-core product each. Rows with the same columns go into one group, since what the others
lack is stored as zeros. Groups are dealt out to *chunks* (programs of the kernel) so that all have about as many steps.
"""

import functools
import heapq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spartan.inference.cpu.ops import in_blocks

# More rows of blocks than this are grouped by their number of blocks alone.
CLUSTER_ROWS = 2048
# Writing a group's outputs takes about as long as this many steps.
STORE_STEPS = 1.0


@dataclass(frozen=True)
class Tiling:
    """How a weight is cut: tiles of outputs × inputs, made of blocks of p outputs × q inputs.

    Example:
        >>> str(Tiling(64, 64, 16, 16)), str(Tiling(64, 64, 64, 64))
        ('64×64 of 16×16', '64×64')
    """

    outputs: int
    inputs: int
    p: int
    q: int

    def __post_init__(self) -> None:
        sizes = (self.outputs, self.inputs, self.p, self.q)
        if any(size not in (16, 32, 64, 128) for size in sizes) or self.p > self.outputs or self.q > self.inputs:
            raise ValueError(f"Tiling{sizes}: outputs and inputs, and p and q up to these, must be 16, 32, 64 or 128")

    def __str__(self) -> str:
        whole = (self.p, self.q) == (self.outputs, self.inputs)
        return f"{self.outputs}×{self.inputs}" + ("" if whole else f" of {self.p}×{self.q}")


@dataclass(frozen=True)
class Tiles:
    """A packed weight; all but the weight itself is int32. (The kernel reads `ins` and `last` one step ahead.)"""

    weight: Tensor  # [steps, inputs, outputs] of the tiling; at least one step, which may go unused
    ins: Tensor  # [steps + 1, inputs / q], the column of blocks of each part; one beyond the last fills a step up
    last: Tensor  # [steps + 1], the group that a step completes, else −1
    outs: Tensor  # [groups, outputs / p], the row of blocks of each part; one beyond the last fills a group up
    starts: Tensor  # [chunks + 1], the first step of each chunk
    empties: int  # how many groups, at the end, have no step
    tiling: Tiling
    shape: tuple[int, int]  # of the dense weight, outputs × inputs


def blocks_of(nonzero: Tensor, p: int, q: int) -> Tensor:
    """Which blocks of p × q hold a nonzero; the last ones may stick out.

    Example:
        >>> blocks_of(torch.eye(3) != 0, 2, 2).tolist()
        [[True, False], [False, True]]
    """
    return in_blocks(nonzero, p, q).any(3).any(1)


def group_rows(keep: Tensor, size: int) -> Tensor:
    """Rows of blocks in groups of `size`, [groups, size]: those with many blocks first, each joined by the most alike.

    A row beyond the last fills the last group up.

    Example:
        >>> keep = torch.tensor([[1, 0, 0], [0, 1, 1], [1, 0, 0], [0, 1, 1]]).bool()
        >>> group_rows(keep, 2).tolist()
        [[1, 3], [0, 2]]
    """
    # One weight's groups are asked for again and again, while its kernels are compared.
    return _group_rows(keep.cpu().numpy().tobytes(), keep.shape[0], keep.shape[1], size).clone()


@functools.lru_cache(maxsize=8)
def _group_rows(bits: bytes, rows: int, columns: int, size: int) -> Tensor:
    keep = torch.frombuffer(bytearray(bits + b"\0"), dtype=torch.bool)[:-1].reshape(rows, columns)  # never of no bytes
    order = keep.sum(1).argsort(descending=True, stable=True)
    order = torch.cat((order, torch.full((-rows % size,), rows)))
    if size == 1 or rows <= size or rows > CLUSTER_ROWS:
        return order.reshape(-1, size)
    blocks = F.pad(keep.float(), (0, 0, 0, 1))[order]
    free = torch.ones(len(order), dtype=torch.bool)
    groups = []
    for seed in range(len(order)):
        if not free[seed]:
            continue
        free[seed] = False
        group, union = [seed], blocks[seed].clone()
        while len(group) < size:
            # The columns that a row would add, less a little for those it shares: of two that add none, the fuller one.
            grown = blocks @ (1 - 1.001 * union)
            best = int(grown.masked_fill_(~free, float("inf")).argmin())
            free[best] = False
            group.append(best)
            union = torch.maximum(union, blocks[best])
        groups.append(order[group])
    return torch.stack(groups)


def deal(steps: list[int], chunks: int) -> list[list[int]]:
    """Groups with a step to chunks, the longest first and each to the chunk with the least to do.

    Example:
        >>> deal([5, 1, 0, 4, 2], 2)
        [[0, 1], [3, 4]]
    """
    heap = [(0.0, chunk) for chunk in range(chunks)]
    dealt: list[list[int]] = [[] for _ in range(chunks)]
    for group in sorted((g for g, n in enumerate(steps) if n), key=lambda g: -steps[g]):
        load, chunk = heapq.heappop(heap)
        dealt[chunk].append(group)
        heapq.heappush(heap, (load + steps[group] + STORE_STEPS, chunk))
    return dealt


def plan(keep: Tensor, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """The groups of rows of blocks, and for each the columns that it needs, [groups, columns]; both on the CPU."""
    groups = group_rows(keep, tiling.outputs // tiling.p)
    return groups, F.pad(keep.cpu(), (0, 0, 0, 1))[groups].any(1)


def pack(weight: Tensor, tiling: Tiling, span: int) -> Tiles:
    """Pack a dense matrix [outputs, inputs]; a chunk is given about `span` groups.

    Example:
        >>> weight = torch.randn(4, 4).repeat_interleave(16, 0).repeat_interleave(16, 1) * torch.eye(64)
        >>> tiles = pack(weight, Tiling(32, 32, 16, 16), span=1)
        >>> tuple(tiles.weight.shape), torch.equal(unpack(tiles), weight)
        ((2, 32, 32), True)
    """
    (outputs, inputs), device = weight.shape, weight.device
    p, q, parts = tiling.p, tiling.q, tiling.inputs // tiling.q
    keep = blocks_of(weight.detach() != 0, p, q)
    groups, columns = plan(keep, tiling)
    counts = -(-columns.sum(1) // parts)
    filled = int((counts > 0).sum())
    dealt = deal(counts.tolist(), chunks=max(1, -(-filled // span)))
    order = torch.tensor([g for chunk in dealt for g in chunk], dtype=torch.int64)
    groups = torch.cat((groups[order], groups[counts == 0]))
    counts, columns = counts[order], columns[order]

    firsts = F.pad(counts.cumsum(0), (1, 0))
    total = int(firsts[-1])
    group, column = columns.nonzero(as_tuple=True)
    place = torch.arange(len(group)) - F.pad(columns.sum(1).cumsum(0), (1, 0))[group]
    ins = torch.full((total + 1, parts), keep.shape[1])
    ins[firsts[group] + place // parts, place % parts] = column
    last = torch.full((total + 1,), -1)
    last[firsts[1:] - 1] = torch.arange(len(order))
    sizes = torch.tensor([len(chunk) for chunk in dealt]).cumsum(0)
    starts = F.pad(firsts[sizes], (1, 0))

    # One row and one column of zero blocks more, for what fills up.
    padded = F.pad(weight.detach(), (0, (keep.shape[1] + 1) * q - inputs, 0, (keep.shape[0] + 1) * p - outputs))
    cut = padded.reshape(keep.shape[0] + 1, p, keep.shape[1] + 1, q).permute(0, 2, 1, 3)
    rows = torch.repeat_interleave(groups[: len(order)], counts, 0)
    if not total:
        rows = torch.full((1, groups.shape[1]), keep.shape[0])
    tiles = cut[rows[:, None, :].to(device), ins[: len(rows), :, None].to(device)]  # [steps, parts, rows, p, q]
    tiles = tiles.permute(0, 1, 4, 2, 3).reshape(len(rows), tiling.inputs, tiling.outputs).contiguous()
    ins, last, groups, starts = (t.int().contiguous().to(device) for t in (ins, last, groups, starts))
    return Tiles(tiles, ins, last, groups, starts, len(groups) - len(order), tiling, (outputs, inputs))


def unpack(tiles: Tiles) -> Tensor:
    """The dense matrix that was packed."""
    (outputs, inputs), t = tiles.shape, tiles.tiling
    parts, used = t.inputs // t.q, int(tiles.starts[-1])
    across, down = -(-inputs // t.q) + 1, -(-outputs // t.p) + 1
    out = tiles.weight.new_zeros(down, across, t.p, t.q)
    if used:
        ends = tiles.last[:used] >= 0
        group = ends.cumsum(0) - ends.long()  # groups complete in order
        cut = tiles.weight[:used].reshape(used, parts, t.q, -1, t.p).permute(0, 1, 3, 4, 2)
        out[tiles.outs[group][:, None, :].long(), tiles.ins[:used, :, None].long()] = cut
    return out.permute(0, 2, 1, 3).reshape(down * t.p, across * t.q)[:outputs, :inputs].contiguous()
