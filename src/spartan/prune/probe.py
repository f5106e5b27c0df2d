"""Watches a run of a model: in which order blocks run, where weights are used, and who reads the outputs of a block."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from spartan.prune.layout import Layout
from spartan.prune.products import Product, Products

Output = tuple[int, int]  # the place of a block in the order of running, and the number of a tensor among its outputs


class Probe(Products):
    """Inside, a model is run, and `enter` and `leave` are called around each of its blocks.

    A stage is what happens from the end of one block to the end of the next, or to the end of the model. What is
    computed outside of blocks is followed from tensor to tensor, so that it is known which outputs a stage reads.
    """

    def __init__(self, layouts: dict[int, Layout]) -> None:
        super().__init__(layouts, self._use)
        self.stage = 0
        self.uses: dict[int, set[int]] = {}  # the stages in which each weight is used
        self.last_use: dict[Output, int] = {}  # the last stage that reads an output
        # By where a tensor's memory begins: whatever comes to lie there is written first, and set anew then.
        self._origins: dict[int, frozenset[Output]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        origins = self._of(tree_leaves((args, kwargs)))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self._origins[x.untyped_storage().data_ptr()] = origins
        return found

    def enter(self, arguments: Any) -> None:
        """A block begins, with these arguments."""
        self._need(tree_leaves(arguments))

    def leave(self, outputs: Any) -> None:
        """It ends."""
        for number, x in enumerate(tree_leaves(outputs)):
            if isinstance(x, Tensor):
                self._origins[x.untyped_storage().data_ptr()] = frozenset([(self.stage, number)])
        self.stage += 1

    def _use(self, product: Product) -> None:
        self.uses.setdefault(product.number, set()).add(self.stage)
        self._need([product.source])

    def _need(self, values: Iterable[Any]) -> None:
        for output in self._of(values):
            self.last_use[output] = self.stage

    def _of(self, values: Iterable[Any]) -> frozenset[Output]:
        """The outputs that these values come from."""
        found: frozenset[Output] = frozenset()
        for x in values:
            if isinstance(x, Tensor):
                found |= self._origins.get(x.untyped_storage().data_ptr(), frozenset())
        return found
