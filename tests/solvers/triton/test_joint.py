"""The joint norm by kernels: against plain torch, on odd shapes, missing gradients, and numbers that are none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartan
from spartan import Sparsifier
from spartan.methods.probmask import ProbMask
from spartan.solvers.triton.joint import KernelClip, ScaleProbe
from spartan.step import clip as clipping
from tests.contract.cases import Net, batch
from tests.solvers.triton import DEVICE

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)
SIZES, OWN, PROBED = [5_000, 1, 0, 33, 2_049, 777, 12], 2, [1, 3]  # the last two are the method's


def made(seed: int = 0, size: float = 1.0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [(size * torch.randn(n, generator=rng)).to(DEVICE) for n in SIZES]


def build(most: float) -> tuple[ScaleProbe, KernelClip]:
    probe = ScaleProbe([SIZES[i] for i in PROBED], DEVICE)
    return probe, KernelClip(SIZES, OWN, PROBED, probe, most)


def wanted(tensors: list[Tensor], most: float, scaled: float) -> list[Tensor]:
    """Gradients were scaled since the backward, what the method holds was not."""
    own = [x * scaled for x in tensors[-OWN:]]
    norm = torch.linalg.vector_norm(torch.cat([*tensors[:-OWN], *own]).double())
    factor = min(1.0, most / (float(norm) + 1e-6)) if math.isfinite(norm) else 1.0
    return [x * factor for x in (*tensors[:-OWN], *own)]


@pytest.mark.parametrize("scaled", [1.0, 1e-3, 64.0])
@pytest.mark.parametrize("most", [3.0, 1e6])
def test_gradients_are_clipped_together_whoever_scaled_some_of_them(most: float, scaled: float) -> None:
    probe, clip = build(most)
    for turn in range(3):  # other memory every time
        before = made(turn)
        probe.look([before[i] for i in PROBED])
        now = [x * scaled for x in before[:-OWN]] + [x.clone() for x in before[-OWN:]]
        want = wanted(now, most, scaled)
        versions = [x._version for x in now]
        clip(now)
        for x, y in zip(now, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-9)
        assert all(x._version > version for x, version in zip(now, versions, strict=True))


def test_where_nobody_has_looked_nothing_was_scaled() -> None:
    _, clip = build(3.0)
    now = made()
    want = wanted(now, 3.0, 1.0)
    clip(now)
    for x, y in zip(now, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_no_number_clips_nothing(value: float) -> None:
    probe, clip = build(3.0)
    now = made()
    probe.look([now[i] for i in PROBED])
    now[0][7] = value
    want = [x.clone() for x in now]
    clip(now)
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(now, want, strict=True))


def test_gradients_too_large_for_their_squares_are_clipped() -> None:
    _, clip = build(3.0)
    now = made(size=1e30)
    clip(now)
    assert float(torch.cat(now).double().norm()) == pytest.approx(3.0, rel=1e-4)


def test_a_gradient_that_is_not_there_counts_nothing() -> None:
    probe, clip = build(3.0)
    now = made()
    want = wanted([torch.zeros_like(x) if i in (0, 3) else x for i, x in enumerate(now)], 3.0, 1.0)
    given: list[Any] = [None if i in (0, 3) else x for i, x in enumerate(now)]
    probe.look([now[1], None])
    clip(given)
    for x, y in zip(given, want, strict=True):
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("own_clip", [None, 1e-2])
def test_training_is_as_without_kernels(own_clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same solver, with the clip by kernels and by torch; the user clips too."""
    runs, done = [], []
    by_kernels = clipping.JointClip._by_kernels
    for forbidden in (False, True):

        def may(self: Any, *args: Any, forbidden: bool = forbidden) -> bool:
            done.append(not forbidden and by_kernels(self, *args))
            return done[-1]

        monkeypatch.setattr(clipping.JointClip, "_by_kernels", may)
        torch.manual_seed(0)
        model = Net().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        method = ProbMask(clip=0.3)
        sparsifier = Sparsifier(model, 0.7, 20, method, warmup=0.0, kernels="triton").attach(optimizer)
        found = []
        for t in range(4):
            x, y = (z.to(DEVICE) for z in batch(t))
            for share in spartan.passes(sparsifier):
                (share * nn.functional.cross_entropy(model(x.float()), y)).backward()
            if own_clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), own_clip)
            optimizer.step()
            optimizer.zero_grad()
            (solver,) = sparsifier._run.weights.solving
            found += [solver.state.per_unit["mean"].clone(), model.hidden.weight.detach().clone()]
        runs.append(found)
    assert done == [True] * 4 + [False] * 4
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)
