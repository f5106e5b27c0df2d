"""Targets, patterns, costs, budgets and schedules, each by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune

import spartan
from spartan import Block, Flops, Sparsifier, Spartan, Unstructured, constant, cosine, cubic, linear
from spartan.problem.budgets import divide, erk
from spartan.problem.patterns import Pattern
from spartan.problem.problem import make_problem
from spartan.problem.schedules import Moment
from spartan.problem.targets import find_targets
from spartan.solvers.units import Units
from tests.contract.cases import Net


def names(model: nn.Module, **kwargs: Any) -> list[str]:
    return [t.name for t in find_targets(model, **kwargs)]


class TestTargets:
    def test_every_kind_of_layer(self) -> None:
        model = nn.ModuleDict(
            {
                "linear": nn.Linear(4, 4),
                "conv1": nn.Conv1d(2, 2, 3),
                "conv2": nn.Conv2d(2, 2, 3),
                "conv3": nn.Conv3d(2, 2, 3),
                "up1": nn.ConvTranspose1d(2, 2, 3),
                "up2": nn.ConvTranspose2d(2, 2, 3),
                "up3": nn.ConvTranspose3d(2, 2, 3),
                "embed": nn.Embedding(5, 4),
                "norm": nn.LayerNorm(4),
                "attention": nn.MultiheadAttention(4, 2),
                "cross": nn.MultiheadAttention(4, 2, kdim=6, vdim=8),
                "rnn": nn.LSTM(4, 4),
            }
        )
        layers = ["linear", "conv1", "conv2", "conv3", "up1", "up2", "up3"]
        assert names(model) == [
            *[f"{layer}.weight" for layer in layers],
            "attention.in_proj_weight",
            "attention.out_proj.weight",
            *[f"cross.{p}_proj_weight" for p in "qkv"],
            "cross.out_proj.weight",
            "rnn.weight_ih_l0",
            "rnn.weight_hh_l0",
        ]
        assert names(model, include="embed.*") == ["embed.weight"]
        assert names(model, include=["rnn.*", "linear.weight"]) == [
            "linear.weight",
            "rnn.weight_ih_l0",
            "rnn.weight_hh_l0",
        ]
        assert "attention.in_proj_weight" not in names(model, exclude="attention.*")

    def test_tied_weights_count_once_and_go_by_every_name(self) -> None:
        model = nn.ModuleDict(
            {"embed": nn.Embedding(6, 4), "body": nn.Linear(4, 4), "head": nn.Linear(4, 6, bias=False)}
        )
        model["head"].weight = model["embed"].weight
        assert names(model) == ["body.weight"]  # the table of an embedding stays dense, unless it is named
        (tied, body) = find_targets(model, include="*.weight")
        assert (tied.names, body.name) == (("embed.weight", "head.weight"), "body.weight")
        assert names(model, include="*", exclude="head.*") == ["body.weight"]
        assert names(model, include="head.*") == ["embed.weight"]

    def test_frozen_and_empty_parameters_are_no_targets(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].weight.requires_grad_(False)
        model[1].weight = nn.Parameter(torch.zeros(0, 4))
        assert names(model) == ["2.weight"]

    def test_wrapped_models_keep_their_names(self) -> None:
        model = Net()
        plain = names(model)
        assert names(nn.DataParallel(model)) == plain
        assert names(torch.compile(model, backend="eager")) == plain  # type: ignore[arg-type]
        model.hidden = torch.compile(model.hidden, backend="eager")  # type: ignore[assignment]
        assert names(model) == plain

    @pytest.mark.parametrize(
        ("rewrite", "message"),
        [
            (lambda m: parametrizations.weight_norm(m), "parametrized already"),
            (lambda m: prune.l1_unstructured(m, "weight", 2), "rewritten by a hook"),
        ],
    )
    def test_weights_that_something_else_rewrites_are_refused(self, rewrite: Any, message: str) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        rewrite(model[0])
        with pytest.raises(ValueError, match=message):
            find_targets(model)
        assert names(model, exclude="0.*") == ["1.weight"]

    def test_layers_without_weights_yet_are_refused(self) -> None:
        with pytest.raises(ValueError, match="run one forward pass"):
            find_targets(nn.Sequential(nn.LazyLinear(4)))
        with pytest.raises(ValueError, match="meta device"):
            find_targets(nn.Linear(4, 4, device="meta"))


class TestPatterns:
    @pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 3), Block(1, -1), Block(-1, 1), Block(-1, -1)])
    @pytest.mark.parametrize("shape", [(4, 6), (4, 2, 3), (2, 3, 2, 1)])
    def test_reduce_and_expand_are_adjoint(self, pattern: Pattern, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape, dtype=torch.float64)
        units = pattern.reduce(x)
        size = pattern.unit_size(shape)
        assert units.numel() * size == x.numel()
        y = torch.randn_like(units)
        torch.testing.assert_close((units * y).sum(), (x * pattern.expand(y, shape)).sum())
        torch.testing.assert_close(pattern.reduce(pattern.expand(y, shape)) / size, y)

    def test_blocks_by_hand(self) -> None:
        x = torch.arange(16.0).reshape(4, 4)
        assert Block(2, 2).reduce(x).tolist() == [10.0, 18.0, 42.0, 50.0]
        assert Block(-1, 1).reduce(x).tolist() == [24.0, 28.0, 32.0, 36.0]
        assert Block(1, -1).reduce(x).tolist() == [6.0, 22.0, 38.0, 54.0]
        kernel = torch.arange(16.0).reshape(2, 2, 2, 2)  # out × in·kh·kw = 2 × 8
        assert Block(2, 4).reduce(kernel).tolist() == [44.0, 76.0]

    def test_units_stand_in_logical_order_whatever_the_memory(self) -> None:
        x = torch.randn(4, 2, 3, 3)
        for pattern in (Unstructured(), Block(2, 2)):
            assert torch.equal(pattern.reduce(x), pattern.reduce(x.to(memory_format=torch.channels_last)))

    def test_block_values_and_costs_are_those_of_the_paper(self) -> None:
        """Value: the sum of magnitudes; cost: the number of entries."""
        model = nn.Linear(4, 4, bias=False)
        problem = make_problem(model, 0.5, pattern=Block(2, 2))
        assert problem.unit_costs == [4.0]
        u = Units(problem).scores()
        torch.testing.assert_close(u * 4.0, Block(2, 2).reduce(model.weight.detach().abs()))


class TestCosts:
    def test_flops_are_output_positions(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ConvTranspose2d(4, 2, 2, stride=2), nn.Flatten(), nn.Linear(128, 3)
        )
        problem = make_problem(model, 0.5, cost=Flops(torch.zeros(5, 2, 6, 6)))
        assert problem.prices == [16.0, 16.0, 1.0]  # 4×4 outputs, 4×4 inputs, one row
        assert problem.total == 16 * 72 + 16 * 32 + 384

    def test_a_sequence_costs_its_tokens(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        problem = make_problem(layer, 0.5, cost=Flops(torch.zeros(3, 7, 8)))
        assert problem.prices == [7.0] * 4

    @pytest.mark.parametrize("power", [1.0, 0.5])
    def test_value_power(self, power: float) -> None:
        """p = 1 ranks by magnitude; p = 0.5 ranks dear parameters lower: u = c^(p−1)·|θ|."""
        model = Net().double()
        cost = Flops(torch.zeros(1, 2, 6, 6).double(), value_power=power)
        problem = make_problem(model, 0.5, cost=cost)
        u = Units(problem).scores()[problem.slices[0]]
        torch.testing.assert_close(u, 4.0 ** (power - 1) * model.conv.weight.detach().abs().reshape(-1))

    def test_a_layer_that_multiplies_nothing_is_named(self) -> None:
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
        with pytest.raises(ValueError, match=r"0.weight takes part in no multiplication.*exclude=\['0.weight'\]"):
            make_problem(model, 0.5, include="*", cost=Flops(torch.zeros(1, 3, dtype=torch.long)))

    def test_a_table_by_name(self) -> None:
        problem = make_problem(Net(), 0.5, cost={"conv.*": 3, "*": 1.0})
        assert problem.prices == [3.0, 1.0, 1.0]

    def test_count_model_makes_the_targets_sparser(self) -> None:
        torch.manual_seed(0)
        model = Net()
        total = sum(p.numel() for p in model.parameters())
        spartan.prune(model, 0.8, count="model")
        zeros = sum(int((p == 0).sum()) for p in (model.conv.weight, model.hidden.weight, model.head.weight))
        assert zeros == math.ceil(0.8 * total - 1e-9)
        sparsifier = Sparsifier(Net(), 0.8, 10, warmup=0.0, count="model")
        stats = sparsifier.stats
        assert stats.target_density == pytest.approx(0.2)
        assert stats.target_density - 1 / total < stats.density <= stats.target_density + 1e-12


class TestBudgets:
    def test_groups(self) -> None:
        targets = find_targets(Net())
        costs = [float(t.numel) for t in targets]
        assert divide("global", 0.9, targets, costs) == [([0, 1, 2], 0.9)]
        assert divide("uniform", 0.9, targets, costs) == [([0], 0.9), ([1], 0.9), ([2], 0.9)]
        assert divide({"h*.weight": 0.5}, 0.9, targets, costs) == [([0], 0.9), ([1], 0.5), ([2], 0.5)]

    @settings(deadline=None)
    @given(
        shapes=st.lists(
            st.tuples(*[st.integers(1, 64)] * 2) | st.tuples(*[st.integers(1, 16)] * 4), min_size=1, max_size=8
        ),
        density=st.floats(0.001, 1.0),
    )
    def test_erk_meets_the_budget_and_saturates(self, shapes: list[tuple[int, ...]], density: float) -> None:
        costs = [float(math.prod(s)) for s in shapes]
        found = erk(shapes, costs, density)
        assert sum(d * c for d, c in zip(found, costs, strict=True)) == pytest.approx(density * sum(costs), rel=1e-9)
        assert all(0 <= d <= 1 for d in found)
        scales = {round(d / (sum(s) / math.prod(s)), 9) for d, s in zip(found, shapes, strict=True) if d < 1}
        raw = [sum(s) / math.prod(s) for s in shapes]
        free = [d / r for d, r in zip(found, raw, strict=True) if d < 1 - 1e-9]
        assert len(scales) <= 1 or max(free) == pytest.approx(min(free), rel=1e-6)
        if free:  # a saturated layer would indeed be over-full at the others' scale
            assert all(r * max(free) >= 1 - 1e-6 for d, r in zip(found, raw, strict=True) if d >= 1 - 1e-9)

    def test_erk_by_hand(self) -> None:
        """Two Linears of 100×10 and 10×10 at 20%: raw densities .11 and .2, none saturates."""
        scale = 0.2 * 1100 / (0.11 * 1000 + 0.2 * 100)
        assert erk([(100, 10), (10, 10)], [1000.0, 100.0], 0.2) == pytest.approx([0.11 * scale, 0.2 * scale])
        # At 50% the small one saturates and the large one takes the rest.
        assert erk([(100, 10), (10, 10)], [1000.0, 100.0], 0.6) == pytest.approx([0.56, 1.0])


class TestSchedules:
    def test_shapes(self) -> None:
        assert [linear(1, 5).at(x) for x in (0, 0.25, 1, 2)] == [1, 2, 5, 5]
        assert cosine(0, 1).at(0.5) == pytest.approx(0.5)
        assert cosine(0, 1).at(0.25) == pytest.approx(0.5 - 0.5 * math.cos(math.pi / 4))
        assert cubic(0, 1).at(0.5) == pytest.approx(0.875)
        assert constant(3).at(0.1) == 3
        assert constant(math.inf).at(0.0) == math.inf
        assert repr(linear(1, 10)) == "linear(1, 10)"

    def test_only_the_end_is_scaled(self) -> None:
        assert linear(1, 10).scaled(16).at(0) == 1
        assert linear(1, 10).scaled(16).at(1) == 160
        assert constant(10).scaled(16).at(0) == 160

    def test_phases(self) -> None:
        start = Moment.start(100, 0.2, 0.3, seed=0)
        assert (start.warmup_steps, start.freeze_step) == (20, 70)
        assert Moment.start(7, 0.5, 0.5, 0) == Moment(0, 7, 3, 3, 0)  # rounding never lets the warm-up pass the freeze
        never = Moment.start(10, 0.0, 0.0, 0)
        assert (never.phase, never.warmed, never.freeze_step) == ("intermediate", 1.0, 10)

    def test_density_and_beta_over_a_run(self) -> None:
        model = Net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sparsifier = Sparsifier(model, 0.9, 20, Spartan(beta=linear(1, 17))).attach(optimizer)
        for t in range(25):
            stats = sparsifier.stats
            assert stats.step == t
            assert stats.target_density == pytest.approx(1 - 0.9 * min(1, t / 4))
            assert stats.beta == pytest.approx(1 + 16 * min(1, t / 16))
            assert stats.phase == ("warmup" if t < 4 else "intermediate" if t < 16 else "finetune")
            model(torch.randn(4, 2, 6, 6).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def test_beta_of_blocks(self) -> None:
        """The end is scaled by √(h·w); where the unit's size varies it is not."""
        common: dict[str, Any] = {"sparsity": 0.5, "total_steps": 10, "warmup": 0.0, "finetune": 1.0}
        common["method"] = "spartan"
        assert Sparsifier(Net(), pattern=Block(2, 2), **common).stats.beta == 20
        assert Sparsifier(Net(), pattern=Block(1, -1), **common).stats.beta == 10
        assert Sparsifier(nn.Linear(4, 9), pattern=Block(-1, 1), **common).stats.beta == pytest.approx(30)
        common["method"] = Spartan(scale_beta=False)
        assert Sparsifier(Net(), pattern=Block(2, 2), **common).stats.beta == 10


class TestPrune:
    @pytest.mark.parametrize("pattern", [Unstructured(), Block(2, 2)])
    @pytest.mark.parametrize("budget", ["global", "uniform", "erk"])
    def test_is_exact(self, pattern: Pattern, budget: str) -> None:
        model = spartan.prune(Net(), 0.75, pattern=pattern, budget=budget)
        problem = make_problem(model, 0.75, pattern=pattern, budget=budget)
        for segment in problem.segments:
            targets = [problem.targets[i] for i in segment.targets]
            kept = sum(int((pattern.reduce(t.parameter.detach().abs()) > 0).sum()) for t in targets)
            assert kept == math.floor(segment.total * (1 - segment.sparsity) / problem.unit_costs[0] + 1e-9)

    def test_keeps_the_largest(self) -> None:
        model = nn.Linear(10, 10)
        before = model.weight.detach().clone()
        spartan.prune(model, 0.9)
        kept = model.weight.detach() != 0
        assert before[kept].abs().min() > before[~kept].abs().max()
        assert torch.equal(model.weight.detach()[kept], before[kept])
