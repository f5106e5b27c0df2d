"""Clips gradients to a joint norm: those of an optimizer's parameters, and one that a method holds of its own."""

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from spartan.distributed import Ranks, is_dtensor, local, same_placement
from spartan.solvers.base import there
from spartan.solvers.torch import TorchSolver
from spartan.step.gradients import grad_of
from spartan.step.weights import Weights

if TYPE_CHECKING:
    from spartan.solvers.triton.joint import KernelClip, ScaleProbe

_device_of, _dtype_of, _layout_of = map(operator.attrgetter, ("device", "dtype", "layout"))  # with `map` all of it is C
PROBES = 4  # targets, the smallest, whose gradients tell by how much somebody has scaled all of them


class JointClip:
    """Scales gradients so that their joint norm is at most the method's `clip`, as torch's `clip_grad_norm_` does.

    What a method holds is none of the optimizer's: a loss scaler that unscales gradients after the backward, or a user who
    clips them, does not know of it. By as much as the gradients of a few small targets have changed since the backward, it
    is changed here. Nothing waits for an accelerator.

    Args:
        weights: θ of the run.
        most: what the norm may be.
    """

    def __init__(self, weights: Weights, most: float) -> None:
        self.weights, self.most = weights, most
        targets = sorted(weights.problem.targets, key=lambda target: target.numel)
        self._probes = targets[:PROBES]
        self._before: Tensor | None = None  # their gradients' norm after the last backward
        self._facts: dict[int, Facts] = {}  # by optimizer
        self._of_probes = Facts([target.parameter for target in self._probes])
        # Where kernels do the rest, they do this too.
        by_kernels = weights.problem.ranks.alone and all(hasattr(part, "kernels") for part in weights.solving)
        self._probe = _probe_of(self._of_probes.sizes, weights.bad.device) if by_kernels else None

    @torch.no_grad()
    def remember(self) -> None:
        """Gradients have just been made: look at some, to see later by how much they were scaled."""
        if self._probe is None:
            self._before = self._probed({})
            return
        grads = [target.parameter.grad for target in self._probes]
        if self._of_probes.readable(grads):
            self._probe.look(grads)
        else:
            found = self._probed({})
            self._probe.norm.copy_(torch.zeros_like(self._probe.norm) if found is None else found)
        self._before = self._probe.norm

    def _probed(self, norms: Mapping[int, Tensor]) -> Tensor | None:
        """The norm of some gradients; those of some parameters, by their ids, may be known."""
        there = [target for target in self._probes if target.parameter.grad is not None]
        found = [norms.get(id(target.parameter)) for target in there]
        if any(norm is None for norm in found):
            found = list(_each_norm([grad for grad in (target.local_grad for target in there) if grad is not None]))
        ranks, each = self.weights.problem.ranks, [norm for norm in found if norm is not None]
        if not each:
            return None
        joint = torch.linalg.vector_norm(_together(each))
        return joint if ranks.alone else ranks.sum(joint.square()).sqrt()

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, mine: Sequence[int]) -> None:
        """Clip the gradients of an optimizer that trains these targets, and what the method holds of them."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        facts = self._facts_of(optimizer, parameters)
        held = self._held(set(mine))
        own = [x for _, x in held]
        scale = getattr(optimizer, "grad_scale", None)  # what a fused optimizer divides by
        if self._probe is not None and scale is None and self._by_kernels(facts, parameters, own):
            return
        there = [grad is not None and not grad.is_sparse for grad in map(grad_of, parameters)]
        with_grad = [p for p, here in zip(parameters, there, strict=True) if here]
        if not with_grad:
            return
        grads = [p.grad if facts.plain else local(same_placement(p, p.grad)) for p in with_grad]
        each = _each_norm([*grads, *own])
        norms = _together(each)
        changed = self._changed(dict(zip(map(id, with_grad), each, strict=False))) if held else None
        if changed is not None:
            norms[len(grads) :] *= changed
        norm = self._joint(norms, facts.ranks, there, held, changed)
        norm = norm if scale is None else norm / scale.to(norm)
        # 1 where the norm is no number: to say which gradient is none is somebody else's task.
        factor = norm.nan_to_num(0.0, 0.0).add_(1e-6).reciprocal_().mul_(self.most).clamp_(max=1.0)
        if factor.device.type != "cpu" or factor < 1.0:
            _multiply(grads, factor)
        if held:
            factor = factor if scale is None else factor / scale.to(norm)
            _multiply(own, factor if changed is None else factor * changed)

    def _by_kernels(self, facts: "Facts", parameters: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
        """Clip by kernels; whether they can."""
        assert self._probe is not None
        grads = list(map(grad_of, parameters))
        if not facts.readable(grads) or any(x.dtype != torch.float32 or not x.is_contiguous() for x in own):
            return False
        sizes = [*facts.sizes, *map(Tensor.numel, own)]
        if facts.clip is None or facts.clip.sizes != tuple(sizes):
            numbers = {id(p): i for i, p in enumerate(parameters)}
            probed = [numbers.get(id(target.parameter)) for target in self._probes]
            if None in probed:  # another optimizer trains some of them
                return False
            from spartan.solvers.triton.joint import KernelClip

            facts.clip = KernelClip(sizes, len(own), probed, self._probe, self.most)  # type: ignore[arg-type]
        facts.clip([*grads, *own])
        return True

    def _joint(
        self,
        norms: Tensor,
        ranks: Ranks,
        there: Sequence[bool],
        held: Sequence[tuple[TorchSolver, Tensor]],
        changed: Tensor | None,
    ) -> Tensor:
        """The norm of all; a shard counts once, by whichever process holds it."""
        if ranks.alone:
            return torch.linalg.vector_norm(norms)
        counts = [counted for counted, here in zip(ranks.counts, there, strict=True) if here]
        mine = torch.tensor(counts, device=norms.device)
        square = ranks.sum(torch.where(mine, norms[: len(counts)].square(), 0.0).sum())
        for solver, x in held:
            by = 1.0 if changed is None else changed.square()
            square = square + (solver.sum_by_target(x.square())[0].sum() * by).to(square)
        return square.sqrt()

    def _held(self, mine: set[int]) -> list[tuple[TorchSolver, Tensor]]:
        """What the method holds of the parts whose first target is one of these."""
        method, solving = self.weights.method, self.weights.solving
        found = [(part, method.held(part)) for part in solving if part.problem.numbers[0] in mine]
        return [(part, x) for part, x in found if x is not None]

    def _changed(self, norms: Mapping[int, Tensor]) -> Tensor | None:
        """By how much gradients were scaled since the backward; None where nobody has looked."""
        before, now = self._before, self._probed(norms)
        if before is None or now is None:
            return None
        ratio = (now / before).nan_to_num_(1.0, 1.0)
        return torch.where(ratio > 0, ratio, 1.0)

    def _facts_of(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> "Facts":
        known = self._facts.get(id(optimizer))
        if known is None or len(known.sizes) != len(parameters):
            known = self._facts[id(optimizer)] = Facts(parameters)
        return known


class Facts:
    """What is known of an optimizer's parameters."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.ranks = Ranks.of(parameters)  # the processes that hold shards of them
        self.plain = not any(map(is_dtensor, parameters))  # whether none is in shards
        self.sizes, self.strides = list(map(Tensor.numel, parameters)), list(map(Tensor.stride, parameters))
        one_piece = self.plain and len(set(map(_device_of, parameters))) == 1 and not any(map(_with_gaps, parameters))
        self._one_piece = one_piece  # whether each lies in one, all on one device
        self.clip: KernelClip | None = None

    def readable(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether kernels can read their gradients: all there, of float32, in memory like the parameters."""
        if not self._one_piece or not all(map(there, grads)) or set(map(_layout_of, grads)) != {torch.strided}:
            return False
        strides = list(map(Tensor.stride, grads))  # type: ignore[arg-type]
        return strides == self.strides and set(map(_dtype_of, grads)) == {torch.float32}


def _with_gaps(x: Tensor) -> bool:
    """Whether the memory of a tensor has some that are not its own."""
    spans = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    return x.numel() > 0 and spans != x.numel()


def _probe_of(sizes: Sequence[int], device: torch.device) -> "ScaleProbe":
    from spartan.solvers.triton.joint import ScaleProbe  # Triton is imported where it runs

    return ScaleProbe(sizes, device)


def _each_norm(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each; never in half precision."""
    kind = torch.float64 if torch.float64 in map(_dtype_of, tensors) else torch.float32
    return list(torch._foreach_norm(list(tensors), 2, dtype=kind)) if tensors else []


def _together(norms: Sequence[Tensor]) -> Tensor:
    """Numbers in one tensor, on the device of the first."""
    devices = set(map(_device_of, norms))
    return torch.stack([norm.to(norms[0].device) for norm in norms] if len(devices) > 1 else list(norms))


def _multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    if set(map(_device_of, tensors)) <= {factor.device}:
        torch._foreach_mul_(list(tensors), factor)
        return
    for x in tensors:
        x.mul_(factor.to(x.device))
