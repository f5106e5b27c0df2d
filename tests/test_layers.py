"""Which layers are targets by default, and patterns, costs and budgets on weights that stand otherwise than a Linear's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm

import spartan
from spartan import NM, Block, Channel, Flops, Heads, Sparsifier
from spartan.problem.axes import Axes
from spartan.problem.patterns import Pattern
from spartan.problem.problem import make_problem
from spartan.problem.targets import find_targets, wanted
from tests.foreign import Conv1D, Experts, Featured, library


def targets(model: nn.Module, **kwargs: Any) -> dict[str, Axes]:
    return {t.name: t.axes for t in find_targets(model, **kwargs)}


class TestDefaults:
    def test_layers_of_other_libraries(self) -> None:
        model = nn.ModuleDict(
            {
                "conv1d": Conv1D(6, 4),
                "right": Featured(6, 4, inputs=4, outputs=6),
                "turned": Featured(4, 6, inputs=4, outputs=6),
                "stack": Featured(3, 6, 4, inputs=4, outputs=6),
                "other": Featured(4, 5, inputs=4, outputs=6),
                "experts": Experts(2, 4, 6),
                "transposed_experts": Experts(2, 4, 6, transposed=True),
                "unknown_experts": Experts(2, 4, 6, transposed=None),
            }
        )
        assert targets(model) == {
            "conv1d.weight": Axes(swapped=True),
            "right.weight": Axes(),
            "turned.weight": Axes(swapped=True),
            "stack.weight": Axes(stacked=True),
            "experts.up": Axes(stacked=True),
            "transposed_experts.up": Axes(swapped=True, stacked=True),
            "unknown_experts.up": Axes(stacked=True, known=False),
        }

    def test_recurrent_layers_and_cells(self) -> None:
        model = nn.ModuleDict(
            {"lstm": nn.LSTM(4, 6, 2, bidirectional=True, proj_size=3), "gru": nn.GRU(4, 6), "cell": nn.LSTMCell(4, 6)}
        )
        lstm = [f"lstm.weight_{w}_l{i}{end}" for i in (0, 1) for end in ("", "_reverse") for w in ("ih", "hh", "hr")]
        gru = ["gru.weight_ih_l0", "gru.weight_hh_l0"]
        assert list(targets(model)) == [*lstm, *gru, "cell.weight_ih", "cell.weight_hh"]

    def test_a_recurrent_weight_that_a_hook_rewrites_is_refused(self) -> None:
        with pytest.warns(FutureWarning):
            model = nn.ModuleDict({"lstm": weight_norm(nn.LSTM(4, 6), "weight_hh_l0")})
        with pytest.raises(ValueError, match="weight_hh_l0_v is rewritten by a hook"):
            find_targets(model)

    @pytest.mark.parametrize("count", ["num_experts", "n_experts", "num_local_experts"])
    def test_a_module_that_counts_experts_has_them(self, count: str) -> None:
        class Mixture(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                setattr(self, count, 3)
                self.w1 = nn.Parameter(torch.randn(3, 4, 5))
                self.w2 = nn.Parameter(torch.randn(2, 4, 5))  # not of three experts

        assert list(targets(Mixture())) == ["w1"]

    def test_what_is_no_expert(self) -> None:
        class Tables(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Linear(4, 4)
                self.pos_embed, self.cls_token = nn.Parameter(torch.randn(1, 9, 4)), nn.Parameter(torch.randn(1, 1, 4))
                self.position_table = nn.Parameter(torch.randn(2, 9, 4))
                self.weight = nn.Parameter(torch.randn(3, 9, 4))
                self.bilinear, self.norm = nn.Bilinear(3, 4, 5), nn.LayerNorm((3, 4, 5))
                self.moe_norm = nn.LayerNorm((3, 4, 5))
                self.experts = Experts(2, 4, 6)
                self.experts.up_scale = nn.Parameter(torch.randn(2, 4, 6))

        assert list(targets(Tables())) == ["body.weight", "experts.up"]
        assert targets(Tables(), include="pos_embed") == {"pos_embed": Axes(stacked=True, known=False)}
        assert targets(nn.Conv1d(4, 6, 3), include="weight") == {"weight": Axes()}

    def test_a_tied_embedding_is_a_target_only_by_name(self) -> None:
        model = nn.ModuleDict({"embed": nn.Embedding(9, 4), "up": Conv1D(8, 4), "head": nn.Linear(4, 9, bias=False)})
        model["head"].weight = model["embed"].weight
        assert list(targets(model)) == ["up.weight"]
        assert list(targets(model, include="head.weight")) == ["embed.weight"]


# Weights that stand otherwise, each with the matrices in it, as outputs × inputs.
KINDS: dict[str, tuple[str, Callable[[Tensor], list[Tensor]]]] = {
    "conv1d": ("weight", lambda w: [w.t()]),
    "experts": ("up", list),
    "transposed": ("up", lambda w: [m.t() for m in w]),
}


def make(kind: str, outputs: int = 8) -> nn.Module:
    torch.manual_seed(0)
    made = Conv1D(outputs, 12) if kind == "conv1d" else Experts(3, 12, outputs, transposed=kind == "transposed")
    return made.double()


PATTERNS = [Block(2, 3), Block(1, -1), Block(-1, 1), Block(-1, -1), Channel(), Channel("in"), NM(2, 4)]


@pytest.mark.parametrize("kind", KINDS)
class TestPatterns:
    @pytest.mark.parametrize("pattern", [*PATTERNS, Heads(2)], ids=repr)
    def test_units_are_those_of_each_matrix(self, kind: str, pattern: Pattern) -> None:
        model, (name, matrices) = make(kind, 24 if pattern == Heads(2) else 8), KINDS[kind]
        problem = make_problem(model, 0.5, pattern=pattern, include=name)
        weight = model.get_parameter(name).detach().double()
        expected = torch.cat([pattern.reduce(m) for m in matrices(weight)])
        assert torch.equal(problem.reduce(0, weight), expected)
        assert problem.units == [len(expected)]
        y = torch.randn_like(expected)
        spread = problem.expand(0, y)
        assert spread.shape == weight.shape
        torch.testing.assert_close((spread * weight).sum(), (y * expected).sum())
        torch.testing.assert_close(problem.reduce(0, spread.contiguous()) / problem.sizes[0], y)

    @pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
    @pytest.mark.parametrize("method", ["spartan", "st3", "rigl"])
    def test_training_is_that_of_linear_layers(self, kind: str, pattern: Pattern, method: str) -> None:
        """A net of such weights trains as the net of Linears that compute the same, whose weights are in the usual order."""
        if method == "rigl" and isinstance(pattern, NM):
            pytest.skip("refused")
        model, (name, matrices) = make(kind), KINDS[kind]
        before = matrices(model.get_parameter(name))
        plain = nn.ModuleList(nn.Linear(12, 8, bias=False) for _ in before).double()
        for weight, m in zip(plain.parameters(), before, strict=True):
            weight.data.copy_(m)
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0)).double()
        options: dict[str, Any] = {"sparsity": 0.5, "total_steps": 8, "method": method, "pattern": pattern}
        options |= {"budget": "global", "warmup": 0.0}
        found = []
        for net, include in ((model, name), (plain, None)):
            torch.manual_seed(1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            sparsifier = Sparsifier(net, include=include, **options).attach(optimizer)
            for _ in range(8):
                outputs = net(x) if net is model else torch.stack([layer(x) for layer in plain])
                outputs.square().mul(torch.arange(1.0, 9.0)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            sparsifier.finalize()
            found.append(list(net.parameters()))
        ours_after = matrices(found[0][0].detach())
        for mine, theirs in zip(ours_after, found[1], strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-9, atol=1e-11)
            assert torch.equal(mine == 0, theirs == 0)

    def test_prune_keeps_n_of_every_m_inputs(self, kind: str) -> None:
        model, (name, matrices) = make(kind), KINDS[kind]
        spartan.prune(model, 0.5, pattern=NM(2, 4), include=name)
        for m in matrices(model.get_parameter(name)):
            assert (m.reshape(8, 3, 4) != 0).sum(2).eq(2).all()


class TestRefusals:
    @pytest.mark.parametrize("pattern", [Channel(), Channel("in"), NM(2, 4), Heads(2)], ids=repr)
    def test_experts_that_do_not_say_which_axis_is_which(self, pattern: Pattern) -> None:
        experts = Experts(3, 12, 12, transposed=None)
        model = nn.ModuleDict({"experts": experts})
        with pytest.raises(ValueError, match=r"`is_transposed`.* of experts.up; leave .* exclude=\['experts.up'\]"):
            make_problem(model, 0.5, pattern=pattern)
        experts.is_transposed = False
        assert make_problem(model, 0.5, pattern=pattern).pattern == pattern

    def test_blocks_take_the_axes_of_experts_as_they_lie(self) -> None:
        model = Experts(3, 12, 8, transposed=None)
        assert make_problem(model, 0.5, pattern=Block(4, 6)).units == [12]

    def test_sides_that_do_not_divide_are_named_as_outputs_by_inputs(self) -> None:
        with pytest.raises(ValueError, match=r"does not divide 6×4 .* of weight; .*exclude=\['weight'\]"):
            make_problem(Conv1D(6, 4), 0.5, pattern=Block(4, 4))


class TestCostsAndBudgets:
    def test_flops_are_tokens(self) -> None:
        problem = make_problem(Conv1D(6, 4), 0.5, cost=Flops(torch.zeros(2, 7, 4)))
        assert problem.prices == [7.0]
        problem = make_problem(Experts(3, 4, 6), 0.5, cost=Flops(torch.zeros(1, 5, 4)))
        assert problem.prices == [5.0]  # every expert sees each of the five
        problem = make_problem(nn.LSTM(4, 6, batch_first=True), 0.5, cost=Flops(torch.zeros(2, 7, 4)))
        assert problem.prices == [7.0, 7.0]

    def test_erk_gives_experts_the_density_of_each_matrix(self) -> None:
        """Four experts of 8×16 and one Linear of 8×16 have the same density; counted as one tensor they would not."""
        model = nn.ModuleDict({"experts": Experts(4, 16, 8), "fc": nn.Linear(16, 8), "big": nn.Linear(32, 32)})
        problem = make_problem(model, 0.8, budget="erk")
        assert problem.segments[0].sparsity == pytest.approx(problem.segments[1].sparsity)
        raw = [24 / 128, 24 / 128, 64 / 1024]
        densities = [1 - s.sparsity for s in problem.segments]
        assert densities == pytest.approx([r * densities[0] / raw[0] for r in raw])
        total = math.fsum(d * t.numel for d, t in zip(densities, problem.targets, strict=True))
        assert total == pytest.approx(0.2 * (512 + 128 + 1024))

    def test_an_lstm_trains_to_its_budget(self) -> None:
        class Reader(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed, self.lstm = nn.Embedding(20, 8), nn.LSTM(8, 16, batch_first=True)
                self.head = nn.Linear(16, 20)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(self.lstm(self.embed(x))[0])

        model = Reader()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sparsifier = Sparsifier(model, 0.9, 20).attach(optimizer)
        tokens = torch.randint(20, (4, 9))
        for _ in range(20):
            nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        sparsifier.finalize()
        weights = [model.get_parameter(name) for name in ("lstm.weight_ih_l0", "lstm.weight_hh_l0", "head.weight")]
        total = sum(w.numel() for w in weights)
        assert sum(int((w != 0).sum()) for w in weights) == math.floor(0.1 * total + 1e-9)
        assert model.embed.weight.all()


class TestModels:
    """Models of other libraries, small."""

    def small(self, kind: str, **kwargs: Any) -> nn.Module:
        sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
        config = getattr(library("transformers"), f"{kind}Config")(**sizes, **kwargs)
        model = getattr(library("transformers"), f"{kind}ForCausalLM")(config)
        assert isinstance(model, nn.Module)
        return model

    def gpt2(self) -> nn.Module:
        hub = library("transformers")
        sizes = {"vocab_size": 84, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
        model = hub.GPT2LMHeadModel(hub.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        assert isinstance(model, nn.Module)
        return model

    def test_gpt2_is_sparse_in_its_blocks(self) -> None:
        model = self.gpt2()
        layers = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
        names = [f"transformer.h.{i}.{layer}.weight" for i in range(2) for layer in layers]
        assert targets(model) == dict.fromkeys(names, Axes(swapped=True))
        tokens = torch.randint(84, (2, 8))
        problem = make_problem(model, 0.9, pattern=Block(4, 8), cost=Flops({"input_ids": tokens}))
        assert problem.prices == [8.0] * 8
        spartan.prune(model, 0.5, pattern=NM(2, 4))
        for name in names:
            assert (model.get_parameter(name).t().reshape(-1, 4) != 0).sum(1).eq(2).all()

    @pytest.mark.parametrize(("kind", "swapped"), [("Mixtral", False), ("GptOss", True), ("GraniteMoe", False)])
    def test_stacked_experts(self, kind: str, swapped: bool) -> None:
        model = self.small(kind, num_local_experts=4, **({"head_dim": 8} if kind == "GptOss" else {}))
        found = targets(model)
        stacked = {name: axes for name, axes in found.items() if axes.stacked}
        if not stacked:
            pytest.skip("a transformers whose experts are Linear layers")
        assert all(name.endswith(("gate_up_proj", "down_proj")) for name in stacked)
        assert all(axes in (Axes(swapped, True), Axes(False, True, known=False)) for axes in stacked.values())
        assert not any("embed" in name or "router" in name or "norm" in name for name in found)

    def test_experts_cost_the_tokens_that_they_see(self) -> None:
        model = self.small("Mixtral", num_local_experts=4, num_experts_per_tok=2)
        if not any(axes.stacked for axes in targets(model).values()):
            pytest.skip("a transformers whose experts are Linear layers")
        problem = make_problem(model, 0.9, cost=Flops({"input_ids": torch.randint(64, (1, 12))}))
        prices = dict(zip((t.name for t in problem.targets), problem.prices, strict=True))
        # 12 tokens, 2 of 4 experts each: 6 of them in the mean.
        assert [price for name, price in prices.items() if "experts" in name] == [6.0, 6.0]

    @pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "beit_base_patch16_224"])
    def test_tables_of_positions_are_no_targets(self, name: str) -> None:
        timm = library("timm")
        with torch.device("meta"):
            self.check_tables(timm.create_model(name))

    def test_tables_of_torchvision_are_no_targets(self) -> None:
        torchvision = library("torchvision")
        with torch.device("meta"):
            self.check_tables(torchvision.models.swin_t())

    def check_tables(self, model: nn.Module) -> None:
        found = {id(t.parameter): t for t in wanted(model)}
        expected = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))}
        assert set(found) == expected
        assert all(t.axes.plain for t in found.values())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int) -> None:
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class TestNotices:
    def test_what_is_left_out_and_why(self) -> None:
        model = nn.ModuleDict(
            {
                "embed": nn.Embedding(10, 10),
                "body": nn.Linear(20, 20),
                "frozen": nn.Linear(10, 10).requires_grad_(False),
                "named": nn.Linear(10, 15),
                "other": nn.Bilinear(5, 5, 2),
            }
        )
        told = repr(Sparsifier(model, 0.5, 10, exclude="named.*"))
        reasons = "left out by name 18.8%, embedding 12.5%, frozen 12.5%, other 6.2%"
        assert f"  left out: 50.0% of the weights of two or more dimensions ({reasons})\n" in told
        with pytest.warns(UserWarning, match=r"leaves out 58.8% .*\(embedding 58.8%\).*41.2%.*include="):
            Sparsifier(nn.Sequential(nn.Embedding(10, 10), nn.Linear(7, 10)), 0.5, 10)
        Sparsifier(nn.Sequential(nn.Embedding(10, 10), nn.Linear(7, 10)), 0.5, 10, include="1.*")
        assert "left out" not in repr(Sparsifier(nn.Linear(4, 4), 0.5, 10))

    def test_base_weights_under_peft(self) -> None:
        peft = library("peft")
        net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        model = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["0", "2"]))
        with pytest.raises(ValueError, match=r"beside the weights of 2 layers \(.*what is to be sparse has to be said"):
            Sparsifier(model, 0.5, 10)
        # LoRA's B is zero, which makes it no checkpoint
        sparsifier = Sparsifier(model, 0.5, 10, method="rigl", include="*lora_*")
        assert all("lora_" in layer.name for layer in sparsifier.layers())
        assert "left out: 80.0% of the weights of two or more dimensions (PEFT base weights 80.0%)" in repr(sparsifier)

    def test_layers_unfrozen_later_are_noticed_once(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sparsifier = Sparsifier(model, 0.5, 10).attach(optimizer)
        train(model, optimizer, torch.randn(3, 8), 2)
        model[0].requires_grad_(True)
        with pytest.warns(UserWarning, match=r"0.weight could not be trained .* after unfreezing.*exclude="):
            train(model, optimizer, torch.randn(3, 8), 1)
        train(model, optimizer, torch.randn(3, 8), 7)
        sparsifier.finalize()
        assert model.get_parameter("0.weight").all()

    def test_layers_excluded_by_name_may_be_unfrozen(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Sparsifier(model, 0.5, 10, exclude="0.*").attach(optimizer)
        model[0].requires_grad_(True)
        train(model, optimizer, torch.randn(3, 8), 3)

    def lopsided(self) -> nn.Sequential:
        """The second layer is so small that nothing of it is left."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
        model.get_parameter("1.weight").data.mul_(1e-6)
        return model

    @pytest.mark.filterwarnings("error:next to nothing")
    @pytest.mark.parametrize("finetune", [0.0, 0.5])
    def test_a_layer_that_is_emptied_is_told_once_when_the_density_is_reached(self, finetune: float) -> None:
        model = self.lopsided()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sparsifier = Sparsifier(model, 0.9, 10, "imp", warmup=0.3, finetune=finetune).attach(optimizer)
        x = torch.randn(3, 64)
        train(model, optimizer, x, 2)
        with pytest.warns(UserWarning, match=r"next to nothing is left of 1.weight: .*min_density="):
            train(model, optimizer, x, 1)
        train(model, optimizer, x, 7)
        sparsifier.finalize()
        assert "nothing is left of 1.weight" in repr(sparsifier)

    @pytest.mark.filterwarnings("error:next to nothing")
    def test_finalize_tells_if_no_step_did(self) -> None:
        sparsifier = Sparsifier(self.lopsided(), 0.9, 10, "imp", warmup=0.0)
        with pytest.warns(UserWarning, match="next to nothing is left of 1.weight"):
            sparsifier.finalize()

    @pytest.mark.filterwarnings("error:next to nothing")
    def test_layers_that_keep_what_was_asked_are_not_told_of(self) -> None:
        model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        Sparsifier(model, 0.9995, 10, "imp", warmup=0.0, budget="uniform").finalize()
        Sparsifier(self.lopsided(), 0.9, 10, "imp", warmup=0.0, min_density=0.01).finalize()


@pytest.mark.parametrize("tied", [False, True])
def test_sparse_gradients(tied: bool) -> None:
    """Of an embedding that is a target they are refused; beside the targets they are nobody's business."""
    model = nn.Sequential(nn.Embedding(50, 16, sparse=True), nn.Linear(16, 50))
    if tied:
        model[1].weight = model[0].weight
    with pytest.raises(
        ValueError, match=r"0\.weight belongs to an embedding with sparse=True.*sparse=False, or exclude"
    ):
        Sparsifier(model, 0.5, 4, include="0.weight")
    if tied:
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, 0.5, 4).attach(optimizer)
    for _ in range(4):
        model(torch.arange(8)).square().mean().backward()
        assert model[0].weight.grad is not None
        assert model[0].weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    sparsifier.finalize()
    spartan.verify(model, 0.5)
