"""Block after block: inputs are those that the pruned blocks before give, whatever the model does in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartan
from spartan.gpt import GPT
from spartan.prune.blocks import find_blocks
from tests.prune import reference
from tests.prune.test_criteria import assert_equal, inputs, seeded


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) / 10


class Chain(nn.Module):
    """An embedding, blocks, a scale between the second and the third, and a head."""

    def __init__(self, width: int = 8, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(blocks))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x) * (1.5 if i == 1 else 1.0)
        return self.head(x.tanh())


def by_hand(model: Chain, x: Tensor, sparsity: float) -> None:
    """The same with inputs that are computed in straight lines."""

    def prune(layer: nn.Linear, seen: Tensor) -> Tensor:
        kept = int((1 - sparsity) * layer.weight.numel() + 1e-9)
        return reference.sparsegpt(layer.weight.detach(), seen.detach(), kept)

    with torch.no_grad():
        first: Any = model.blocks[0]
        # Up to the end of the first block all inputs are those of the dense model.
        h = model.first(x)
        new = prune(model.first, x), prune(first.up, h), prune(first.down, first.up(h).relu())
        for layer, weight in zip((model.first, first.up, first.down), new, strict=True):
            layer.weight.copy_(weight)
        h = first(model.first(x))
        for i, block in enumerate(list(model.blocks)[1:], start=1):
            layer = block
            up, down = prune(layer.up, h), prune(layer.down, layer.up(h).relu())  # type: ignore[arg-type, operator]
            layer.up.weight.copy_(up)  # type: ignore[union-attr, operator]
            layer.down.weight.copy_(down)  # type: ignore[union-attr, operator]
            h = layer(h) * (1.5 if i == 1 else 1.0)
        model.head.weight.copy_(prune(model.head, h.tanh()))


def test_each_block_sees_what_the_pruned_ones_give() -> None:
    model, x = seeded(Chain()), inputs(60, 6)
    mine = copy.deepcopy(model)
    _, report = spartan.prune(mine, 0.5, criterion="sparsegpt", calibration=[x[:20], x[20:]], report=True)
    by_hand(model, x, 0.5)
    for a, b in zip(mine.parameters(), model.parameters(), strict=True):
        assert_equal(a, b.detach())
    assert report.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert report.why_whole == ""
    assert [layer.name for layer in report.layers][:3] == ["first.weight", "blocks.0.up.weight", "blocks.0.down.weight"]
    assert [layer.block for layer in report.layers] == ["", *(f"blocks.{i // 2}" for i in range(6)), ""]
    assert all(layer.kept == layer.weights // 2 for layer in report.layers)
    assert report.peak_bytes is None or report.peak_bytes > 2**20
    assert "3 blocks, one after the other, 2 batches" in str(report)


class Skipping(Chain):
    """The last block reads what the first gave, as in a U-Net, and the head all of them."""

    def forward(self, x: Tensor) -> Tensor:
        a = self.blocks[0](self.first(x))
        b = self.blocks[1](a)
        return self.head(self.blocks[2](b + a.sin()) + a + b)


class Passing(nn.Module):
    """A block that takes and gives more than one tensor, one of them made by the first for all, and one by keyword."""

    def __init__(self, make: bool) -> None:
        super().__init__()
        self.inner, self.make = Mlp(8), make

    def forward(
        self, x: Tensor, bias: Tensor | None = None, *, scale: Tensor
    ) -> tuple[Tensor, None, dict[str, Tensor]]:
        bias = x.mean(0) if bias is None else bias
        return self.inner(x * scale) + bias, None, {"bias": bias}


class Biased(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Passing(i == 0) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scale, bias, x = x.abs().mean(), None, self.first(x)
        for block in self.blocks:
            x, _, more = block(x, bias, scale=scale)
            bias = more["bias"]
        return self.head(x)


class TwoChains(Chain):
    """As an encoder and a decoder: every block of the second chain reads the end of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.Sequential(*(Mlp(8) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        start = self.first(x)
        seen = start
        for block in self.blocks:
            seen = block(seen)
        seen, y = seen.tanh(), start
        for block in self.others:
            y = block(y + seen)
        return self.head(y)


class Overwriting(Chain):
    """Writes into its inputs, and into what its blocks give."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.mul_(0.5))
        for block in self.blocks:
            x.add_(1.0)
            x = block(x).sin_()
        return self.head(x)


@pytest.mark.parametrize("kind", [Skipping, Biased, TwoChains, Overwriting])
@pytest.mark.parametrize("criterion", ["wanda", "sparsegpt"])
def test_blocks_one_at_a_time_are_as_without_stand_ins(kind: type[Chain], criterion: str) -> None:
    """A model of one batch that is run anew for every block, whole, gives the same."""
    model, x = seeded(kind()), inputs(40, 6)
    mine, theirs = copy.deepcopy(model), copy.deepcopy(model)
    _, report = spartan.prune(mine, 0.5, criterion=criterion, calibration=[x], report=True)
    assert len(report.blocks) == (5 if kind is TwoChains else 3)
    stages = [(["first.*", f"{report.blocks[0]}.*"])] + [[f"{name}.*"] for name in report.blocks[1:]] + [["head.*"]]
    for include in stages:
        spartan.prune(theirs, 0.5, criterion=criterion, calibration=[x], include=include, blocks=())
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert_equal(a, b.detach())


def test_outputs_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain only the last block's are held, whatever its length."""
    from spartan.prune.stages import Stages

    held, forget = [], Stages.forget

    def counting(self: Stages) -> None:
        forget(self)
        held.append(sum(isinstance(x, Tensor) for leaves in self._kept.values() for x in leaves))

    monkeypatch.setattr(Stages, "forget", counting)
    batches = list(inputs(60, 6).split(20))
    spartan.prune(seeded(Chain(blocks=6)), 0.5, criterion="wanda", calibration=batches)
    assert held == [3] * 6 + [0]
    held.clear()
    spartan.prune(seeded(Chain(blocks=6)), 0.5, criterion="wanda", calibration=batches, exclude="head.*")
    assert held == [3] * 5 + [0]


class TestFindingBlocks:
    def weights(self, model: nn.Module) -> set[int]:
        return {id(p) for p in model.parameters() if p.ndim > 1}

    def test_outermost_chains(self) -> None:
        model = TwoChains()
        assert list(find_blocks(model, self.weights(model), None)[0]) == [
            "blocks.0",
            "blocks.1",
            "blocks.2",
            "others.0",
            "others.1",
        ]
        deep = nn.Sequential(nn.Sequential(Mlp(4), Mlp(4)), nn.Sequential(Mlp(4), Mlp(4)))
        assert list(find_blocks(deep, self.weights(deep), None)[0]) == ["0", "1"]
        assert list(find_blocks(deep, self.weights(deep), "?.?")[0]) == ["0.0", "0.1", "1.0", "1.1"]

    def test_none(self) -> None:
        plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        assert find_blocks(plain, self.weights(plain), None) == (
            {}, "no ModuleList or Sequential of two or more modules of one class",
        )  # fmt: skip
        assert find_blocks(Chain(), set(), ()) == ({}, "asked for by blocks=()")

    def test_bad_names(self) -> None:
        model = Chain()
        with pytest.raises(
            ValueError, match=r"blocks='layers.\*' matches no module of the model, which has first, blocks"
        ):
            find_blocks(model, self.weights(model), "layers.*")
        with pytest.raises(ValueError, match=r"names blocks.0.up, which is inside blocks.0"):
            find_blocks(model, self.weights(model), "blocks.0*")

    def test_shared_weights(self) -> None:
        model = seeded(Chain())
        model.blocks[2].up.weight = model.blocks[0].up.weight
        _, report = spartan.prune(model, 0.5, criterion="sparsegpt", calibration=[inputs(40, 6)], report=True)
        assert report.why_whole == "blocks.0 and blocks.2 share weights"
        assert "the model as a whole (blocks.0 and" in str(report)
        spartan.verify(model, 0.5, budget="uniform")


class Again(Chain):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class Shared(Chain):
    """A layer outside of the blocks that is used between them."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.between(block(x)).sin()
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Again, "not every block runs once in a run of the model"), (Shared, "between.weight is used by several blocks")],
)
def test_models_that_are_run_as_a_whole(kind: type[Chain], why: str) -> None:
    model, x = seeded(kind()), inputs(40, 6)
    whole = copy.deepcopy(model)
    _, report = spartan.prune(model, 0.5, criterion="sparsegpt", calibration=[x], report=True)
    assert (report.blocks, report.why_whole) == ((), why)
    spartan.prune(whole, 0.5, criterion="sparsegpt", calibration=[x], blocks=())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))


def test_the_model_is_left_as_it_was_but_for_its_weights() -> None:
    model: Any = GPT(context=16, layers=2, width=16, heads=2).train()
    model.layers[0].eval()
    model.config = type("Config", (), {"use_cache": True})()
    before, drawn = {name: p.detach().clone() for name, p in model.named_parameters()}, torch.get_rng_state()
    batches = [torch.randint(256, (2, 16)) for _ in range(2)]
    torch.set_rng_state(drawn)
    spartan.prune(model, 0.5, criterion="sparsegpt", calibration=batches, include="layers.1.*")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [m.training for m in (model, model.layers[0], model.layers[1])] == [True, False, True]
    assert model.config.use_cache
    assert torch.backends.mha.get_fastpath_enabled()
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {f"layers.1.{name}.weight" for name in ("attention.qkv", "attention.out", "up", "down")}


def test_a_compiled_model_is_pruned_inside() -> None:
    model = seeded(Chain())
    compiled: Any = torch.compile(copy.deepcopy(model), backend="eager")
    for each in (model, compiled):
        spartan.prune(each, 0.5, criterion="wanda", calibration=[inputs(40, 6)])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), compiled.parameters(), strict=True))


def test_frozen_models_are_pruned_too() -> None:
    model = seeded(Chain()).requires_grad_(False)
    spartan.prune(model, 0.5, criterion="wanda", calibration=[inputs(40, 6)])
    assert spartan.verify(model, 0.5, budget="uniform").density == 0.5
    half: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    half[0].requires_grad_(False)
    spartan.prune(half, 0.5)
    assert half[0].weight.all()
