"""The published rules against straight-line references in float64, on every kind of layer and pattern; exact budgets."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import spartan
from spartan import NM, Block, Channel, Heads
from spartan.problem.patterns import Pattern
from spartan.prune.sparsegpt import inverse_factor
from tests.foreign import Conv1D, Experts
from tests.prune import reference

CRITERIA = ["wanda", "sparsegpt"]


def inputs(n: int, columns: int, seed: int = 0) -> Tensor:
    """Correlated, of different sizes."""
    g = torch.Generator().manual_seed(seed)
    mixed = torch.randn(n, columns, generator=g, dtype=torch.float64) @ torch.randn(
        columns, columns, generator=g, dtype=torch.float64
    )
    return mixed * torch.rand(columns, generator=g, dtype=torch.float64)


def seeded(model: Any, seed: int = 1) -> Any:
    g = torch.Generator().manual_seed(seed)
    for parameter in model.double().parameters():
        parameter.data = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    return model


def expected(criterion: str, w: Tensor, x: Tensor, kept: int, pattern: Pattern | None = None) -> Tensor:
    if isinstance(pattern, NM):
        rule = reference.wanda_nm if criterion == "wanda" else reference.sparsegpt_nm
        return rule(w, x, pattern.n, pattern.m)
    return (reference.wanda if criterion == "wanda" else reference.sparsegpt)(w, x, kept)


def assert_equal(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found == 0, wanted == 0)
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(("rows", "columns", "sparsity"), [(6, 10, 0.5), (7, 150, 0.71), (5, 3, 0.9), (3, 300, 0.123)])
def test_linear(criterion: str, rows: int, columns: int, sparsity: float) -> None:
    """More than one block of 128 columns, and budgets that rows do not divide."""
    model, x = seeded(nn.Linear(columns, rows)), inputs(400, columns)
    before, bias = model.weight.detach().clone(), model.bias.detach().clone()
    spartan.prune(model, sparsity, criterion=criterion, calibration=[x[:150], x[150:]])
    kept = int((1 - sparsity) * rows * columns + 1e-9)
    assert int(model.weight.count_nonzero()) == kept
    assert_equal(model.weight, expected(criterion, before, x, kept))
    assert torch.equal(model.bias, bias)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_n_of_every_four(criterion: str, n: int) -> None:
    model, x = seeded(nn.Linear(136, 5)), inputs(300, 136)
    before = model.weight.detach().clone()
    spartan.prune(model, 1 - n / 4, criterion=criterion, calibration=[x], pattern=NM(n, 4))
    assert (model.weight.view(-1, 4).count_nonzero(1) == n).all()
    assert_equal(model.weight, expected(criterion, before, x, 0, NM(n, 4)))


@pytest.mark.parametrize(
    "pattern", [Block(1, 4), Block(2, 3), Block(3, 1), Block(-1, 2), Block(1, -1), Channel("in")], ids=str
)
def test_sparsegpt_on_tiles(pattern: Pattern) -> None:
    model, x = seeded(nn.Linear(132, 6)), inputs(300, 132)
    before = model.weight.detach().clone()
    spartan.prune(model, 0.6, criterion="sparsegpt", calibration=[x], pattern=pattern)
    tile = pattern.sides((6, 132))
    assert tile is not None
    kept = int(0.4 * 6 * 132 / (tile[0] * tile[1]) + 1e-9)
    assert int(model.weight.count_nonzero()) == kept * tile[0] * tile[1]
    assert_equal(model.weight, reference.sparsegpt(before, x, kept, tile))


@pytest.mark.parametrize("pattern", [Block(2, 3), Block(3, -1), Channel(), Channel("in"), Heads(2)], ids=str)
def test_wanda_on_units(pattern: Pattern) -> None:
    """Scores are summed over a unit; rows of units compete, and units that fill a row do in the whole layer."""
    model, x = seeded(nn.Linear(12, 18)), inputs(300, 12)
    before = model.weight.detach().clone()
    spartan.prune(model, 0.5, criterion="wanda", calibration=[x], pattern=pattern)
    scores = before.abs() * x.norm(dim=0)
    units = pattern.reduce(scores)
    size = pattern.unit_size((18, 12))
    kept = len(units) // 2
    sides = pattern.sides((18, 12))
    if sides is not None and sides[1] < 12:
        wanted = reference.wanda(units.view(18 // sides[0], -1), torch.ones(1, 12 // sides[1]).double(), kept)
        mask = pattern.expand((wanted != 0).flatten(), (18, 12))
    else:
        mask = pattern.expand(spartan.hard_topk(units, kept), (18, 12))
    assert int(model.weight.count_nonzero()) == kept * size
    assert torch.equal(model.weight, before * mask)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("pattern", [None, NM(2, 4)], ids=str)
@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(8, 5, 3, padding=1, stride=2),
        nn.Conv2d(8, 4, (1, 3), dilation=(1, 2), padding=(0, 2), padding_mode="reflect"),
        nn.Conv1d(4, 6, 3, padding="same"),
        nn.Conv3d(4, 2, 2, bias=False),
        nn.Conv2d(4, 3, 1),
    ],
    ids=str,
)
def test_convolutions_see_their_patches(criterion: str, pattern: Pattern | None, conv: Any) -> None:
    conv = seeded(copy.deepcopy(conv))
    x = inputs(4, conv.in_channels * 216).view(
        4, conv.in_channels, *{1: (216,), 2: (18, 12), 3: (6, 6, 6)}[conv.weight.ndim - 2]
    )
    before = conv.weight.detach().clone()
    spartan.prune(conv, 0.5, criterion=criterion, calibration=[x[:1], x[1:]], pattern=pattern)
    # What every single weight sees is what the convolution gives with a one in its place.
    ones = torch.eye(before[0].numel(), dtype=torch.float64).view(-1, *before.shape[1:])
    probe = copy.deepcopy(conv)
    probe.weight.data, probe.bias = ones, None
    seen = probe(x).movedim(1, -1).flatten(0, -2).detach()
    matrix = before.flatten(1)
    order = torch.arange(matrix.shape[1])
    if pattern is not None:
        order = order.view(before.shape[1], -1).t().flatten()
    wanted = torch.empty_like(matrix)
    wanted[:, order] = expected(criterion, matrix[:, order], seen[:, order], matrix.numel() // 2, pattern)
    assert_equal(conv.weight, wanted.view_as(before))


@pytest.mark.parametrize("criterion", CRITERIA)
def test_groups_of_a_convolution_see_their_own_channels(criterion: str) -> None:
    conv = seeded(nn.Conv2d(8, 4, 3, groups=2))
    x = inputs(3, 8 * 49).view(3, 8, 7, 7)
    before = conv.weight.detach().clone()
    spartan.prune(conv, 0.5, criterion=criterion, calibration=[x])
    assert int(conv.weight.count_nonzero()) == conv.weight.numel() // 2
    if criterion == "wanda":  # rows do not look at one another, so that groups are layers of their own
        for g in range(2):
            seen = F.unfold(x[:, 4 * g : 4 * g + 4], 3).movedim(1, -1).flatten(0, 1)
            half = slice(2 * g, 2 * g + 2)
            assert_equal(conv.weight[half].flatten(1), reference.wanda(before[half].flatten(1), seen, 36))
    depthwise = seeded(nn.Conv2d(6, 6, 3, groups=6))
    spartan.prune(depthwise, 0.5, criterion=criterion, calibration=[x[:, :6]], pattern=Channel())
    assert sorted(depthwise.weight.flatten(1).count_nonzero(1).tolist()) == [0, 0, 0, 9, 9, 9]


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("pattern", [None, NM(2, 4)], ids=str)
def test_inputs_before_outputs(criterion: str, pattern: Pattern | None) -> None:
    """transformers' Conv1D."""
    model, x = seeded(Conv1D(6, 8)), inputs(200, 8)
    before = model.weight.detach().clone()
    spartan.prune(model, 0.5, criterion=criterion, calibration=[x], pattern=pattern)
    assert_equal(model.weight.t(), expected(criterion, before.t(), x, 24, pattern))


