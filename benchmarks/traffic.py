"""What the passes of every method over the weights must read and write at least, and how often a search read them."""

from __future__ import annotations

from typing import Any, NamedTuple

from spartan import Sparsifier
from spartan.methods.scored import ScoredMasks


class Traffic(NamedTuple):
    """Bytes per float32 weight that a method's own passes read and write, beside those that all have.

    turn        gradients for w into those for θ          g θ, then g θ → g is 20; g θ → g 12; g and a mask → g 9
    choose      beside the search, which reads 4 a pass
    write       θ → p is 8, and what else w is made from
    learn       the optimizer's update of what the method learns, SGD with momentum: p g v → p v is 20
    """

    turn: float
    choose: float = 0.0
    write: float = 8.0
    learn: float = 0.0
    search: str = "topk"  # which search it is: that of magnitudes, of others by name, or none


TRAFFIC = {
    "spartan": Traffic(20.0),
    "topkast": Traffic(0.0),
    "imp": Traffic(12.0),
    "feather": Traffic(12.0),
    "paced": Traffic(16.0 + 4.0),  # w θ g → g where batch norm follows; θ is read once more where it is taken
    "st3": Traffic(0.0, choose=4.0),  # what is kept of every row
    "srste": Traffic(12.0),
    "acdc": Traffic(9.0, write=9.0, search=""),
    "static": Traffic(9.0, write=9.0, search=""),
    "set": Traffic(9.0, write=9.0, search=""),
    "rigl": Traffic(9.0, write=9.0, search=""),
    "svite": Traffic(9.0, write=9.0, search=""),
    "powerprop": Traffic(12.0),
    "movement": Traffic(12.0 + 9.0, choose=5.0, write=9.0, learn=20.0, search="score"),  # scores → mask
    "optg": Traffic(12.0 + 9.0, choose=5.0 + 16.0, write=9.0, learn=20.0, search="score"),  # S step → S step
    "spartan-learned": Traffic(12.0 + 20.0, write=12.0, learn=20.0, search="learned"),
    "str": Traffic(12.0 + 12.0, choose=8.0, write=12.0, search="ranks"),
    # g θ s m → G, g m → g, the norm of g G and both clipped; Adam's s u v G → s u v; s → s within the budget; s → m
    "probmask": Traffic(20.0 + 12.0 + 24.0, choose=28.0 + 8.0 + 8.0, write=12.0, search=""),
}


def floor(run: str, passes: int, density: float, unit: int, finetune: bool) -> float:
    """Bytes per float32 weight that the passes of a step read and write: `TRAFFIC`, and

        check        g                              4
        put, take    θ → p, p → θ                  16
        search       u, once a pass                 4 each; with blocks θ → u once, then u, a number per block

    With the mask fixed, only kept places (index, θ and m; their share d is the density) and zeros are moved. Memory
    moves in runs of 32 bytes, of which s = 1 − (1 − d)⁸ have a kept place: check 4, transform 4s + 8d + 4,
    put 8d + 4s, take 4s + 8d, write 12d + 4.
    """
    if finetune:
        return 12.0 + 12.0 * (1.0 - (1.0 - density) ** 8) + 36.0 * density
    own = TRAFFIC[run]
    search = 4.0 * passes if unit == 1 else 4.0 + (8.0 + 4.0 * passes) / unit
    return 4.0 + 16.0 + own.turn + own.choose + own.write + own.learn + search


def passes_of(sparsifier: Sparsifier, run: str) -> int:
    """How often the last search of the threshold and the mask read the weights, ties included; two in plain torch."""
    search = TRAFFIC[run].search
    if sparsifier.stats.phase == "finetune" or not search:
        return 0
    parts: list[Any] = [part for part in sparsifier._run.weights.solving if part.name == "triton"]
    topks = [part.topk if search == "topk" else part.topk_of(search) for part in parts]
    if not topks:
        return max(2, sparsifier.stats.passes)
    from spartan.solvers.triton.state import PASSES, TIES

    return max(int((topk.states.ints[:, PASSES.value] + topk.states.ints[:, TIES.value]).max()) for topk in topks)


def as_in_the_middle(sparsifier: Sparsifier) -> None:
    """Scores that are learned start at zero, all equal; in the middle of a run no two are. Paced damps by then.

    It does so in layers that batch norm follows, which it has found by looking; here in all of them, the most there can be.
    """
    for part in sparsifier._run.weights.solving:
        damp = part.state.per_target.get("damp")
        if damp is not None:
            part.state.per_target["damp"] = damp + 1.5
    if isinstance(sparsifier.method, ScoredMasks):
        for solver in sparsifier._run.weights.solving:
            sparsifier.method.score(solver).normal_(std=1e-3)
