"""Clips gradients to a joint norm: those of an optimizer's parameters, and one that a method holds of its own."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from spartan.distributed import Ranks, local, same_placement
from spartan.solvers.torch import TorchSolver
from spartan.step.weights import Weights

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
        self._ranks: dict[int, Ranks] = {}  # by optimizer, the processes that hold shards of its parameters

    @torch.no_grad()
    def remember(self) -> None:
        """Gradients have just been made: look at some, to see later by how much they were scaled."""
        self._before = self._probed()

    def _probed(self) -> Tensor | None:
        found = [grad for grad in (target.local_grad for target in self._probes) if grad is not None]
        return self.weights.problem.ranks.sum(_norms(found).square().sum()).sqrt() if found else None

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, mine: Sequence[int]) -> None:
        """Clip the gradients of an optimizer that trains these targets, and what the method holds of them."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        there = [p.grad is not None and not p.grad.is_sparse for p in parameters]
        grads = [local(same_placement(p, p.grad)) for p, here in zip(parameters, there, strict=True) if here]
        if not grads:
            return
        held = self._held(set(mine))
        own = [x for _, x in held]
        norms = _norms([*grads, *own])
        changed = self._changed() if held else None
        if changed is not None:
            norms[len(grads) :] *= changed
        norm = self._joint(norms, self._ranks_of(optimizer, parameters), there, held, changed)
        scale = getattr(optimizer, "grad_scale", None)  # what a fused optimizer divides by
        norm = norm if scale is None else norm / scale.to(norm)
        # 1 where the norm is no number: to say which gradient is none is somebody else's task.
        factor = torch.where(torch.isfinite(norm), (self.most / (norm + 1e-6)).clamp(max=1.0), 1.0)
        if factor.device.type != "cpu" or factor < 1.0:
            _multiply(grads, factor)
        if held:
            factor = factor if scale is None else factor / scale.to(norm)
            _multiply(own, factor if changed is None else factor * changed)

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

    def _changed(self) -> Tensor | None:
        """By how much gradients were scaled since the backward; None where nobody has looked."""
        before, now = self._before, self._probed()
        if before is None or now is None:
            return None
        ratio = now / before
        return torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0)

    def _ranks_of(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> Ranks:
        known = self._ranks.get(id(optimizer))
        if known is None or len(known.counts) != len(parameters):
            known = self._ranks[id(optimizer)] = Ranks.of(parameters)
        return known


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each, on the device of the first; never in half precision."""
    kind = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    norms = torch._foreach_norm(list(tensors), 2, dtype=kind)
    return torch.stack([norm.to(norms[0].device) for norm in norms])


def _multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    if all(x.device == factor.device for x in tensors):
        torch._foreach_mul_(list(tensors), factor)
        return
    for x in tensors:
        x.mul_(factor.to(x.device))
