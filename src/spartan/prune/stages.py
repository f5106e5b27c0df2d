"""Runs a model up to the end of each of its blocks in turn, without computing the blocks before again.

Whatever a model does outside of its blocks (embeddings, masks, norms, what lies between two chains) is done again in every
run; a block that was pruned already gives back what it gave then. So only one block has to be on the device, and of its
outputs those are kept, in the model's own place, that a later stage reads.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from spartan.prune.batches import Batch, moved, shapes_of
from spartan.prune.blocks import Blocks
from spartan.prune.devices import Mover
from spartan.prune.layout import Layout
from spartan.prune.probe import Output, Probe
from spartan.wording import first_line


class Reached(BaseException):
    """Ends a run: the block that was asked for has given these outputs. No model's `except Exception` is to see it."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs


class Disordered(BaseException):
    """Ends a run: the blocks do not run as they did with the first batch."""


class Stages:
    """The stages of a model: each ends with a block, and one comes after the last.

    Args:
        model: the model, without wrappers.
        blocks: its blocks by name; none has one stage, the whole model.
        batches: what it is run on.
        mover: what brings blocks to the device.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, batches: Sequence[Batch], mover: Mover) -> None:
        self.model, self.blocks, self.batches, self._mover = model, blocks, batches, mover
        self.order: list[str] = []  # the blocks as they run
        self.stage_of: dict[int, int] = {}  # of each weight that is used
        self._last_use: dict[Output, int] = {}
        self._kept: dict[tuple[int, int], list[Any]] = {}  # by batch and place: outputs, or what stands in for them
        self._specs: dict[tuple[int, int], Any] = {}
        self._batch = self._turn = self._stage = 0

    def explore(self, layouts: dict[int, Layout]) -> str:
        """Run the first batch as it is, and learn the order of blocks and who reads what; why blocks cannot be used, or "".

        Further batches are run only while some weight has not been used.
        """
        uses: dict[int, set[int]] = {}
        for number in range(len(self.batches)):
            probe = Probe(layouts)
            calls: list[str] = []
            forwards = {name: self._probing(name, block, probe, calls) for name, block in self.blocks.items()}
            with _patched(self.blocks, forwards):
                self._batch = number
                self._call(probe)
            for weight, stages in probe.uses.items():
                uses.setdefault(weight, set()).update(stages)
            if number == 0:
                self.order, self._last_use = calls, probe.last_use
            if len(uses) == len(layouts):
                break
        several = next((w for w, stages in uses.items() if len(stages) > 1), None)
        why = ""
        if sorted(self.order) != sorted(self.blocks):
            why = "not every block runs once in a run of the model"
        elif self.blocks and number:
            why = "not every batch uses the same layers"
        elif several is not None and self.blocks:
            why = f"{layouts[several].target.name} is used by several blocks"
        if why:
            self.blocks, self.order, self._last_use = {}, [], {}
        self.stage_of = {weight: 0 if why else min(stages) for weight, stages in uses.items()}
        return why

    @contextmanager
    def at(self, stage: int) -> Iterator[None]:
        """Inside, `run` ends with this stage, and its block is on the device."""
        self._stage = stage
        forwards = {name: self._recalling(place) for place, name in enumerate(self.order[:stage])}
        block = self.blocks[self.order[stage]] if stage < len(self.order) else None
        if block is not None:
            forwards[self.order[stage]] = self._ending(stage, block)
        with nullcontext() if block is None else self._mover.block(block), _patched(self.blocks, forwards):
            yield

    def run(self, number: int, mode: AbstractContextManager[Any] | None = None) -> Any:
        """Run a batch to the end of the stage, under a mode; the outputs of its block."""
        self._batch, self._turn = number, 0
        outputs = self._call(nullcontext() if mode is None else mode)
        if self._turn != min(self._stage + 1, len(self.order)):
            self._refuse()
        return outputs

    def is_read(self, stage: int) -> bool:
        """Whether a later stage reads what the block of this one gives."""
        return any(place == stage for place, _ in self._last_use)

    def keep(self, number: int, outputs: Any) -> None:
        """Keep what a batch's run to this stage gave, as far as it is read later."""
        leaves, self._specs[number, self._stage] = tree_flatten(outputs)
        home = self._mover.home if self._mover.moves else None
        kept = []
        for i, x in enumerate(leaves):
            read = (self._stage, i) in self._last_use
            kept.append(x if not isinstance(x, Tensor) else x.to(home or x.device) if read else StandIn(x))
        self._kept[number, self._stage] = kept

    def forget(self) -> None:
        """Let go of all outputs that no stage after this one reads."""
        for (_, place), leaves in self._kept.items():
            for i, x in enumerate(leaves):
                if isinstance(x, Tensor) and self._last_use[place, i] <= self._stage:
                    leaves[i] = StandIn(x)

    # ------------------------------------------------------------------ forwards

    def _probing(self, name: str, block: nn.Module, probe: Probe, calls: list[str]) -> Callable[..., Any]:
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._mover.block(block):
                probe.locate()
                calls.append(name)
                probe.enter((args, kwargs))
                outputs = forward(*args, **kwargs)
                probe.leave(outputs)
                return outputs

        return run

    def _recalling(self, place: int) -> Callable[..., Any]:
        def recall(*args: Any, **kwargs: Any) -> Any:
            self._take_turn(place)
            leaves = self._kept[self._batch, place]
            device = self._mover.device if self._mover.moves else None
            found = [x.tensor() if isinstance(x, StandIn) else x for x in leaves]
            # Copies: whoever reads them may write into them.
            found = [x.to(device or x.device, copy=True) if isinstance(x, Tensor) else x for x in found]
            return tree_unflatten(found, self._specs[self._batch, place])

        return recall

    def _ending(self, place: int, block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self._take_turn(place)
            raise Reached(forward(*args, **kwargs))

        return run

    def _take_turn(self, place: int) -> None:
        if place != self._turn:
            raise Disordered
        self._turn += 1

    def _refuse(self) -> None:
        raise ValueError(
            f"calibration: batch {self._batch} ({shapes_of(self.batches[self._batch])}) does not run the blocks as batch 0 "
            "does; leave it out, or pass blocks=() to run the model as a whole"
        )

    def _call(self, mode: AbstractContextManager[Any]) -> Any:
        """Run the model on the present batch; every run draws the same random numbers, and no others change."""
        device, batch = self._mover.device, self.batches[self._batch]
        args, kwargs = moved(batch, device)
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(self._batch)
                with mode:
                    self.model(*args, **kwargs)
        except Reached as reached:
            return reached.outputs
        except Disordered:
            self._refuse()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model's own code
            raise ValueError(
                f"calibration: the model cannot be run on batch {self._batch} ({shapes_of(batch)}): {first_line(error)}"
            ) from error
        return None


class StandIn:
    """Stands in for an output that nobody reads any more: of its shape, and full of NaN, so that a mistake would show."""

    def __init__(self, x: Tensor) -> None:
        self._shape, self._dtype, self._device = x.shape, x.dtype, x.device

    def tensor(self) -> Tensor:
        """Such a tensor."""
        value = float("nan") if self._dtype.is_floating_point or self._dtype.is_complex else 0
        return torch.full(self._shape, value, dtype=self._dtype, device=self._device)


@contextmanager
def _patched(blocks: Blocks, forwards: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, these blocks run these functions."""
    own: dict[str, Any] = {name: blocks[name].__dict__.get("forward") for name in forwards}
    try:
        for name, forward in forwards.items():
            blocks[name].__dict__["forward"] = forward
        yield
    finally:
        for name, forward in own.items():
            if forward is None:
                del blocks[name].__dict__["forward"]
            else:
                blocks[name].__dict__["forward"] = forward
