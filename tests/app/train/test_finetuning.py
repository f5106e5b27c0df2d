"""From a trained run to a sparse one by recipes: gradual, fixed, and with a teacher."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import spartan
from spartan.app.train.config import Config, RecipeError, load_recipe
from spartan.app.train.loop import Trainer, resume, train
from spartan.files import read
from spartan.zoo import digits_cnn

TEXT = Path(__file__)  # reading all of the standard library takes a second
SMALL = [
    "size=tiny", "epochs=2", "model_args={layers: 1, width: 32, heads: 2}", "data.context=16", "data.train_size=128",
    "data.test_size=20", "batch_size=16",
]  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("dense") / "run"
    train(load_recipe("bytes-gpt", [*SMALL, "method=dense", f"data.path={TEXT}"]), run, quiet=True)
    return run / "model.safetensors"


def finetuned(start: Path, *sets: str) -> Config:
    return load_recipe("bytes-gpt-finetune", [*SMALL, f"start={start}", f"data.path={TEXT}", *sets])


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_gradual(dense: Path, start: float, tmp_path: Path) -> None:
    """From a dense file, or from one that is pruned in part, to the recipe's sparsity."""
    file = dense
    if start:
        model = spartan.load(dense, kernels="dense")
        file = tmp_path / "half.pt"
        torch.save(spartan.prune(model, start, budget="uniform", exclude="head.*").state_dict(), file)
    trainer = Trainer(finetuned(file))
    assert trainer.sparsifier.stats.density == 1.0 - start
    summary = train(finetuned(file), tmp_path / "run", quiet=True)
    assert summary["density"] == pytest.approx(0.2, abs=1e-3)
    saved = read(tmp_path / "run" / "model.safetensors")
    for name, x in saved.items():
        if name.startswith("layers") and x.ndim > 1:
            assert int(x.count_nonzero()) == int(0.2 * x.numel() + 1e-9)


def test_a_teacher(dense: Path, tmp_path: Path) -> None:
    """With a weight of 1 and no sparsity, a model that is its own teacher has nothing to learn."""
    alone = finetuned(dense, "sparsity=0", "distill.weight=1", "optimizer.weight_decay=0", "method=fixed")
    trainer = Trainer(alone)
    batch = next(iter(trainer.data.train(0)))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    assert trainer._step(iter([batch])).item() == pytest.approx(0.0, abs=1e-5)
    assert all(torch.allclose(p, q, atol=1e-2) for p, q in zip(trainer.model.parameters(), before, strict=True))
    # Half of the loss is on the labels, at another temperature, and of another file.
    torch.save(spartan.load(dense, kernels="dense").state_dict(), tmp_path / "dense.pt")
    mixed = finetuned(dense, f"distill={{weight: 0.25, temperature: 3, teacher: {tmp_path / 'dense.pt'}}}")
    trainer = Trainer(mixed)
    x, y = next(iter(trainer.data.train(0)))
    with torch.no_grad():
        scores, its = trainer.model(x), spartan.load(dense, kernels="dense")(x)
        labels = torch.nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())
        expected = 0.75 * labels + 0.25 * spartan.distillation_loss(scores, its, 3.0)
    assert trainer._step(iter([(x, y)])).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_run_with_a_teacher_resumes_exactly(dense: Path, tmp_path: Path) -> None:
    config = finetuned(dense, "distill.weight=0.5", "checkpoint_steps=5")
    train(config, tmp_path / "whole", quiet=True)
    train(config, tmp_path / "cut", quiet=True)
    for path in (tmp_path / "cut").iterdir():
        if path.name in ("summary.json", "model.safetensors"):
            path.unlink()
    found = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    found[-1].unlink()
    resume(tmp_path / "cut", quiet=True)
    a, b = (read(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(x, b[name]) for name, x in a.items())


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"distill: there is no model to learn from; name its file in distill.teacher"
    ):
        load_recipe("digits", ["distill.weight=0.5"])
    for setting in ("distill.weight=0", "distill.weight=1.5", "distill.temperature=0"):
        with pytest.raises(RecipeError, match=r"distill: weight .* must lie in \(0, 1\], temperature"):
            load_recipe("digits", [setting, "start=x.pt"])
    with pytest.raises(RecipeError, match=r"distill.wait: there is no such key"):
        load_recipe("digits", ["distill.wait=1"])
    torch.save(digits_cnn(10).state_dict(), tmp_path / "start.pt")
    with pytest.raises(RecipeError, match=r"distill.teacher: there is no file nowhere.pt"):
        Trainer(load_recipe("digits", [f"start={tmp_path / 'start.pt'}", "distill.teacher=nowhere.pt"]))
