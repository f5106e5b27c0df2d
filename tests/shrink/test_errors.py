"""What shrink refuses, in a line that says what to do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.utils import prune as torch_prune

import spartan
from spartan import Sparsifier
from spartan.shrink import shrink

X = torch.randn(2, 5)


def small() -> Any:
    return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3)).eval()


@pytest.mark.parametrize("example_inputs", [torch.randn(2, 4), (X, X), {"y": X}, torch.randn(2, 5, dtype=torch.double)])
def test_inputs_that_do_not_fit(example_inputs: Any) -> None:
    with pytest.raises(ValueError, match="example_inputs: the model cannot be run on them: "):
        shrink(small(), example_inputs)


@pytest.mark.parametrize("example_inputs", [None, 3, (), {}, "x"])
def test_inputs_that_are_none(example_inputs: Any) -> None:
    with pytest.raises(ValueError, match=r"example_inputs=.*; a tensor, a tuple of arguments or a dict of keyword"):
        shrink(small(), example_inputs)


def test_training_mode() -> None:
    with pytest.raises(ValueError, match=r"^model is in training mode, .* call model\.eval\(\) first"):
        shrink(small().train(), X)
    model = small()
    model[1].train()
    with pytest.raises(ValueError, match="^1 of the model is in training mode"):
        shrink(model, X)


def test_no_model() -> None:
    with pytest.raises(ValueError, match="model is Tensor, not a torch.nn.Module"):
        shrink(X, X)  # type: ignore[call-overload]


def test_a_sparsifier_at_work() -> None:
    model = small()
    sparsifier = Sparsifier(model, 0.5, total_steps=2, method="imp", warmup=0, finetune=0)
    with pytest.raises(RuntimeError, match=r"0\.weight belongs to a sparsifier that is at work; call its finalize\(\)"):
        shrink(model, X)
    sparsifier.attach(torch.optim.SGD(model.parameters(), 0.1)).detach()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_special_tensors() -> None:
    model = small()
    model[0].weight = nn.Parameter(
        torch.quantize_per_tensor(torch.randn(6, 5), 0.1, 0, torch.qint8), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"0\.weight is quantised or another special tensor \(torch.qint8\)"):
        shrink(model, X)
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device"):
        shrink(small().to("meta"), X)
    hooked = small()
    torch_prune.l1_unstructured(hooked[0], "weight", 0.5)
    with pytest.raises(ValueError, match=r"0\.weight_orig is rewritten by a hook"):
        shrink(hooked, X)


def test_sharded_tensors(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        model = small()
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, init_device_mesh("cpu", (1,))))
        with pytest.raises(ValueError, match=r"0\.weight is sharded over several processes"):
            shrink(model, X)
    finally:
        destroy_process_group()


def test_kernels_and_copies() -> None:
    model: Any = spartan.prune(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), 0.9)
    with pytest.raises(ValueError, match="model runs sparse kernels"):
        shrink(spartan.accelerate(model, kernels="sparse"), torch.randn(2, 64))
    model.lock = threading.Lock()  # what cannot be copied
    with pytest.raises(RuntimeError, match="shrink needs a copy of the model, and Sequential cannot be copied"):
        shrink(model, torch.randn(2, 64))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


def test_branches_on_values() -> None:
    with pytest.raises(ValueError, match="torch.export cannot trace Branches: .*no branches that depend on the values"):
        shrink(Branches().eval(), X)


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[x.sum(1) > -100])


def test_shapes_that_depend_on_values() -> None:
    with pytest.raises(ValueError, match="Picks"):
        shrink(Picks().eval(), X)


class NoTensor(nn.Module):
    def forward(self, x: Tensor) -> int:
        return len(x)


def test_no_output() -> None:
    with pytest.raises(ValueError, match="returns no tensor"):
        shrink(NoTensor().eval(), X)


def test_nothing_dead() -> None:
    model = small()
    with pytest.warns(UserWarning, match="^nothing can be cut out of Sequential$"):
        twin, report = shrink(model, X, report=True)
    assert (report.cuts, report.stays, report.refused) == ((), (), ())
    assert str(report) == "parameters  57 → 57 (100.0%)"
    assert twin is not model
    assert torch.equal(twin(X), model(X))


def test_dicts_tuples_and_wrappers() -> None:
    model = small()
    model[0].weight.data[:2] = 0.0
    compiled: Any = torch.compile(model, backend="eager")
    assert shrink(compiled, {"input": X})[0].out_features == 4
    assert shrink(model, (X,))[0].out_features == shrink(model, [X])[0].out_features == 4
