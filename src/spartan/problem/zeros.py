"""Counts the zeros that weights hold."""

from collections.abc import Sequence

import torch

from spartan.distributed import Ranks
from spartan.problem.targets import Target


@torch.no_grad()
def zeros_of(targets: Sequence[Target]) -> list[int]:
    """How many entries of each target are zero, by all processes that hold shards of it."""
    device = targets[0].local.device
    here = [(t.local.numel() - t.local.count_nonzero()).to(device) for t in targets]
    ranks = Ranks.of([t.parameter for t in targets])
    return [int(n) for n in ranks.sum(ranks.counted(torch.stack(here))).tolist()]
