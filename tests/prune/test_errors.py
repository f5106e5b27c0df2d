"""Bad input is one clear line, and the model is as it was; so it is after an interrupt."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartan
from spartan import Heads, Sparsifier
from tests.prune.test_criteria import inputs, seeded
from tests.prune.test_stages import Chain


def unchanged(model: nn.Module, call: Callable[[], Any], words: str, error: type[BaseException] = ValueError) -> None:
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(error, match=words) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert model.training
    assert not any("forward" in module.__dict__ for module in model.modules())


X = inputs(20, 6)
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"calibration": None}, r"criterion='wanda' looks at the inputs .* no calibration data; pass calibration=b"),
    "empty": ({"calibration": []}, "calibration is empty; a list of batches"),
    "a tensor": ({"calibration": X}, "calibration is Tensor; a list of batches, each a tensor"),
    "a dict": ({"calibration": {"x": X}}, "calibration is dict; a list of batches"),
    "a number": ({"calibration": 3}, "calibration is int; a list of batches"),
    "a loader's list": ({"calibration": [[X, X]]}, r"batch 0 is a list, .* such as \[x for x, _ in loader\]"),
    "no tensor": ({"calibration": [X, "text"]}, "batch 1 is 'text', without a tensor"),
    "another shape": ({"calibration": [X, X[:, :5]]}, r"run on batch 1 \(\(20, 5\) float64\): mat1 and mat2"),
    "another type": ({"calibration": [X.long()]}, r"cannot be run on batch 0 \(\(20, 6\) int64\): "),
    "another argument": ({"calibration": [{"y": X}]}, r"cannot be run on batch 0 .*unexpected keyword argument 'y'"),
    "nan in a batch": ({"calibration": [X, X * torch.nan]}, "batch 1 holds NaN or infinite values; leave it out"),
    "unknown criterion": ({"criterion": "wand"}, r"'wand' is unknown \(did you mean wanda\?\); \"magnitude\""),
    "data for magnitudes": ({"criterion": "magnitude"}, "calibration is given, and criterion='magnitude' runs no data"),
    "a missing device": ({"device": "cuda:99"}, r"device='cuda:99' cannot be used: "),
    "bad blocks": ({"blocks": "layer.*"}, r"blocks='layer.\*' matches no module"),
    "global": ({"budget": "global"}, "budget='global' with criterion='wanda'"),
    "sparsity": ({"sparsity": 1.5}, r"sparsity=1.5 is outside \[0, 1\)"),
    "heads": ({"criterion": "sparsegpt", "pattern": Heads(2), "include": "*.up.weight"}, "units that are tiles"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_arguments(name: str) -> None:
    options, words = CASES[name]
    model = seeded(Chain(width=12))
    given: dict[str, Any] = {"sparsity": 0.5, "criterion": "wanda", "calibration": [X]} | options
    unchanged(model, lambda: spartan.prune(model, **given), words)


class Unused(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)


class Recurrent(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(8, 8, batch_first=True)


@pytest.mark.parametrize("criterion", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("kind", [Unused, Recurrent])
def test_a_layer_that_no_batch_reaches(kind: type[Chain], criterion: str) -> None:
    model = seeded(kind())
    name = "spare.weight" if kind is Unused else "memory.weight_ih_l0"
    words = rf"none of the 2 batches reaches {name}.*leave it dense with exclude=\['{name}'\]"
    unchanged(model, lambda: spartan.prune(model, 0.5, criterion=criterion, calibration=[X, X]), words)
    model = spartan.prune(
        model, 0.5, criterion=criterion, calibration=[X], exclude=["spare.*", "memory.*"][kind is Recurrent]
    )
    spartan.verify(model, 0.5, budget="uniform", exclude=["spare.*", "memory.*"][kind is Recurrent])


class Exploding(Chain):
    """NaN where a block has been pruned, so that the model is changed when it is found."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1 and (self.blocks[0].up.weight == 0).any():  # type: ignore[union-attr]
                x = x / 0.0
        return self.head(x)


@pytest.mark.parametrize("criterion", ["wanda", "sparsegpt"])
def test_activations_that_are_no_numbers(criterion: str) -> None:
    model = seeded(Exploding())
    words = "the inputs of blocks.2.up.weight hold NaN or infinite values"
    unchanged(model, lambda: spartan.prune(model, 0.5, criterion=criterion, calibration=[X]), words)
    model = seeded(Chain())
    model.first.bias.data[0] = torch.inf
    unchanged(
        model, lambda: spartan.prune(model, 0.5, criterion=criterion, calibration=[X]), "the inputs of .* hold NaN"
    )


