"""Spartan in torchtitan's checkpoints, and in others by torch.distributed.checkpoint.

    states={"train_state": self, "sparsifier": Checkpointed(self.sparsifier)}

The optimizer's state cannot carry θ where weights lie in shards; so it is saved beside it, each process its part.
"""

import io
from collections.abc import Mapping
from typing import Any

import torch

from spartan.sparsifier import Sparsifier
from spartan.state.sharded import flat_sparsifier, nested_sparsifier


class Checkpointed:
    """A sparsifier's state under the same names at every step, for a checkpoint that reads only names it is asked for.

    A sparsifier that begins has no fixed masks, and one that is saved in finetuning has: until then they are saved as
    zeros. What is saved on N processes may be loaded on M. The optimizer's state does not carry the sparsifier's any
    more.

    Args:
        sparsifier: attached to its optimizer.

    Example:
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparsifier = spartan.Sparsifier(model, sparsity=0.5, total_steps=10, method="spartan").attach(optimizer)
        >>> states = {"sparsifier": Checkpointed(sparsifier)}
        >>> sorted(states["sparsifier"].state_dict())
        ['rest', 'weights/weight/keep', 'weights/weight/mask', 'weights/weight/theta']
    """

    def __init__(self, sparsifier: Sparsifier) -> None:
        self.sparsifier = sparsifier
        if sparsifier._riding is not None:
            sparsifier._riding.close()  # its names and sizes change when masks are fixed

    def state_dict(self) -> dict[str, Any]:
        """Tensors by one name each, and the rest as bytes."""
        self.sparsifier._run.guard.reshard()  # FSDP2 may have left whole weights of a forward pass
        state, rest = flat_sparsifier(self.sparsifier)
        rest["fixed"] = any(name.endswith("/mask") for name in state if name.startswith("weights/"))
        for name, theta in [(n, x) for n, x in state.items() if n.startswith("weights/") and n.endswith("/theta")]:
            here = name.removesuffix("theta")
            state.setdefault(f"{here}mask", torch.zeros_like(theta))
            state.setdefault(f"{here}keep", torch.zeros_like(theta, dtype=torch.bool))
        file = io.BytesIO()
        torch.save(rest, file)
        return state | {"rest": file.getvalue()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from it; the model and the optimizer are loaded by whoever saved them."""
        rest = torch.load(io.BytesIO(state["rest"]), weights_only=True)
        left_out = () if rest.pop("fixed") else ("/mask", "/keep")
        tensors = {n: x for n, x in state.items() if not (n.startswith("weights/") and n.endswith(left_out))}
        self.sparsifier._run.guard.reshard()
        self.sparsifier.load_state_dict(nested_sparsifier(tensors, rest))
