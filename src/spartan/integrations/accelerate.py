"""Spartan in a training loop around accelerate.

    sparsifier = attach(accelerator, model, optimizer, sparsity=0.9, total_steps=1000)

Before or after `accelerator.prepare`; where FSDP2 shards the model, after. `accelerator.save_state` and `load_state` save
and load the sparsifier too: in the optimizer's state, or, of weights in shards, in a folder of its own in the checkpoint.
"""

from pathlib import Path
from typing import Any

from torch import nn

from spartan.integrations import importing
from spartan.integrations.common import Asked, has_flat_parameters, is_sharded
from spartan.sparsifier import Sparsifier
from spartan.state.sharded import load_apart, save_apart

with importing("accelerate", "accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

# In a checkpoint, where weights lie in shards.
SHARDS = "spartan"


def attach(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, sparsity: float, total_steps: int, **settings: Any
) -> Sparsifier:
    """A sparsifier for a model that accelerate prepares, attached to its optimizer.

    Args:
        accelerator: whose `save_state` and `load_state` are to save and load the sparsifier.
        model: as it is before `prepare`, or as `prepare` returned it.
        optimizer: the same; a list of them if there are several.
        sparsity: fraction of the counted weights that is gone at the end, in [0, 1).
        total_steps: optimizer steps of the whole run: those at which accelerate synchronises gradients.
        settings: any other argument of `Sparsifier`: method, pattern, cost, budget, include, exclude, warmup, finetune,
            count, min_density, kernels.
    """
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"accelerator: {accelerator.distributed_type.value} keeps and updates copies of the weights of its own, which "
            "are not sparse; train with DDP, or with FSDP2, which is sharded as well"
        )
    if has_flat_parameters(model):
        raise ValueError(
            "model: FSDP of version 1 makes one long vector of several weights, in which they cannot be told apart; pass "
            "FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    sparsifier = Asked(sparsity, settings).build(model, total_steps, optimizers)
    if is_sharded(sparsifier):
        # These run on every process: of saving before the rest, of loading after the shards of model and optimizer.
        accelerator.register_save_state_pre_hook(
            lambda models, weights, folder: save_apart(Path(folder) / SHARDS, sparsifier)
        )
        accelerator.register_load_state_pre_hook(lambda models, folder: load_apart(Path(folder) / SHARDS, sparsifier))
    return sparsifier
