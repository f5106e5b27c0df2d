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
