"""Lightning's Trainer, with a callback of six lines: accumulation, clipping, checkpoints of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import Sparsifier, verify
from tests.loops.small import SPARSITY, loader, net, same_weights

pytest.importorskip("tests.torchvision_cpu")
lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Sparse(lightning.pytorch.Callback):  # type: ignore[misc,name-defined]
    def __init__(self, method: str) -> None:
        self.method = method

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        steps = trainer.estimated_stepping_batches
        self.sparsifier = Sparsifier(module, SPARSITY, steps, self.method).attach(*trainer.optimizers)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.sparsifier.finalize()


def fit(folder: Path, method: str | None, resume: Path | None = None) -> tuple[Any, Any]:
    module, sparse = Module(), None if method is None else Sparse(method)
    saves = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", default_root_dir=folder, accumulate_grad_batches=2, gradient_clip_val=0.5,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[x for x in (sparse, saves) if x is not None],
    )  # fmt: skip
    more = {} if resume is None else {"ckpt_path": str(resume), "weights_only": False}
    trainer.fit(module, loader(), **more)
    return module, sparse


@pytest.mark.parametrize("method", ["spartan", "rigl"])
def test_sparse_and_resumed(method: str, tmp_path: Path) -> None:
    module, sparse = fit(tmp_path, method)
    again, its_sparse = fit(tmp_path / "again", method, tmp_path / "epoch=1.ckpt")
    assert sparse.sparsifier.stats.step == its_sparse.sparsifier.stats.step == 32
    assert same_weights(module, again)
    verify(module, SPARSITY)


def test_dense_is_as_without_us(tmp_path: Path) -> None:
    assert fit(tmp_path / "a", "dense")[0].losses == fit(tmp_path / "b", None)[0].losses


class Averaged(Sparse):
    """The same callback, which has the sparsifier follow those that average weights."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        super().on_fit_start(trainer, module)
        for callback in trainer.callbacks:
            if hasattr(callback, "_average_model"):
                self.sparsifier.follow(callback)


def averages(kind: str) -> Any:
    callbacks = lightning.pytorch.callbacks
    if kind == "ema":
        return callbacks.EMAWeightAveraging(decay=0.8)
    return callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2)


class Validated(Module):
    """Looks at the weights that are validated."""

    zeros: list[float]

    def validation_step(self, batch: Any, index: int) -> None:
        weights = [p for p in self.parameters() if p.ndim == 2]
        self.zeros.append(sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights))


def fit_average(folder: Path, kind: str, first: bool, sparse: Sparse, resume: Path | None = None) -> Any:
    module, mean = Validated(), averages(kind)
    module.zeros = []
    saves = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    trainer = lightning.Trainer(
        max_epochs=4, accelerator="cpu", default_root_dir=folder, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[*((mean, sparse) if first else (sparse, mean)), saves],
    )  # fmt: skip
    more = {} if resume is None else {"ckpt_path": str(resume), "weights_only": False}
    trainer.fit(module, loader(), loader(), **more)
    return module


@pytest.mark.parametrize("first", [False, True], ids=["finalized before", "finalized after"])
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_its_averages_are_followed(kind: str, first: bool, tmp_path: Path) -> None:
    """They validate, save, and at the end leave in the model an average that is exactly sparse; resumed, the same."""
    module = fit_average(tmp_path, kind, first, Averaged("spartan"))
    verify(module, SPARSITY)
    assert min(module.zeros[-16:]) >= SPARSITY
    saved = torch.load(tmp_path / "epoch=3.ckpt", weights_only=False)["state_dict"]
    other = Module()
    other.load_state_dict(saved)
    verify(other, SPARSITY)
    again = fit_average(tmp_path / "again", kind, first, Averaged("spartan"), tmp_path / "epoch=1.ckpt")
    assert same_weights(module, again)


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_an_average_that_nobody_follows_is_refused_at_the_first_step(kind: str, tmp_path: Path) -> None:
    sparse = Sparse("spartan")
    with pytest.raises(RuntimeError, match=r"Averaging would average the sparse weights.*sparsifier\.follow"):
        fit_average(tmp_path, kind, False, sparse)
    assert sparse.sparsifier.stats.step == 0
    fit_average(tmp_path, kind, False, Sparse("dense"))


def test_a_callback_that_has_no_average_yet(tmp_path: Path) -> None:
    module = Module()
    with pytest.raises(ValueError, match="on_fit_start"):
        Sparsifier(module, SPARSITY, 32).follow(averages("ema"))
