"""The kernels of finetuning against the plain master of kept weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from spartan.fast import frozen_engine_for
from spartan.groups import Group
from spartan.kernels.frozen_engine import FrozenEngine
from spartan.masters import FrozenMaster, gather
from spartan import Unstructured
from spartan.problem.targets import Target
from tests.kernels import DEVICE

FINE = torch.iinfo(torch.int32).max
SHAPES = [(5, 3, 2, 2), (4097, 3), (1, 1), (7, 300), (3, 2)]
DENSITY = [0.3, 0.05, 1.0, 1.0, 0.0]


def build(
    fused: bool, dtype: torch.dtype, long: bool = False
) -> tuple[list[Target], list[FrozenMaster], FrozenEngine, Tensor]:
    rng = torch.Generator().manual_seed(0)
    theta = [torch.randn(shape, generator=rng).to(DEVICE, dtype) for shape in SHAPES]
    keep = [(torch.rand(shape, generator=rng) < d).to(DEVICE) for shape, d in zip(SHAPES, DENSITY, strict=True)]
    mask = [torch.rand(shape, generator=rng).to(DEVICE) for shape in SHAPES]
    if fused:  # as it lies, whatever the order
        theta[0] = theta[0].to(memory_format=torch.channels_last)
    targets = [Target((f"w{i}",), nn.Parameter(t), nn.Identity(), "weight") for i, t in enumerate(theta)]
    group = Group(targets, Unstructured(), [1.0] * len(targets), 1.0, 0.9, fused=fused)
    masters = []
    for j, slab in enumerate(group.slabs()):
        each = [gather(slab, x if fused else [x[j]]) for x in (theta, keep, mask)]
        masters.append(FrozenMaster.of(slab, *each))
    if long:
        for master in masters:
            master.index = master.index.long()
    flags = torch.full((2,), FINE, dtype=torch.int32, device=DEVICE)
    engine, _ = frozen_engine_for(group, [(m.theta, m.mask, m.index) for m in masters], flags, 0, "triton")
    assert engine is not None
    return targets, masters, engine, flags


def assert_same(a: Tensor, b: Tensor) -> None:
    """Bit for bit; Triton's interpreter rounds to bf16 towards zero."""
    last_digit = 2.0**-7 if a.dtype == torch.bfloat16 and DEVICE.type == "cpu" else 0.0
    torch.testing.assert_close(a, b, rtol=last_digit, atol=0.0)


def values(targets: list[Target]) -> list[Tensor]:
    return [t.parameter.detach().clone() for t in targets]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_move(fused: bool, dtype: torch.dtype) -> None:
    targets, masters, engine, flags = build(fused, dtype, long=dtype == torch.float16)
    version = targets[0].parameter._version
    engine.write()
    assert targets[0].parameter._version > version
    for a, b in zip(values(targets), [w for m in masters for w in m.weights()], strict=True):
        assert_same(a, b)
        assert not (torch.signbit(a) & (a == 0)).any()
    engine.put()
    mine = values(targets)
    with torch.no_grad():
        for m in masters:
            m.put(range(len(m.targets)))
    for a, b in zip(mine, values(targets), strict=True):
        assert torch.equal(a, b)
    # The optimizer moves everything, what is gone as well.
    with torch.no_grad():
        for t in targets:
            t.parameter.mul_(1.5).add_(0.25)
    plain = copy.deepcopy(masters)
    engine.take()
    for m, p in zip(masters, plain, strict=True):
        p.take(range(len(p.targets)))
        assert torch.equal(m.theta, p.theta)
    engine.write()
    for a, b in zip(values(targets), [w for p in plain for w in p.weights()], strict=True):
        assert_same(a, b)
    assert flags.tolist() == [FINE, FINE]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(fused: bool, dtype: torch.dtype) -> None:
    targets, masters, engine, _ = build(fused, dtype)
    grads: list[Tensor | None] = [torch.randn_like(t.parameter) for t in targets]
    grads[3] = None
    expected, start = [], 0
    for m in masters:
        mine = [None if g is None else g.clone() for g in grads[start : start + len(m.targets)]]
        expected += m.gradients(mine)
        start += len(m.targets)
    engine.mask_gradients(grads)
    for g, e in zip(grads, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None and e is not None:
            assert_same(g, e)


def test_what_is_not_finite_stays_out() -> None:
    targets, masters, engine, flags = build(True, torch.float32)
    engine.write()
    engine.put()
    before = masters[0].theta.clone()
    with torch.no_grad():
        targets[3].parameter.view(-1)[5] = float("nan")
        targets[3].parameter.view(-1)[6] = 7.0
    engine.take()
    assert flags.tolist() == [FINE, 3]
    kept = [int(n) for n in masters[0].kept()]
    place = sum(kept[:3]) + 5  # the fourth keeps everything
    assert masters[0].theta[place] == before[place]
    assert masters[0].theta[place + 1] == 7.0
    assert torch.isfinite(masters[0].theta).all()
    # A gradient that is not finite stops everything.
    grads: list[Tensor | None] = [torch.ones_like(t.parameter) for t in targets]
    assert grads[1] is not None
    grads[1][0, 0] = float("inf")
    engine.check(grads)
    assert flags.tolist() == [1, 3]
    assert not any(g.any() for g in grads if g is not None)
    held = masters[0].theta.clone()
    with torch.no_grad():
        targets[3].parameter.fill_(3.0)
    engine.take()
    assert torch.equal(masters[0].theta, held)
