"""A run: θ, the masks and the moment, and how w is made of them. It knows nothing of optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spartan.groups import Group, Plan
from spartan.masters import DenseMaster, FrozenMaster, Master
from spartan.methods.base import Method
from spartan.schedules import Moment
from spartan.targets import current


class Run:
    """The dense weights behind a model's sparse ones, from the first step to the last."""

    def __init__(self, plan: Plan, method: Method, at: Moment) -> None:
        self.plan, self.method, self.at = plan, method, at
        self.targets = [target for group in plan.groups for target in group.targets]
        self.masters: list[Master] = [DenseMaster(t, alias=method.identity) for t in self.targets]
        self._versions: list[int] = []
        for group, thetas in self.groups():
            self._set_budget(group)
            method.setup(group, thetas, at)
        self.choose()

    def groups(self) -> Iterator[tuple[Group, list[Tensor]]]:
        """Each group with its θ."""
        start = 0
        for group in self.plan.groups:
            end = start + len(group.targets)
            yield group, [m.theta for m in self.masters[start:end]]
            start = end

    @property
    def frozen(self) -> tuple[FrozenMaster, ...]:
        """The masters, once the mask is fixed; nothing before."""
        return tuple(m for m in self.masters if isinstance(m, FrozenMaster))

    # ------------------------------------------------------------------ masks

    def _set_budget(self, group: Group) -> None:
        group.k = group.total * (1.0 - group.sparsity * self.method.ramp.at(self.at.warmed))

    def set_budgets(self) -> None:
        """What every group may cost at this moment."""
        for group in self.plan.groups:
            self._set_budget(group)

    @torch.no_grad()
    def choose(self) -> None:
        """New masks for θ at this moment; from the first step of finetuning on they are fixed."""
        if self.frozen:
            return
        self.set_budgets()
        for group, thetas in self.groups():
            self.method.choose(group, thetas, self.at)
        if self.at.phase == "finetune" and not self.method.identity:
            self.masters = self._freeze()

    def _freeze(self) -> list[Master]:
        frozen: list[Master] = []
        for group, thetas in self.groups():
            keep = group.expand(self.method.keep(group, thetas))
            mask = group.expand(self.method.freeze(group, thetas, self.at))
            frozen += [FrozenMaster.of(*each) for each in zip(group.targets, thetas, keep, mask, strict=True)]
        return frozen

    def advance(self) -> None:
        """One optimizer step further."""
        self.at = replace(self.at, step=self.at.step + 1)

    # ------------------------------------------------------------------ weights

    @torch.no_grad()
    def weights(self) -> list[Tensor]:
        """w = f(θ) of every target."""
        if self.frozen:
            return [master.weight() for master in self.frozen]
        return [w for group, thetas in self.groups() for w in self.method.weights(group, thetas, self.at)]

    @torch.no_grad()
    def write(self) -> None:
        """Put w into the model."""
        if not self.method.identity:
            for target, w in zip(self.targets, self.weights(), strict=True):
                target.parameter.copy_(w)
        self._versions = [target.parameter._version for target in self.targets]

    @torch.no_grad()
    def transform(self, fresh: Sequence[bool]) -> None:
        """Turn the fresh gradients for w in `.grad` into gradients for θ, in place; missing ones count as zero."""
        start = 0
        for group, thetas in self.groups():
            params = [t.parameter for t in group.targets]
            end = start + len(params)
            grads = [p.grad if f else None for p, f in zip(params, fresh[start:end], strict=True)]
            if self.frozen:
                masters = self.frozen[start:end]
                found = [None if g is None else m.gradient(g) for m, g in zip(masters, grads, strict=True)]
            else:
                self.method.observe(group, thetas, grads, self.at)
                found = self.method.gradient(group, thetas, grads, self.at)
            for parameter, old, new in zip(params, grads, found, strict=True):
                if old is None:
                    # A parameter that the loss did not reach still feels the others through the shared budget.
                    parameter.grad = new if parameter.grad is None else parameter.grad
                elif new is None:
                    old.zero_()
                elif new is not old:
                    old.copy_(new)
            start = end

    # ------------------------------------------------------------------ looking

    @torch.no_grad()
    def kept_units(self) -> list[int]:
        """Units kept of each target."""
        if self.frozen:
            sizes = [n for group in self.plan.groups for n in group.sizes]
            return [m.index.numel() // n for m, n in zip(self.frozen, sizes, strict=True)]
        return [int(keep.sum()) for group, thetas in self.groups() for keep in self.method.keep(group, thetas)]

    @torch.no_grad()
    def masks(self) -> dict[str, Tensor]:
        """Bool per weight, by parameter name."""
        if self.frozen:
            return {m.target.name: m.keep() for m in self.frozen}
        found: dict[str, Tensor] = {}
        for group, thetas in self.groups():
            keep = group.expand(self.method.keep(group, thetas))
            found |= {t.name: k.clone() for t, k in zip(group.targets, keep, strict=True)}
        return found

    @torch.no_grad()
    def mask_histogram(self, bins: int) -> list[int] | None:
        """How many units have a mask value in each of `bins` equal parts of [0, 1]; None without a soft mask."""
        if any(group.dual is None for group in self.plan.groups):
            return None
        found = torch.zeros(bins, dtype=torch.int64)
        if self.frozen:
            sizes = [n for group in self.plan.groups for n in group.sizes]
            for master, size in zip(self.frozen, sizes, strict=True):
                found += torch.histc(master.mask.float(), bins, 0.0, 1.0).long().cpu() // size
                found[0] += (master.target.numel - master.index.numel()) // size
            return found.tolist()
        for group, thetas in self.groups():
            assert group.dual is not None
            for u in group.scores(thetas):
                found += torch.histc(group.dual.mask(u).float(), bins, 0.0, 1.0).long().cpu()
        return found.tolist()

    # ------------------------------------------------------------------ checks

    def check_same_tensors(self) -> None:
        """The model must hold the parameters that the run was built for."""
        for target, master in zip(self.targets, self.masters, strict=True):
            now, theta = current(target), master.theta
            if now is not target.parameter or now.device != theta.device or now.dtype != theta.dtype:
                raise RuntimeError(
                    f"{target.name} was moved, cast or replaced after the sparsifier was built (it is {now.dtype} on "
                    f"{now.device}, the dense weights are {theta.dtype} on {theta.device}). Build the sparsifier after "
                    "model.to(...); to continue a run, load sparsifier.state_dict() into the new one."
                )

    @torch.no_grad()
    def check_model(self) -> None:
        """The model must hold what was written into it."""
        self.check_same_tensors()
        versions = [target.parameter._version for target in self.targets]
        if versions == self._versions or self.method.identity:
            return
        # Swapping an average in and out again bumps versions too, so look at the values before complaining.
        for target, w in zip(self.targets, self.weights(), strict=True):
            if not torch.equal(target.parameter, w):
                raise RuntimeError(
                    f"{target.name} was changed outside the optimizer step. After model.load_state_dict(), also call "
                    "sparsifier.load_state_dict() with the state saved beside it; to set weights by hand, do so inside "
                    "`with sparsifier.dense_weights():`."
                )
        self._versions = versions

    def check_gradients(self, which: Iterable[int]) -> None:
        """No NaN or infinite gradient may reach θ."""
        bad = _first_non_finite((i, self.targets[i].parameter.grad) for i in which)
        if bad is not None:
            raise RuntimeError(
                f"the gradient of {self.targets[bad].name} holds NaN or infinite values at step {self.at.step}; nothing "
                "was updated. Lower the learning rate, clip gradients, or use a GradScaler with float16."
            )

    def check_weights(self, which: Iterable[int]) -> None:
        """No NaN or infinite θ may be taken from the model."""
        bad = _first_non_finite((i, self.targets[i].parameter) for i in which)
        if bad is not None:
            raise RuntimeError(
                f"{self.targets[bad].name} would hold NaN or infinite weights after step {self.at.step}; the update was "
                "taken back. The learning rate is probably too high."
            )


def _first_non_finite(tensors: Iterable[tuple[int, Tensor | None]]) -> int | None:
    """Index of the first tensor with a NaN or infinite entry, with one look at the device for all of them."""
    there = [(i, t.detach()) for i, t in tensors if t is not None and t.numel()]
    if not there:
        return None
    largest = torch.stack([n.float() for n in torch._foreach_norm([t for _, t in there], math.inf)])
    finite = torch.isfinite(largest).tolist()
    return None if all(finite) else there[finite.index(False)][0]
