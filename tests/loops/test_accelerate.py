"""A loop around accelerate: accumulation, clipping, save_state and load_state."""

from pathlib import Path

import pytest
import torch
from torch import nn

from spartan import Sparsifier, verify
from tests.loops.small import SPARSITY, STEPS, loader, net, same_weights

pytest.importorskip("tests.torchvision_cpu")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")
SAVED = 16  # an epoch is 8 steps


def run(
    method: str | None, order: str = "after", save: Path | None = None, resume: Path | None = None
) -> tuple[nn.Module, Sparsifier | None, list[float]]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, sparsifier = net(), None
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if method and order == "before":
        sparsifier = Sparsifier(model, SPARSITY, STEPS, method).attach(optimizer)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    if method and order == "after":
        sparsifier = Sparsifier(model, SPARSITY, STEPS, method).attach(optimizer)
    step, losses = 0, []
    if resume:
        accelerator.load_state(str(resume))
        step = SAVED
    while step < STEPS:
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss))
            step += accelerator.sync_gradients
        if save and step == SAVED:
            accelerator.save_state(str(save))
    return model, sparsifier, losses


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("method", ["spartan", "rigl"])
def test_sparse_and_resumed(method: str, order: str, tmp_path: Path) -> None:
    """Attached before or after `prepare`; the loop saves and loads what it always does."""
    model, sparsifier, _ = run(method, order, save=tmp_path)
    again, its_sparsifier, _ = run(method, order, resume=tmp_path)
    assert same_weights(model, again)
    for each in (sparsifier, its_sparsifier):
        assert each is not None
        assert each.stats.step == STEPS
        each.finalize()
    verify(model, SPARSITY)


def test_dense_is_as_without_us() -> None:
    assert run("dense")[2] == run(None)[2]


def test_with_a_loss_scaler() -> None:
    """Accelerate keeps the step that the optimizer had when it was prepared, and puts it back after every step."""
    model = net()
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    accelerate.Accelerator(cpu=True)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(
        inner, scaler=scaler
    )  # as `prepare` makes it with mixed_precision="fp16"
    sparsifier = Sparsifier(model, SPARSITY, STEPS).attach(optimizer)
    for _ in range(STEPS // 16):
        for x, y in loader():
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sparsifier.stats.step == STEPS
    sparsifier.finalize()
    verify(model, SPARSITY)


def test_the_optimizer_inside_is_told_apart() -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    accelerate.Accelerator(cpu=True)
    optimizer = accelerate.optimizer.AcceleratedOptimizer(torch.optim.AdamW(model.parameters(), 1e-2), scaler=scaler)
    Sparsifier(model, SPARSITY, STEPS).attach(optimizer.optimizer)
    x, y = next(iter(loader()))
    scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
    with pytest.raises(RuntimeError, match=r"put back the step.*Attach the optimizer that accelerator.prepare"):
        optimizer.step()
