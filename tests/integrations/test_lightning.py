"""`Trainer(callbacks=[SpartanCallback(sparsity=…)])`, in Lightning under both of its names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan import Sparsifier, verify
from spartan.problem.targets import Globs
from tests.foreign import library
from tests.loops.small import SPARSITY, loader, net, same_weights

library("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = ["lightning.pytorch", "pytorch_lightning"]
EPOCHS, STEPS, CLIP = 4, 32, 0.5
KEPT = int((64 * 32 + 4 * 64) * (1 - SPARSITY) + 1e-6)


def kept(module: nn.Module) -> int:
    return sum(int((p != 0).sum()) for p in module.parameters() if p.ndim == 2)


def package(name: str = NAMES[0]) -> Any:
    library(name.partition(".")[0])
    return importlib.import_module(name)


def callback(**settings: Any) -> Any:
    from spartan.integrations.lightning import SpartanCallback

    return SpartanCallback(SPARSITY, **settings)


def module(name: str = NAMES[0], **more: Any) -> Any:
    """A module of Lightning's; `more` are methods of its own."""

    class Module(package(name).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.lr = net(), 1e-2

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), self.lr)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    return type("Module", (Module,), more)


def trainer(folder: Path, callbacks: list[Any], name: str = NAMES[0], **options: Any) -> Any:
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS, "accumulate_grad_batches": 2, "gradient_clip_val": CLIP, "accelerator": "cpu",
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    }  # fmt: skip
    if not any(hasattr(each, "best_k_models") for each in callbacks):
        settings["enable_checkpointing"] = False
    return package(name).Trainer(default_root_dir=folder, callbacks=callbacks, **(settings | options))


def fit(
    folder: Path, *callbacks: Any, name: str = NAMES[0], resume: Path | None = None, kind: Any = None, **options: Any
):
    found, mine = trainer(folder, list(callbacks), name, **options), (kind or module(name))()
    more = {} if resume is None else {"ckpt_path": str(resume), "weights_only": False}
    found.fit(mine, loader(), loader(), **more)
    return found, mine


def saves(folder: Path, name: str = NAMES[0], **options: Any) -> Any:
    settings: dict[str, Any] = {"save_top_k": -1, "every_n_epochs": 1, "filename": "{epoch}"}
    return package(name).callbacks.ModelCheckpoint(folder, **(settings | options))


