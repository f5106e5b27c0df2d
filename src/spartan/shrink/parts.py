"""A model's tensors by name."""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Parts:
    """Parameters and buffers, tied ones under each of their names; and of these the ones that may get smaller."""

    tensors: dict[str, Tensor]
    may_shrink: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> "Parts":
        """All of a model. Only what is in its state may get smaller: a file has nothing else."""
        tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        state = model.state_dict(keep_vars=True)
        inside = (name for name, t in tensors.items() if state.get(name) is t and t.is_floating_point())
        return cls(tensors, frozenset(inside))

    @property
    def parameters(self) -> int:
        """How many numbers all parameters have, tied ones counted once."""
        return sum(t.numel() for t in {id(t): t for t in self.tensors.values() if isinstance(t, nn.Parameter)}.values())
