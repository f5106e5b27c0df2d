"""Spartan in the Trainer of transformers.

    trainer.add_callback(SpartanCallback(sparsity=0.9))

Clipping, accumulation, loss scaling and checkpoints are the Trainer's own: at the end of every backward gradients are
those for the dense weights, and the optimizer's state carries the sparsifier's.
"""

import os
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from spartan.files import load, save
from spartan.integrations import importing
from spartan.integrations.common import Asked, has_flat_parameters, holds_state, is_sharded, numbers
from spartan.sparsifier import Sparsifier
from spartan.state.sharded import load_apart, save_apart
from spartan.step.wrap import unwrapped
from spartan.stepping import discard, finalize_with, sparse_at

with importing("transformers", "transformers", "accelerate"):
    import transformers
    from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper
    from transformers.trainer_callback import CallbackHandler, TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer_pt_utils import LayerWiseDummyOptimizer
    from transformers.training_args import TrainingArguments

# A name of our own: `from_pretrained` and all who look for *.safetensors must not take it for ordinary weights.
PACKED = "model.spartan"
# In a checkpoint, where weights lie in shards.
SHARDS = "spartan"


class SpartanCallback(TrainerCallback):
    """Trains the Trainer's model to an exact sparsity.

    The sparsifier is built when training begins, for as many steps as the Trainer will take, and finalized when it ends:
    `trainer.save_model()` then writes a sparse model that `from_pretrained` opens.

    Args:
        sparsity: fraction of the counted weights that is gone at the end, in [0, 1).
        settings: any other argument of `Sparsifier`: method, pattern, cost, budget, include, exclude, warmup, finetune,
            count, min_density, kernels.

    Attributes:
        sparsifier: from `train()` on.
    """

    def __init__(self, sparsity: float, **settings: Any) -> None:
        self._asked = Asked(sparsity, settings)
        self.sparsifier: Sparsifier | None = None
        self._told = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Build the sparsifier: the model is where it is trained, and a checkpoint has been loaded."""
        model, optimizer = given["model"], given["optimizer"]
        _check(args, model, optimizer)
        _put_first(self)
        if self.sparsifier is not None:
            discard(self.sparsifier)  # of a run that ended before its time, or of one before this
        resumed = holds_state(optimizer)
        self.sparsifier, self._told = self._asked.build(model, state.max_steps, [optimizer]), False
        if is_sharded(self.sparsifier) and state.global_step:
            load_apart(_saved_shards(args, state), self.sparsifier)
        elif state.global_step and not resumed:
            discard(self.sparsifier)
            raise RuntimeError(
                f"the Trainer goes on from step {state.global_step}, but its checkpoint holds no state of a sparsifier: it "
                "was saved without SpartanCallback, or with save_only_model=True. Train from the beginning; or give a model "
                "that is sparse already to a new Trainer, with SpartanCallback(sparsity, method='fixed')."
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **given: Any,
    ) -> None:
        """Add density and β to what is logged of training."""
        if self.sparsifier is not None and logs is not None and "loss" in logs:
            found = numbers(self.sparsifier)
            logs.update(found)
            if state.log_history:
                state.log_history[-1].update(found)  # a copy, made before callbacks are called

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Save what the optimizer's state cannot carry, and forget a best model that is not sparse yet."""
        if self.sparsifier is None:
            return
        if is_sharded(self.sparsifier) and not args.save_only_model:
            save_apart(_shards(args, state), self.sparsifier)
        if state.global_step < sparse_at(self.sparsifier):
            self._forget_best(args, state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Forget a best model that is not sparse yet: the evaluation of the last step may have chosen one."""
        if self.sparsifier is not None and state.global_step < sparse_at(self.sparsifier):
            self._forget_best(args, state)

    def _forget_best(self, args: TrainingArguments, state: TrainerState) -> None:
        if state.best_metric is None:
            return
        if args.load_best_model_at_end and not self._told:
            self._told = True
            assert self.sparsifier is not None
            warnings.warn(
                f"the best model so far, at step {state.global_step}, does not count: the target density is reached at step "
                f"{sparse_at(self.sparsifier)}, and a model from before is not as sparse as was asked for",
                UserWarning,
                stacklevel=4,
            )
        state.best_metric = state.best_global_step = state.best_model_checkpoint = None

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Drop the dense weights: from here on the model is an ordinary sparse one, to be saved."""
        sparsifier = self.sparsifier
        if sparsifier is None:
            return
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is None:
            sparsifier.finalize()
        else:
            finalize_with(sparsifier, f"the best model ({best}), which load_best_model_at_end has loaded,")
        sparsifier.detach()


def save_packed(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> int:
    """Write a model of transformers in few bytes: its configuration, and its weights packed; the file's size.

    Zeros take next to no space in `model.spartan`. No loader of other libraries takes that file for ordinary weights:
    `load_packed` gives the model back, whose `save_pretrained` writes these.

    Args:
        model: the model.
        folder: where to; it is made if it is not there.
        options: `dtype` and `pattern` of `spartan.save`.
    """
    inner: Any = model
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    inner.config.architectures = [type(inner).__name__]  # what `load_packed` builds
    inner.config.save_pretrained(folder)
    if getattr(inner, "generation_config", None) is not None:
        inner.generation_config.save_pretrained(folder)
    return save(model, folder / PACKED, **options)


def load_packed(folder: str | os.PathLike[str], model: nn.Module | None = None, kernels: str = "dense") -> Any:
    """The model of a folder that `save_packed` wrote, bit for bit.

    Args:
        folder: the folder.
        model: the model to load the weights into; None: a new one of the class that the configuration names.
        kernels: as in `spartan.load`; "dense" is the ordinary model.
    """
    folder = Path(folder)
    if not (folder / PACKED).is_file():
        raise ValueError(f"folder={str(folder)!r} has no {PACKED}; pass a folder that save_packed() wrote")
    if model is None:
        config = transformers.AutoConfig.from_pretrained(folder)
        name = (config.architectures or [""])[0]
        if not hasattr(transformers, name):
            raise ValueError(f"folder={str(folder)!r}: transformers has no model {name!r}; build it, and pass model=")
        model = getattr(transformers, name)._from_config(config).eval()
    return load(folder / PACKED, model, kernels=kernels)


def _check(args: TrainingArguments, model: nn.Module, optimizer: Any) -> None:
    """Refuse ways to train in which nobody can stand between the gradients and the weights."""
    inner, name = unwrapped(optimizer), str(getattr(args.optim, "value", args.optim))
    if "layerwise" in name or isinstance(inner, LayerWiseDummyOptimizer):
        raise ValueError(
            f"optim={name!r} updates each layer while the backward still runs, before masks of the whole model can be "
            f"chosen; use {name.removesuffix('_layerwise')!r}, or 'adamw_torch'"
        )
    if "lomo" in name or type(inner).__module__.startswith("lomo_optim"):
        raise ValueError(
            f"optim={name!r} updates weights inside the backward and has no step to attach to; use 'adamw_torch' or "
            "another optimizer that takes steps"
        )
    if isinstance(optimizer, DeepSpeedOptimizerWrapper):
        raise ValueError(
            "DeepSpeed keeps and updates copies of the weights of its own, which are not sparse; train with DDP, or with "
            "FSDP2 (fsdp_version 2), which is sharded as well"
        )
    if has_flat_parameters(model):
        raise ValueError(
            "FSDP of version 1 makes one long vector of several weights, in which they cannot be told apart; set "
            "fsdp_version to 2 in fsdp_config"
        )


def _shards(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the shards of the sparsifier's state belong, in the checkpoint of this step."""
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / SHARDS


def _saved_shards(args: TrainingArguments, state: TrainerState) -> Path:
    """Where they are; which checkpoint `train()` was told to go on from, the Trainer does not say."""
    own, asked = _shards(args, state), args.resume_from_checkpoint
    places = [own, *([Path(asked) / SHARDS] if isinstance(asked, str) else [])]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise RuntimeError(
            f"the Trainer goes on from step {state.global_step}, but there is no {own}, where the dense weights would be. "
            "Go on in the same output_dir, or name the checkpoint in TrainingArguments(resume_from_checkpoint=…), too."
        )
    return found


def _put_first(callback: SpartanCallback) -> None:
    """Be called before those who report logs, so that they report density and β too.

    The Trainer shows a callback neither itself nor the others; who calls has them.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    if frame is not None:
        others = frame.f_locals["self"].callbacks
        others.remove(callback)
        others.insert(0, callback)
