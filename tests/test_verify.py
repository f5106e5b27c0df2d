"""`verify` counts what is really there, and `remask` puts zeros back."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import spartan
from spartan import NM, Block, Flops, Sparsifier
from tests.foreign import library


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


class TestVerify:
    def test_counts_what_is_there(self) -> None:
        model = spartan.prune(net(), 0.8)
        found = spartan.verify(model, 0.8)
        weights = {name: model.get_parameter(name) for name in ("0.weight", "2.weight")}
        assert found.layers == {name: w.count_nonzero().item() / w.numel() for name, w in weights.items()}
        assert found.density == pytest.approx(0.2)
        spartan.verify(model, 0.5)

    def test_names_the_layers_that_lack_zeros(self) -> None:
        model = spartan.prune(net(), 0.8)
        model.get_parameter("2.weight").data.add_(1.0)
        with pytest.raises(
            RuntimeError, match=r"they are 0.6\d* of 0.weight, 2.weight \(asked: 0.8\); fewest: 2.weight 0.00%"
        ):
            spartan.verify(model, 0.8)

    def test_one_weight_too_many_is_seen(self) -> None:
        model = spartan.prune(net(), 0.8)
        weight = model.get_parameter("0.weight").detach().view(-1)
        weight[(weight == 0).nonzero()[0]] = 1e-30
        with pytest.raises(RuntimeError, match="fewer zeros than asked for"):
            spartan.verify(model, 0.8)

    @pytest.mark.parametrize(
        "options",
        [
            {"sparsity": 0.75, "pattern": Block(4, 4)},
            {"sparsity": 0.5, "pattern": NM(2, 4)},
            {"sparsity": 0.8, "budget": "erk"},
            {"sparsity": 0.8, "budget": {"0.*": 0.5}},
            {"sparsity": 0.8, "cost": Flops(torch.zeros(1, 32))},
            {"sparsity": 0.8, "exclude": ["2.*"]},
            {"sparsity": 0.8, "count": "model"},
        ],
        ids=str,
    )
    def test_means_what_prune_means(self, options: dict[str, Any]) -> None:
        spartan.verify(spartan.prune(net(), **options), **options)
        with pytest.raises(RuntimeError, match="fewer zeros"):
            spartan.verify(net(), **options)

    def test_zeros_at_the_wrong_places(self) -> None:
        uneven = spartan.prune(net(), 0.5)
        spartan.verify(uneven, 0.5)
        with pytest.raises(RuntimeError, match=r"of 0.weight \(asked: 0.5\)|of 2.weight \(asked: 0.5\)"):
            spartan.verify(uneven, 0.5, budget="uniform")
        with pytest.raises(RuntimeError, match=r"fewer zeros"):
            spartan.verify(uneven, 0.5, pattern=NM(2, 4))

    def test_a_model_that_cannot_be_trained_counts_whole(self) -> None:
        model = spartan.prune(net(), 0.8).requires_grad_(False)
        assert list(spartan.verify(model, 0.8).layers) == ["0.weight", "2.weight"]
        model[2].weight.requires_grad_(True)
        assert list(spartan.verify(model, 0.5).layers) == ["2.weight"]

    def test_training_on_without_a_sparsifier_loses_zeros(self) -> None:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sparsifier = Sparsifier(model, 0.8, 5, "imp").attach(optimizer)
        for _ in range(5):
            model(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        sparsifier.finalize()
        spartan.verify(model, 0.8)
        sparsifier.detach()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="fewer zeros"):
            spartan.verify(model, 0.8)


class TestRemask:
    def lost(self, model: nn.Module) -> nn.Module:
        """The same model with all weights moved, as by a merge."""
        other = net()
        other.load_state_dict({name: x + 0.5 for name, x in model.state_dict().items()})
        return other

    @pytest.mark.parametrize("kind", ["model", "state dict", "ddp", "compiled", "packed", "plain", "folder", ".pt"])
    def test_zeros_come_back_from_anything(self, kind: str, tmp_path: Path) -> None:
        model = spartan.prune(net(), 0.8)
        like: Any = model
        if kind in ("state dict", "ddp", "compiled"):
            prefix = {"ddp": "module.", "compiled": "_orig_mod."}.get(kind, "")
            like = {prefix + name: x for name, x in model.state_dict().items()}
        elif kind == "packed":
            like = tmp_path / "sparse.safetensors"
            spartan.save(model, like)
        elif kind == "plain":
            like = tmp_path / "plain.safetensors"
            save_file(model.state_dict(), like)
        elif kind == "folder":  # as save_pretrained cuts a large model into several files
            like = tmp_path
            for i, (name, x) in enumerate(model.state_dict().items()):
                save_file({name: x}, tmp_path / f"model-{i}.safetensors", {"format": "pt"})
        elif kind == ".pt":
            like = str(tmp_path / "sparse.pt")
            torch.save(model.state_dict(), like)
        other = self.lost(model)
        before = {name: p.detach().clone() for name, p in other.named_parameters()}
        assert spartan.remask(other, like=like) is other
        spartan.verify(other, 0.8)
        for name, p in other.named_parameters():
            kept = model.get_parameter(name) != 0 if p.ndim > 1 else torch.ones_like(p, dtype=torch.bool)
            assert torch.equal(p[kept], before[name][kept])
            assert not p[~kept].any()

    def test_after_a_merge_of_adapters(self) -> None:
        peft = library("peft")
        model = spartan.prune(net(), 0.8)
        like = {name: x.clone() for name, x in model.state_dict().items()}
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False))
        merged = adapted.merge_and_unload()
        with pytest.raises(RuntimeError, match="fewer zeros"):
            spartan.verify(merged, 0.8, include=["*.weight"])
        spartan.verify(spartan.remask(merged, like=like), 0.8)

    def test_what_does_not_fit_is_named(self, tmp_path: Path) -> None:
        model = spartan.prune(net(), 0.8)
        before = {name: x.clone() for name, x in model.state_dict().items()}
        with pytest.raises(ValueError, match=r"like: 0.weight is \(32, 32\) there and \(8, 32\) in the model"):
            spartan.remask(nn.Sequential(nn.Linear(32, 8)), like=model)
        with pytest.raises(
            ValueError, match=r"like: 2.weight has zeros and is no parameter of the model, which has 0.weight"
        ):
            spartan.remask(nn.Sequential(nn.Linear(32, 32)), like=model)
        with pytest.raises(ValueError, match="like: there is no zero in any weight"):
            spartan.remask(model, like=net())
        with pytest.raises(ValueError, match="like is int; a model, a state dict"):
            spartan.remask(model, like=3)  # type: ignore[arg-type]
        file = tmp_path / "damaged.safetensors"
        file.write_bytes(b"no file of ours")
        with pytest.raises(ValueError, match="damaged"):
            spartan.remask(model, like=file)
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match=r"empty is a folder without \.safetensors files"):
            spartan.remask(model, like=tmp_path / "empty")
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("name", ["_orig_mod", "module"])
def test_a_module_of_ones_own_keeps_the_name_that_wrappers_use(name: str) -> None:
    """Only what torch.compile and DistributedDataParallel put around a model is left out."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(8, 8))
            self.head = nn.Linear(8, 8)

    model = Own()
    sparsifier = Sparsifier(model, 0.5, 10, warmup=0.0)
    assert [layer.name for layer in sparsifier.layers()] == [f"{name}.weight", "head.weight"]
    assert set(spartan.verify(spartan.prune(Own(), 0.5), 0.5).layers) == {f"{name}.weight", "head.weight"}
    alone = nn.Sequential()
    alone.add_module(name, nn.Linear(8, 8))  # every name begins with that of a wrapper
    sparse = spartan.prune(copy.deepcopy(alone), 0.5)
    for like in (sparse, sparse.state_dict(), {f"module._orig_mod.{n}": x for n, x in sparse.state_dict().items()}):
        again = spartan.remask(copy.deepcopy(alone), like=like)
        both = (each.get_parameter(f"{name}.weight") == 0 for each in (again, sparse))
        assert torch.equal(*both)


def test_stats_count_the_zeros_that_are_there() -> None:
    """Not those that were planned; counted when asked, at any time."""
    model = net()
    sparsifier = Sparsifier(model, 0.9, 10, "imp", warmup=0.0)
    weights = [model.get_parameter(name) for name in ("0.weight", "2.weight")]
    total = sum(w.numel() for w in weights)

    def held() -> float:
        return sum(int((w == 0).sum()) for w in weights) / total

    stats = sparsifier.stats
    assert stats.zeros == held() == pytest.approx(1 - stats.density)
    weights[0].data[:, :16] = 1.0
    assert stats.zeros == sparsifier.stats.zeros == held() < 0.6
    assert stats.density < 0.11
    assert copy.deepcopy(stats) == stats
    assert "_targets" not in vars(copy.deepcopy(stats))