class Steered(nn.Module):
    """Experts in a loop: every other sample to the first one, the rest to the second."""

    def __init__(self, transposed: bool, how: str) -> None:
        super().__init__()
        self.experts, self.how = Experts(2, 8, 4, transposed), how

    def forward(self, x: Tensor) -> Any:
        up = self.experts.up
        if self.how == "bmm":
            return torch.bmm(torch.stack((x[::2], x[1::2])), up if self.experts.is_transposed else up.mT)
        one, two = (up[i].T if self.experts.is_transposed else up[i] for i in range(2))
        return F.linear(x[::2], one), x[1::2] @ two.T


@pytest.mark.parametrize("how", ["bmm", "loop"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("criterion", CRITERIA)
def test_experts_see_their_own_samples(criterion: str, transposed: bool, how: str) -> None:
    model, x = seeded(Steered(transposed, how)), inputs(200, 8)
    before = model.experts.up.detach().clone()
    spartan.prune(model, 0.5, criterion=criterion, calibration=[x], include="experts.up", pattern=NM(2, 4))
    for i in range(2):
        found, was = (w[i].T if transposed else w[i] for w in (model.experts.up, before))
        assert_equal(found, expected(criterion, was, x[i::2], 0, NM(2, 4)))


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("same", [True, False])
def test_attention_of_torch(criterion: str, same: bool) -> None:
    """The packed weight is three matrices, of queries, keys and values; the output's inputs are the mixed values."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return self.inner(q, k, v, need_weights=False)

    model = seeded(Attention())
    q, k, v = (inputs(60, 8, 0 if same else seed).view(4, 15, 8) for seed in range(3))
    k, v = (q, q) if same else (k, v)
    before = copy.deepcopy(model)
    spartan.prune(model, 0.5, criterion=criterion, calibration=[(q, k, v)], pattern=NM(2, 4))
    for i, x in enumerate((q, k, v)):
        part = slice(8 * i, 8 * i + 8)
        wanted = expected(criterion, before.inner.in_proj_weight[part].detach(), x.flatten(0, 1), 0, NM(2, 4))
        assert_equal(model.inner.in_proj_weight[part], wanted)
    mixed = copy.deepcopy(before).inner
    mixed.out_proj.weight.data, mixed.out_proj.bias.data = torch.eye(8).double(), torch.zeros(8).double()
    seen = mixed(q, k, v)[0].detach().flatten(0, 1)
    assert_equal(
        model.inner.out_proj.weight, expected(criterion, before.inner.out_proj.weight.detach(), seen, 0, NM(2, 4))
    )


def test_inputs_that_are_always_zero() -> None:
    """Their weights go first; what is kept of them stays as it was, and the budget is exact."""
    x = inputs(100, 8)
    x[:, [1, 2, 5]] = 0.0
    for criterion in CRITERIA:
        model = seeded(nn.Linear(8, 4))
        before = model.weight.detach().clone()
        spartan.prune(model, 0.25, criterion=criterion, calibration=[x])
        assert int(model.weight.count_nonzero()) == 24
        assert int(model.weight[:, [1, 2, 5]].count_nonzero()) == 4
        dead = model.weight[:, [1, 2, 5]]
        assert torch.equal(dead[dead != 0], before[:, [1, 2, 5]][dead != 0])
        nothing = seeded(nn.Linear(8, 4))
        spartan.prune(nothing, 0.5, criterion=criterion, calibration=[torch.zeros(3, 8).double()])
        assert int(nothing.weight.count_nonzero()) == 16


def test_sparsegpt_loses_less_than_wanda_and_wanda_than_magnitude() -> None:
    x = inputs(500, 64)
    dense, errors = seeded(nn.Linear(64, 32)), []
    for criterion in ("magnitude", *CRITERIA):
        model = copy.deepcopy(dense)
        data: dict[str, Any] = {} if criterion == "magnitude" else {"calibration": [x]}
        spartan.prune(model, 0.5, criterion=criterion, **data)
        errors.append(float((model(x) - dense(x)).detach().square().mean()))
    assert errors[2] < 0.9 * errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_precisions(criterion: str, dtype: torch.dtype) -> None:
    model = nn.Linear(40, 20).to(dtype)
    spartan.prune(model, 0.7, criterion=criterion, calibration=[inputs(100, 40).to(dtype)])
    assert model.weight.dtype == dtype
    assert int(model.weight.count_nonzero()) == 240


def test_inputs_that_are_all_but_equal() -> None:
    """H is singular but for the dampening, and float32 is still enough, or is left."""
    torch.manual_seed(0)
    x = 1e4 * torch.ones(64, 300) + torch.randn(64, 1)
    model = nn.Linear(300, 20)
    expected = reference.sparsegpt(model.weight.detach().double(), x.double(), 3000)
    spartan.prune(model, 0.5, criterion="sparsegpt", calibration=[x])
    assert int(model.weight.count_nonzero()) == 3000
    w = model.weight.detach().double()
    dense = reference.dampened(x.double())  # the loss that is minimised
    losses = [float(torch.trace(e @ dense @ e.T)) for e in (w - expected, expected)]
    assert losses[0] < 1e-2 * losses[1]
    assert torch.isfinite(w).all()


def test_a_factor_that_float32_does_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed in float64 then; dampened as usual, none was found."""
    monkeypatch.setattr(sys.modules["spartan.prune.sparsegpt"], "DAMPENING", 0.0)
    h = torch.eye(300)[None] * 2e-5 + 1.0
    wanted, found = inverse_factor(h.double())[0], inverse_factor(h)[0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted.float())


class Live(TorchDispatchMode):
    """Counts the large tensors that are there at once."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least, self.most, self._there = at_least, 0, dict[int, StorageWeakRef]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() >= self.at_least:
                self._there[x.untyped_storage()._cdata] = StorageWeakRef(x.untyped_storage())
        self._there = {key: one for key, one in self._there.items() if not one.expired()}
        self.most = max(self.most, len(self._there))
        return found


@pytest.mark.parametrize("turned", [False, True])
def test_a_factor_takes_little_memory(turned: bool) -> None:
    """Of a layer that is wide, H is the largest there is: no more than one other of its size."""
    x = torch.randn(1, 200, 100, dtype=torch.float64)
    h = x.mT @ x
    wanted = torch.linalg.cholesky(
        torch.linalg.inv(h + 0.01 * h.diagonal(dim1=1, dim2=2).mean() * torch.eye(100)), upper=True
    )
    with Live(h.nbytes) as live:
        found, alive = inverse_factor(h.mT if turned else h)
    assert live.most == 2
    assert alive.all()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_budgets(criterion: str) -> None:
    def net() -> Any:
        return seeded(nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 7)))

    x = inputs(50, 12)
    options: dict[str, Any] = {"criterion": criterion}
    kinds: list[dict[str, Any]] = [{}, {"budget": "erk"}, {"budget": {"0.*": 0.3}}, {"count": "model"}]
    kinds.append({"cost": spartan.Flops(torch.zeros(1, 12).double())})
    for more in kinds:
        model = spartan.prune(net(), 0.6, calibration=[x], **options, **more)
        spartan.verify(model, 0.6, **{"budget": "uniform", **more})
    assert [
        int(p.count_nonzero())
        for p in spartan.prune(net(), 0.6, calibration=[x], criterion=criterion).parameters()
        if p.ndim > 1
    ] == [144, 84]
    with pytest.raises(ValueError, match=r"budget='global' with criterion=.*within a layer only; pass \"uniform\""):
        spartan.prune(net(), 0.6, calibration=[x], criterion=criterion, budget="global")
