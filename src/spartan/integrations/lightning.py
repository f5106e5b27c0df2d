"""Spartan in the Trainer of Lightning, installed as `lightning` or as `pytorch_lightning`.

    Trainer(callbacks=[SpartanCallback(sparsity=0.9)])

Clipping, accumulation, loss scaling and checkpoints are the Trainer's own: at the end of every backward gradients are
those for the dense weights, and the optimizer's state carries the sparsifier's.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from spartan.integrations import importing
from spartan.integrations.common import Asked, has_flat_parameters, holds_state, is_sharded, numbers
from spartan.sparsifier import Sparsifier
from spartan.stepping import discard, sparse_at

with importing("lightning", "lightning", "pytorch_lightning"):
    # Either's callbacks serve in both: a Trainer calls them by the names of their hooks.
    try:
        from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    except ModuleNotFoundError:
        from pytorch_lightning.callbacks import Callback, ModelCheckpoint  # type: ignore[assignment]


class SpartanCallback(Callback):
    """Trains the Trainer's module to an exact sparsity.

    The sparsifier is built when training begins, after checkpoints are loaded and after a search for the learning rate
    or the batch size, and is finalized when it ends. Callbacks that average weights (`WeightAveraging`,
    `StochasticWeightAveraging`) average the dense ones, and hold the average as sparse as the model.

    Args:
        sparsity: fraction of the counted weights that is gone at the end, in [0, 1).
        total_steps: optimizer steps of the whole run; None is what the Trainer estimates.
        settings: any other argument of `Sparsifier`: method, pattern, cost, budget, include, exclude, warmup, finetune,
            count, min_density, kernels.

    Attributes:
        sparsifier: from the beginning of training on.
    """

    def __init__(self, sparsity: float, total_steps: int | None = None, **settings: Any) -> None:
        self._asked, self._total_steps = Asked(sparsity, settings), total_steps
        self.sparsifier: Sparsifier | None = None
        self._logged = 0  # the last step that was
        self._sparse = True  # whether the target density is reached

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Build the sparsifier: modules are wrapped and restored, and so are the optimizers."""
        if has_flat_parameters(trainer.strategy.model):
            raise ValueError(
                "FSDPStrategy makes one long vector of several weights, in which they cannot be told apart; train with DDP"
            )
        if self.sparsifier is not None:
            discard(self.sparsifier)  # of a run that ended before its time, or of one before this
        resumed = any(map(holds_state, trainer.optimizers))
        self.sparsifier = self._asked.build(pl_module, self._steps(trainer, pl_module), trainer.optimizers)
        why = self._why_not(trainer, resumed)
        if why:
            discard(self.sparsifier)
            raise RuntimeError(why)
        for callback in trainer.callbacks:
            if isinstance(getattr(callback, "_average_model", None), torch.nn.Module):
                self.sparsifier.follow(callback)
        self._sparse = self._step >= sparse_at(self.sparsifier)

    def _why_not(self, trainer: Any, resumed: bool) -> str:
        """Why the run cannot go on; "" if it can."""
        assert self.sparsifier is not None
        if is_sharded(self.sparsifier):
            return (
                "ModelParallelStrategy: Lightning's checkpoints of weights in shards cannot hold the dense weights; train "
                "with DDP, or in a loop of your own with spartan.save_sharded()"
            )
        if trainer.global_step and not resumed:
            return (
                f"the Trainer goes on from step {trainer.global_step}, but its checkpoint holds no state of a sparsifier: "
                "it was saved without SpartanCallback, or with save_weights_only=True. Train from the beginning; or give a "
                "module that is sparse already to a new Trainer, with SpartanCallback(sparsity, method='fixed')."
            )
        return ""

    def _steps(self, trainer: Any, pl_module: Any) -> int:
        """Optimizer steps of the whole run."""
        if self._total_steps is not None:
            return self._total_steps
        steps = trainer.estimated_stepping_batches
        several = not pl_module.automatic_optimization and len(trainer.optimizers) > 1 and trainer.max_steps != -1
        if math.isinf(steps) or steps < 1 or several:
            why = "max_steps counts the steps of every optimizer" if several else "the Trainer has no end"
            raise ValueError(
                f"total_steps is not given, and cannot be told: {why}. Pass SpartanCallback(…, total_steps=…)"
            )
        return int(steps)

    @property
    def _step(self) -> int:
        assert self.sparsifier is not None
        return self.sparsifier._run.at.step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *more: Any, **others: Any) -> None:
        """Log density and β as often as the Trainer logs; forget best models from before the target density."""
        if self.sparsifier is None:
            return
        if not self._sparse and self._step >= sparse_at(self.sparsifier):
            self._sparse = True
            self._forget_best(trainer)
        step = trainer.global_step
        if step != self._logged and step % max(trainer.log_every_n_steps, 1) == 0:
            self._logged, found = step, numbers(self.sparsifier)
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in found.items()})
            for logger in trainer.loggers:
                logger.log_metrics(found, step=step)

    def _forget_best(self, trainer: Any) -> None:
        """What was measured so far was not as sparse as the model is to be: the best is among those that come."""
        for callback in trainer.callbacks:
            # Those of the other name of Lightning are another class.
            if hasattr(callback, "best_k_models") and callback.monitor is not None and callback.best_model_path:
                assert self.sparsifier is not None
                warnings.warn(
                    f"the best model so far, {callback.best_model_path}, does not count: the target density is reached at "
                    f"step {sparse_at(self.sparsifier)}, and a model from before is not as sparse as was asked for",
                    UserWarning,
                    stacklevel=2,
                )
                fresh = ModelCheckpoint(monitor=callback.monitor, mode=callback.mode, save_top_k=callback.save_top_k)
                for name in (
                    "best_k_models",
                    "best_model_score",
                    "best_model_path",
                    "kth_best_model_path",
                    "kth_value",
                ):
                    setattr(callback, name, getattr(fresh, name))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Drop the dense weights: from here on the module is an ordinary sparse one."""
        if self.sparsifier is not None:
            self.sparsifier.finalize()
            self.sparsifier.detach()

    def state_dict(self) -> dict[str, Any]:
        """Whether the weights of a checkpoint are as sparse as was asked for; all else is in the optimizer's state."""
        if self.sparsifier is None:
            return {}
        return {"sparse": self._step >= sparse_at(self.sparsifier), "reached_at": sparse_at(self.sparsifier)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Refuse to evaluate a checkpoint from before the target density, as `ckpt_path="best"` may be."""
        saved = checkpoint.get("callbacks", {}).get(self.state_key, {})
        if trainer.state.fn != "fit" and not saved.get("sparse", True):
            raise RuntimeError(
                f"this checkpoint is from step {checkpoint.get('global_step')}, before the target density is reached, "
                f"at step {saved['reached_at']}: its model is not as sparse as was asked for. Take a later one, or evaluate "
                "it in a Trainer without SpartanCallback."
            )
