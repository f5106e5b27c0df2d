"""Files of models whose weights stand otherwise than a Linear's: transformers' Conv1D, stacked experts, LSTMs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import NM, Block, Unstructured, accelerate, prune
from spartan.files import codes, load, read, save
from spartan.files.load import open_file
from spartan.problem.patterns import Pattern
from tests import torchvision_cpu as torchvision_cpu
from tests.inference.models import same_bits


class Experts(nn.Module):
    """A matrix for each of four experts, of all of which the outputs are added."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.num_experts, self.is_transposed = 4, is_transposed
        self.up_proj = nn.Parameter(0.1 * torch.randn(4, 64, 96))

    def forward(self, x: Tensor) -> Tensor:
        each = self.up_proj if self.is_transposed else self.up_proj.transpose(1, 2)
        return (x @ each).sum(0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(Conv1D(192, 64), nn.GELU(), Conv1D(64, 192))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "conv1d": conv1d,
    "experts": lambda: nn.Sequential(Experts(False)),
    "experts turned": lambda: nn.Sequential(Experts(True)),
    "lstm": Recurrent,
}
PATTERNS: dict[str, tuple[Pattern, float]] = {
    "single": (Unstructured(), 0.9),
    "square": (Block(8, 8), 0.8),
    "wide": (Block(1, 16), 0.9),
    "tall": (Block(16, 1), 0.9),
    "2:4": (NM(2, 4), 0.5),
    "1:8": (NM(1, 8), 0.875),
}


def bound(weight: Tensor, pattern: Pattern, bits: int) -> float:
    """What the information of a weight takes in bytes: its values, and which units of the pattern are kept."""
    kept = int(weight.count_nonzero())
    if isinstance(pattern, NM):
        return (kept * bits + weight.numel() // pattern.m * math.log2(math.comb(pattern.m, pattern.n))) / 8
    unit = pattern.h * pattern.w if isinstance(pattern, Block) else 1
    return codes.bound(weight.numel() // unit, kept // unit, bits * unit) / 8


@pytest.mark.parametrize("hint", [False, True], ids=["found", "told"])
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("model", MODELS)
def test_files_are_near_the_bound(model: str, kind: str, hint: bool, tmp_path: Path) -> None:
    """With values that are random bits, so that nothing but where they are can be saved."""
    torch.manual_seed(0)
    pattern, sparsity = PATTERNS[kind]
    whole = prune(MODELS[model](), sparsity, pattern=pattern, budget="uniform")
    with torch.no_grad():
        for p in whole.parameters():
            noise = torch.randn(p.shape) * 2.0 ** torch.randint(-60, 60, p.shape)
            p.copy_(torch.where(p != 0, noise, 0.0))
    save(whole, tmp_path / "file", pattern=pattern if hint else None)
    found = open_file(tmp_path / "file")
    assert all(same_bits(x, whole.state_dict()[name]) for name, x in read(tmp_path / "file").items())
    for name, weight in whole.state_dict().items():
        if weight.ndim > 1:
            taken, least = found.specs[name].stored_bytes, bound(weight, pattern, 32)
            assert taken <= 1.02 * least + 64, f"{name}: {found.specs[name].code}"


@pytest.mark.parametrize("kernels", ["dense", "auto", "sparse"])
@pytest.mark.parametrize("kind", ["single", "wide", "2:4"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_loaded_gives_the_same_outputs(model: str, kind: str, kernels: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pattern, sparsity = PATTERNS[kind]
    whole: Any = prune(MODELS[model](), sparsity, pattern=pattern).eval()
    save(whole, tmp_path / "file")
    torch.manual_seed(1)
    x = torch.randn(5, 64 if not model.startswith("experts") or "turned" in model else 96)
    with torch.no_grad():
        expected = whole(x)
        twin = load(tmp_path / "file", MODELS[model]().eval(), kernels=kernels)
        torch.testing.assert_close(twin(x), expected, rtol=1e-4, atol=1e-5)
        if kernels != "dense":
            torch.testing.assert_close(
                accelerate(copy.deepcopy(whole), kernels=kernels)(x), expected, rtol=1e-4, atol=1e-5
            )


def test_a_gpt2_comes_back(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50, n_positions=16)
    torch.manual_seed(0)
    model = prune(transformers.GPT2LMHeadModel(config).eval(), 0.5, pattern=NM(2, 4))
    save(model, tmp_path / "file")
    packed = {name: str(spec.code) for name, spec in open_file(tmp_path / "file").specs.items()}
    assert packed["transformer.h.0.attn.c_attn.weight"] == "nm 2:4 inputs first"
    twin = load(tmp_path / "file", transformers.GPT2LMHeadModel(config).eval())
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(twin(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