def test_a_part_that_no_batch_reaches() -> None:
    """An expert that gets nothing."""
    from tests.prune.test_criteria import Steered

    model = seeded(Steered(False, "loop"))
    words = r"no batch reaches part 1 of 2 of experts.up .*pass more batches, or leave it dense"
    unchanged(
        model,
        lambda: spartan.prune(model, 0.5, criterion="wanda", calibration=[inputs(1, 8)], include="experts.up"),
        words,
    )


class Wayward(Chain):
    """Goes another way with short batches."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in list(self.blocks)[:: 1 if len(x) > 5 else 2]:
            x = block(x)
        return self.head(x)


def test_batches_that_run_other_blocks() -> None:
    model = seeded(Wayward())
    words = r"batch 1 \(\(3, 6\) float64\) does not run the blocks as batch 0 does; leave it out, or pass blocks=\(\)"
    unchanged(model, lambda: spartan.prune(model, 0.5, criterion="wanda", calibration=[X, X[:3]]), words)
    spartan.prune(model, 0.5, criterion="wanda", calibration=[X, X[:3]], blocks=())
    # One that needs both to reach everything is run as a whole.
    model = seeded(Wayward())
    _, report = spartan.prune(model, 0.5, criterion="wanda", calibration=[X[:3], X], report=True)
    assert report.why_whole == "not every block runs once in a run of the model"


@pytest.mark.parametrize("undo", [True, False])
def test_an_interrupt(undo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the second block is run: the model is as it was, or it is said what is pruned."""
    model, calls = seeded(Chain()), []
    before = {name: x.clone() for name, x in model.state_dict().items()}
    forward = model.blocks[1].forward

    def interrupted(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(x)

    model.blocks[1].forward = interrupted
    with pytest.raises(KeyboardInterrupt) as raised:
        spartan.prune(model, 0.5, criterion="sparsegpt", calibration=[X, X], undo=undo)
    assert model.blocks[1].forward is interrupted
    changed = [name for name, x in model.state_dict().items() if not torch.equal(x, before[name])]
    notes = getattr(raised.value, "__notes__", [])
    if undo:
        assert changed == notes == []
    else:
        assert changed == ["first.weight", "blocks.0.up.weight", "blocks.0.down.weight"]
        assert notes == [f"undo=False: these weights of the model are pruned, the others not: {', '.join(changed)}"]


def test_other_refusals() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.Conv2d(4, 2, 1))
    x = torch.randn(1, 3, 4, 4)
    unchanged(
        model,
        lambda: spartan.prune(model, 0.5, criterion="wanda", calibration=[x]),
        r"transposed .* exclude=\['0.weight'\]",
    )
    spartan.prune(model, 0.5, criterion="wanda", calibration=[x], exclude="0.weight")
    owned = seeded(Chain())
    keeper = Sparsifier(owned, 0.5, 10)  # who would find the change later, and say less
    unchanged(owned, lambda: spartan.prune(owned, 0.5), "already belongs to a sparsifier", RuntimeError)
    assert keeper.stats.step == 0


def test_progress(capfd: pytest.CaptureFixture[str]) -> None:
    for progress in (None, False, True):
        spartan.prune(seeded(Chain()), 0.5, criterion="wanda", calibration=[X], progress=progress)
        err = capfd.readouterr().err
        assert ("pruning: blocks.1, 3 of 8 layers done\n" in err) is (progress is True)
        assert bool(err) is (progress is True)


def test_a_bar_on_a_terminal() -> None:
    """With rich, on stderr, and gone in the end; without it, lines."""
    pytest.importorskip("rich")
    program = (
        "import os, pty, select, sys, torch, spartan\n"
        "model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(3)))\n"
        "leader, follower = pty.openpty()\n"
        "os.dup2(follower, 2)\n"
        "if sys.argv[1] == 'plain': sys.modules['rich'] = None\n"
        "spartan.prune(model, 0.5, criterion='wanda', calibration=[torch.randn(4, 8)])\n"
        "while select.select([leader], [], [], 0.5)[0]: sys.stdout.write(os.read(leader, 4096).decode(errors='replace'))\n"
    )
    for kind, words in (("rich", "3/3"), ("plain", "pruning: 2, 2 of 3 layers done")):
        done = subprocess.run([sys.executable, "-c", program, kind], capture_output=True, text=True, timeout=120)
        assert words in done.stdout, done.stdout + done.stderr