def plain_loop(**settings: Any) -> nn.Module:
    """What the Trainer does with these arguments, written out."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sparsifier = Sparsifier(model, SPARSITY, STEPS, **settings).attach(optimizer)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(loader()):
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
            if i % 2:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    sparsifier.finalize()
    return model


class TestTheSameRun:
    @pytest.mark.parametrize("name", NAMES)
    def test_to_the_bit_and_resumed(self, name: str, tmp_path: Path) -> None:
        """Clipped, accumulated, resumed at the second epoch; reloaded by Lightning."""
        kind = module(name)
        _, whole = fit(tmp_path, callback(), saves(tmp_path, name), name=name, kind=kind)
        assert same_weights(whole.net, plain_loop())
        assert kept(whole) == KEPT
        mine = callback()
        found, again = fit(tmp_path / "b", mine, name=name, kind=kind, resume=tmp_path / "epoch=1.ckpt")
        assert mine.sparsifier.stats.step == STEPS
        assert same_weights(whole, again)
        found.save_checkpoint(tmp_path / "final.ckpt")  # once the run is over
        for file in ("final.ckpt", "epoch=3.ckpt"):
            opened = kind.load_from_checkpoint(tmp_path / file)
            assert same_weights(opened, whole)
            verify(opened, SPARSITY)

    @pytest.mark.parametrize("method", ["topkast", "imp"])
    def test_other_methods(self, method: str, tmp_path: Path) -> None:
        assert same_weights(fit(tmp_path, callback(method=method))[1].net, plain_loop(method=method))

    def test_dense_is_as_without_us(self, tmp_path: Path) -> None:
        assert same_weights(fit(tmp_path, callback(method="dense"))[1], fit(tmp_path)[1])

    def test_weights_restored_after_the_optimizers_are_set_up(self, tmp_path: Path) -> None:
        """The other order, which some strategies choose."""
        strategies = package().strategies

        class Late(strategies.SingleDeviceStrategy):  # type: ignore[misc,name-defined]
            restore_checkpoint_after_setup = True

        _, whole = fit(tmp_path, callback(), saves(tmp_path))
        options: dict[str, Any] = {"strategy": Late("cpu"), "accelerator": "auto"}
        _, again = fit(tmp_path / "b", callback(), resume=tmp_path / "epoch=1.ckpt", **options)
        assert same_weights(whole, again)


class TestWays:
    def test_bf16(self, tmp_path: Path) -> None:
        assert kept(fit(tmp_path, callback(), precision="bf16-mixed")[1]) == KEPT

    def test_a_loss_scaler(self, tmp_path: Path) -> None:
        """As precision="16-mixed" does on a GPU; powers of two leave float32's bits alone."""
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugin = package().plugins.MixedPrecision("16-mixed", "cpu", scaler)
        plugin.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)
        _, found = fit(tmp_path, callback(), plugins=[plugin])
        assert same_weights(found.net, plain_loop())

    def test_compiled(self, tmp_path: Path) -> None:
        kind = module()

        def compiled() -> Any:
            return torch.compile(kind(), backend="aot_eager")

        assert same_weights(fit(tmp_path, callback(), kind=compiled)[1]._orig_mod.net, plain_loop())

    def test_two_optimizers_by_hand(self, tmp_path: Path) -> None:
        """Manual optimization: the schedule moves on when both have stepped."""

        def training_step(self: Any, batch: Any, index: int) -> None:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, gradient_clip_val=CLIP)
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self: Any) -> Any:
            return [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.AdamW(self.net[2].parameters(), 1e-2)]

        kind = module(
            training_step=training_step, configure_optimizers=configure_optimizers, automatic_optimization=False
        )
        options: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
        mine = callback()
        _, found = fit(tmp_path, mine, saves(tmp_path), kind=kind, **options)
        assert mine.sparsifier.stats.step == EPOCHS * len(loader())
        assert kept(found) == KEPT

        model = net()
        both = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.AdamW(model[2].parameters(), 1e-2)  # type: ignore[index]
        Sparsifier(model, SPARSITY, EPOCHS * len(loader())).attach(*both)
        for _ in range(EPOCHS):
            for x, y in loader():
                nn.functional.cross_entropy(model(x), y).backward()
                for optimizer in both:
                    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
        assert same_weights(model, found.net)
        _, again = fit(tmp_path / "b", callback(), kind=kind, resume=tmp_path / "epoch=1.ckpt", **options)
        assert same_weights(found, again)

    def test_an_optimizer_without_targets(self, tmp_path: Path) -> None:
        """The schedule does not wait for one that trains nothing sparse, and steps now and then."""

        def training_step(self: Any, batch: Any, index: int) -> None:
            self.manual_backward(nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
            first, second = self.optimizers()
            first.step()
            if index % 4 == 0:
                second.step()
            self.zero_grad()

        def configure_optimizers(self: Any) -> Any:
            return [torch.optim.SGD(self.net[i].parameters(), 0.1) for i in (0, 2)]

        kind = module(
            training_step=training_step, configure_optimizers=configure_optimizers, automatic_optimization=False
        )
        exclude: Globs = "net.2.*"
        mine = callback(exclude=exclude)
        fit(tmp_path, mine, kind=kind, accumulate_grad_batches=1, gradient_clip_val=None)
        assert mine.sparsifier.stats.step == EPOCHS * len(loader())

    @pytest.mark.parametrize("first", [False, True], ids=["ours first", "theirs first"])
    def test_after_a_search_for_the_learning_rate(self, first: bool, tmp_path: Path) -> None:
        """The search trains the dense module and leaves no trace, whichever callback comes first."""
        searching = package().callbacks.LearningRateFinder(num_training_steps=6, early_stop_threshold=None)
        mine = callback()
        _, found = fit(tmp_path, *((searching, mine) if first else (mine, searching)))
        assert mine.sparsifier.stats.step == STEPS
        assert kept(found) == KEPT
        _, plain = fit(tmp_path / "b", callback(), kind=lambda: self.with_rate(found.lr))
        assert same_weights(found, plain)

    def with_rate(self, lr: float) -> Any:
        found = module()()
        found.lr = lr
        return found

    def test_the_tuner(self, tmp_path: Path) -> None:
        mine, found = callback(), module()()
        searcher = trainer(tmp_path, [mine])
        package().tuner.Tuner(searcher).lr_find(found, loader(), num_training=6, early_stop_threshold=None)
        assert mine.sparsifier is None
        assert kept(found) == 64 * 32 + 4 * 64
        searcher.fit(found, loader())
        assert kept(found) == KEPT


class TestAverages:
    """They average the dense weights, and hold, validate, save and leave exact zeros."""

    @pytest.mark.parametrize("first", [False, True], ids=["ours first", "theirs first"])
    @pytest.mark.parametrize("kind", ["EMAWeightAveraging", "StochasticWeightAveraging"])
    def test_served(self, kind: str, first: bool, tmp_path: Path) -> None:
        def average() -> Any:
            options = {"decay": 0.8} if kind.startswith("EMA") else {"swa_lrs": 1e-2, "swa_epoch_start": 2}
            return getattr(package().callbacks, kind)(**options)

        def both() -> list[Any]:
            return [average(), callback()] if first else [callback(), average()]

        options: dict[str, Any] = {"accumulate_grad_batches": 1}
        _, found = fit(tmp_path, *both(), saves(tmp_path), **options)
        verify(found, SPARSITY)
        _, again = fit(tmp_path / "b", *both(), resume=tmp_path / "epoch=2.ckpt", **options)
        assert same_weights(found, again)
        assert not same_weights(found, fit(tmp_path / "c", callback(), **options)[1])


class TestTheBestModel:
    def run(self, folder: Path, **more: Any) -> Any:
        """The first epoch, before the target density, has the best loss; then the second last."""

        def validation_step(self: Any, batch: Any, index: int) -> None:
            self.log("loss", torch.tensor([0.0, 3.0, 1.0, 2.0, 0.0][self.current_epoch]))

        kind = module(validation_step=validation_step)
        best = saves(folder, monitor="loss", save_top_k=1)
        found, mine = fit(folder, callback(warmup=0.5), best, saves(folder / "all"), kind=kind, **more)
        return found, mine, best

    def test_the_best_counts_from_the_target_density_on(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="does not count: the target density is reached at step 16"):
            found, mine, best = self.run(tmp_path)
        assert best.best_model_path.endswith("epoch=2.ckpt")
        found.validate(mine, loader(), ckpt_path="best", weights_only=False)
        assert kept(mine) == KEPT

    def test_one_from_before_is_refused(self, tmp_path: Path) -> None:
        found, mine, _ = self.run(tmp_path)
        with pytest.raises(RuntimeError, match="from step 8, before the target density is reached, at step 16"):
            found.validate(mine, loader(), ckpt_path=str(tmp_path / "all" / "epoch=0.ckpt"), weights_only=False)


def test_logs(tmp_path: Path) -> None:
    logger = package().loggers.CSVLogger(tmp_path)
    found, _ = fit(tmp_path, callback(method="spartan"), logger=logger, log_every_n_steps=8)
    rows = [line.split(",") for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()]
    column = rows[0].index("density")
    densities = [float(row[column]) for row in rows[1:] if row[column]]
    assert len(densities) == 4
    assert densities[-1] == pytest.approx(1 - SPARSITY, abs=1e-3)
    assert float(found.callback_metrics["beta"]) == 10.0


class Broken:
    """Data that ends with an error."""

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Any:
        yield next(iter(loader()))
        raise ZeroDivisionError


class TestRefused:
    def test_a_checkpoint_without_our_state(self, tmp_path: Path) -> None:
        fit(tmp_path, saves(tmp_path))
        with pytest.raises(
            RuntimeError, match="goes on from step 16, but its checkpoint holds no state of a sparsifier"
        ):
            fit(tmp_path / "b", callback(), resume=tmp_path / "epoch=1.ckpt")

    def test_a_run_without_an_end(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="the Trainer has no end. Pass SpartanCallback"):
            fit(tmp_path, callback(), max_epochs=-1)

    def test_a_run_given_up_leaves_the_dense_weights(self, tmp_path: Path) -> None:
        """An error in the first step, and another try with the same module and callback."""
        mine, found = callback(), module()()
        trying = trainer(tmp_path, [mine])
        with pytest.raises(ZeroDivisionError):
            trying.fit(found, Broken())
        assert mine.sparsifier is not None
        again = trainer(tmp_path, [mine])
        again.fit(found, loader())
        assert mine.sparsifier.stats.step == STEPS
        assert same_weights(found.net, plain_loop())
