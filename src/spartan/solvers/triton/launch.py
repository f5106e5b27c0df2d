"""Launches kernels over parameters and their gradients, without waiting for the device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from spartan.distributed import is_dtensor, like, local
from spartan.problem.problem import Problem
from spartan.solvers.base import FINE, Flags, Grads, there
from spartan.solvers.forms import Form
from spartan.solvers.triton import gradient
from spartan.solvers.triton.replay import Replay
from spartan.solvers.triton.tables import Addresses, Pieces

DTYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


# Where launches read what a form names, beside weights and gradients.
Sources = tuple[int, ...]


class Before:
    """What was launched the last time: in training it is launched again, as a rule, and nothing need be found out."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Form, int, Sources, Any, Callable[[], None]]] = {}

    def of(
        self, what: str, form: Form, where: Addresses, tensors: Grads, sources: Sources | None
    ) -> tuple[Any, Callable[[], None]] | None:
        """The launch and its name, if it was of the same form, the same tensors and the same sources."""
        last = self._last.get(what)
        if last is None or last[2] != sources or last[0] != _declared(form) or not where.same(tensors, last[1]):
            self._last.pop(what, None)  # something else will be launched now
            return None
        return last[3:]

    def note(
        self, what: str, form: Form, where: Addresses, sources: Sources | None, key: Any, launch: Callable[[], None]
    ) -> None:
        """Remember it, where nothing but these addresses can differ the next time."""
        if sources is not None:
            self._last[what] = _declared(form), where.version, sources, key, launch


def _declared(form: Form) -> Form:
    """Without an expression of its own, which is a new object every time, what acts in the step alone, and a tensor."""
    plain = form.own is None and form.pace is None and form.damp is None
    return form if plain else form._replace(own=None, pace=None, damp=None)


class Launcher:
    """Launches kernels; None stands for a tensor that is left alone.

    Args:
        problem: the part, whose parameters they are.
        flags: where a gradient or a weight that is not finite is named.
    """

    def __init__(self, problem: Problem, flags: Flags) -> None:
        plain = not any(is_dtensor(t.parameter) for t in problem.targets)
        # The parameters themselves: someone may give them other memory.
        self._plain = [t.parameter for t in problem.targets] if plain else None
        self._strides = [t.local.stride() for t in problem.targets]
        self.problem, self.bad, device = problem, flags.bad, flags.bad.device
        self.numbers = torch.tensor(problem.numbers, dtype=torch.int32).to(device)
        sizes = [t.local.numel() for t in problem.targets]
        self.pieces = Pieces(sizes, [1.0] * len(sizes), [1.0] * len(sizes), device)
        self.dtype = DTYPES[problem.targets[0].dtype]
        self.replay = Replay(device)
        self.to_parameters = Addresses(device, replay=self.replay, resting=plain)
        self.to_grads = Addresses(device, replay=self.replay)
        self.to_thetas = Addresses(device, fixed=True)
        self.before = Before()
        self._checked: tuple[int, Any, Callable[[], None]] | None = None  # the last time

    @property
    def parameters(self) -> Sequence[Tensor]:
        """What this process holds of each parameter; of one in shards asked for anew, since it may get other memory."""
        return [local(t.parameter) for t in self.problem.targets] if self._plain is None else self._plain

    def some(self, which: Sequence[int]) -> list[Tensor | None]:
        """The parameters of these targets, None for the others."""
        if len(which) == len(self.problem.targets):
            return self.parameters  # type: ignore[return-value]
        chosen = set(which)
        return [p if i in chosen else None for i, p in enumerate(self.parameters)]

    def run(self, kernel: Any, *arguments: Any, pieces: Pieces | None = None, **kinds: Any) -> None:
        """Launch a kernel, a program a piece."""
        kernel[((pieces or self.pieces).count,)](*arguments, BLOCK=2048, num_warps=8, **kinds)

    def write(self, key: Any, launch: Callable[[], None], parameters: Grads | None = None) -> None:
        """Launch what writes to parameters, and tell torch that they have changed."""
        self.replay(key, launch)
        written: Any = self.parameters if parameters is None else parameters
        if written is not self._plain:
            written = [p for p in written if p is not None]
        increment_version(written)  # behind torch's back

    def kinds(self, grads: Grads) -> dict[str, Any]:
        """The types of gradients and θ."""
        return {"GRAD": next((DTYPES[g.dtype] for g in grads if g is not None), self.dtype), "DTYPE": self.dtype}

    def alike(self, grads: Grads) -> bool:
        """Whether gradients lie in memory as their parameters do, which kernels take as it lies."""
        if all(map(there, grads)):
            return list(map(Tensor.stride, grads)) == self._strides  # type: ignore[arg-type]  # C, for every step
        return all(g is None or g.stride() == stride for g, stride in zip(grads, self._strides, strict=True))

    def readable(self, tensors: Grads) -> bool:
        """Whether kernels can read such tensors: alike, of one kind, and with nothing to be learned through them."""
        given = [x for x in tensors if x is not None]
        kinds = {x.dtype for x in given}
        return (
            len(kinds) == 1 and kinds <= set(DTYPES) and not any(x.requires_grad for x in given) and self.alike(tensors)
        )

    def laid_out(self, grads: Grads) -> Grads:
        """The same gradients, in the order of their parameters' memory."""
        if self.alike(grads):
            return grads
        found = list(grads)
        for i, (target, g) in enumerate(zip(self.problem.targets, grads, strict=True)):
            if g is not None and g.stride() != target.local.stride():
                found[i] = laid_out = target.laid_out(g)
                target.parameter.grad = like(target.parameter, laid_out)
        return found

    def check(self, grads: Grads) -> None:
        """Name the first gradient that is not finite, and take them all away if there is one."""
        if self._checked is not None and self.to_grads.same(grads, self._checked[0]):
            self.replay(*self._checked[1:])
            return
        to_grads, table = self.to_grads.of(grads), self.pieces.table
        kind = self.kinds(grads)["GRAD"]

        def launch() -> None:
            self.run(gradient.check, to_grads, table, self.bad, self.numbers, GRAD=kind)
            self.run(gradient.clear, to_grads, table, self.bad, FINE=FINE, GRAD=kind)

        key = "check", kind.name
        self.replay(key, launch)
        self._checked = self.to_grads.version, key, launch
