"""A run: θ, the masks and the moment, and how w is made of them. It knows nothing of optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spartan.fast import engine_for, frozen_engine_for
from spartan.groups import Group, Plan
from spartan.masters import DenseMaster, FrozenMaster, Master, copy_all, gather, lay_out, like_parameter
from spartan.methods.base import Method
from spartan.schedules import Moment
from spartan.targets import current
from spartan.watch import Watch

if TYPE_CHECKING:
    from spartan.kernels.engine import Engine
    from spartan.kernels.frozen_engine import FrozenEngine


class Run:
    """The dense weights behind a model's sparse ones, from the first step to the last."""

    def __init__(self, plan: Plan, method: Method, at: Moment, kernels: str = "auto") -> None:
        self.plan, self.method, self.at, self.kernels = plan, method, at, kernels
        self.targets = [target for group in plan.groups for target in group.targets]
        self.masters: list[Master] = [DenseMaster(s, method.identity) for g in plan.groups for s in g.slabs()]
        # Where each target is: its master, and its place there.
        self._home = [(m, j) for m, master in enumerate(self.masters) for j in range(len(master.targets))]
        self._versions: list[int] = []
        self.watch = Watch([t.name for t in self.targets], self.targets[0].parameter.device, len(plan.groups))
        self.attach_kernels()
        for group, thetas in self.groups():
            self._set_budget(group)
            method.setup(group, thetas, at)
        self.choose()

    def attach_kernels(self) -> None:
        """Give every group the kernels that can work on it."""
        start = 0
        for group in self.plan.groups:
            mine = self.masters[start : start + len(group.shapes)]
            first, flags = sum(len(g.targets) for g in self.plan.groups[: group.index]), self.watch.flags
            group.engine = group.frozen_engine = None
            if isinstance(mine[0], DenseMaster):
                views, out = [view for m in mine for view in views_of(m)], self.watch.residuals[group.index]
                group.engine, group.path = engine_for(group, views, flags, first, out, self.kernels)
                if group.engine is not None and type(self.method).write_fast is Method.write_fast:
                    group.path += " for thresholds, plain torch for the method's own masks"
            else:
                lists = [(m.theta, m.mask, m.index) for m in mine if isinstance(m, FrozenMaster)]
                group.frozen_engine, group.path = frozen_engine_for(group, lists, flags, first, self.kernels)
            start += len(group.shapes)

    def path(self) -> str:
        """What does the work: kernels, or plain torch and why."""
        found: dict[str, int] = {}
        for group in self.plan.groups:
            found[group.path] = found.get(group.path, 0) + 1
        if self.method.identity:
            return "nothing to do"
        if len(found) == 1:
            return next(iter(found))
        return "; ".join(f"{path}: {n} of {len(self.plan.groups)} groups" for path, n in found.items())

    def groups(self) -> Iterator[tuple[Group, list[Tensor]]]:
        """Each group with its θ, as methods see it."""
        start = 0
        for group in self.plan.groups:
            end = start + len(group.shapes)
            yield group, [m.theta for m in self.masters[start:end]]
            start = end

    @property
    def frozen(self) -> tuple[FrozenMaster, ...]:
        """The masters, once the mask is fixed; nothing before."""
        return tuple(m for m in self.masters if isinstance(m, FrozenMaster))

    def put(self, which: Iterable[int]) -> None:
        """Write θ into the parameters of these targets."""
        engines, rest = self._by_engine(which)
        for engine in engines:
            engine.put()
        for m, places in self._by_master(rest):
            self.masters[m].put(places)

    def take(self, which: Iterable[int]) -> None:
        """Read θ from the parameters of these targets."""
        engines, rest = self._by_engine(which)
        for engine in engines:
            engine.take()
        for m, places in self._by_master(rest):
            self.masters[m].take(places)

    def _by_engine(self, which: Iterable[int]) -> tuple[list[Engine | FrozenEngine], list[int]]:
        """The kernels of the groups that are all there, and the targets that are left."""
        engines: list[Engine | FrozenEngine] = []
        rest, asked = [], set(which)
        start = 0
        for group in self.plan.groups:
            mine = range(start, start + len(group.targets))
            here = [i for i in mine if i in asked]
            engine = group.engine or group.frozen_engine
            if engine is not None and len(here) == len(mine):
                engines.append(engine)
            else:
                rest += here
            start = mine.stop
        return engines, rest

    def _by_master(self, which: Iterable[int]) -> Iterable[tuple[int, list[int]]]:
        found: dict[int, list[int]] = {}
        for i in which:
            m, j = self._home[i]
            found.setdefault(m, []).append(j)
        return found.items()

    # ------------------------------------------------------------------ masks

    def _set_budget(self, group: Group) -> None:
        group.k = group.budget(self.method.ramp.at(self.at.warmed))

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
            self.attach_kernels()

    def _freeze(self) -> list[Master]:
        frozen: list[Master] = []
        for group, thetas in self.groups():
            keep = group.expand(self.method.keep(group, thetas))
            mask = group.expand(self.method.freeze(group, thetas, self.at))
            frozen += [FrozenMaster.of(*each) for each in zip(group.slabs(), thetas, keep, mask, strict=True)]
        return frozen

    def advance(self) -> None:
        """One optimizer step further."""
        self.at = replace(self.at, step=self.at.step + 1)

    # ------------------------------------------------------------------ weights

    @torch.no_grad()
    def weights(self) -> list[Tensor]:
        """w = f(θ) of every target."""
        if self.frozen:
            return [w for master in self.frozen for w in master.weights()]
        return [w for group, thetas in self.groups() for w in self._weights(group, thetas)]

    def _weights(self, group: Group, thetas: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for slab, w in zip(group.slabs(), self.method.weights(group, thetas, self.at), strict=True):
            found += lay_out(slab, w)
        return found

    @torch.no_grad()
    def write(self) -> None:
        """Put w into the model."""
        if self.frozen:
            self._write_frozen()
        elif not self.method.identity:
            for group, thetas in self.groups():
                if group.engine is None or not self.method.write_fast(group, thetas, group.engine):
                    copy_all([t.parameter for t in group.targets], self._weights(group, thetas))
        self._versions = [target.parameter._version for target in self.targets]

    def _write_frozen(self) -> None:
        start = 0
        for group in self.plan.groups:
            end = start + len(group.shapes)
            for writer in [group.frozen_engine] if group.frozen_engine else self.frozen[start:end]:
                writer.write()
            start = end

    @torch.no_grad()
    def transform(self, fresh: Sequence[bool]) -> None:
        """Turn the fresh gradients for w in `.grad` into gradients for θ, in place; missing ones count as zero."""
        start = 0
        for group, thetas in self.groups():
            end = start + len(group.targets)
            params = [t.parameter for t in group.targets]
            grads = [p.grad if f else None for p, f in zip(params, fresh[start:end], strict=True)]
            if (group.engine or group.frozen_engine) is not None and self._transform_fast(group, thetas, grads):
                start = end
                continue
            found = self._frozen_gradients(grads, start) if self.frozen else self._gradients(group, thetas, grads)
            for parameter, old, new in zip(params, grads, found, strict=True):
                if old is None:
                    # A parameter that the loss did not reach still feels the others through the shared budget.
                    if parameter.grad is None and new is not None and new.any():
                        parameter.grad = new.clone()
                elif new is None:
                    old.zero_()
            changed = [
                (g, x) for g, x in zip(grads, found, strict=True) if g is not None and x is not None and x is not g
            ]
            if changed:
                copy_all([g for g, _ in changed], [x for _, x in changed])
            start = end

    def _transform_fast(self, group: Group, thetas: Sequence[Tensor], grads: list[Tensor | None]) -> bool:
        """By the kernels, if the method has one for it."""
        able = group.engine is None or group.engine.fills_in or None not in grads
        if all(g is None for g in grads) or not able:
            return False
        for i, (target, g) in enumerate(zip(group.targets, grads, strict=True)):
            parameter = target.parameter
            if g is not None and g.stride() != parameter.stride():  # kernels take memory as it lies
                parameter.grad = grads[i] = like_parameter(target, g)
        if group.frozen_engine is not None:
            group.frozen_engine.mask_gradients(grads)
            return True
        assert group.engine is not None
        return self.method.transform_fast(group, thetas, grads, group.engine)

    def _frozen_gradients(self, grads: Sequence[Tensor | None], start: int) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        while len(found) < len(grads):
            master = self.frozen[self._home[start + len(found)][0]]
            found += master.gradients(grads[len(found) : len(found) + len(master.targets)])
        return found

    def _gradients(
        self, group: Group, thetas: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The method's gradients, for the tensors that it sees."""
        if not group.fused:
            self.method.observe(group, thetas, grads, self.at)
            return self.method.gradient(group, thetas, grads, self.at)
        if all(g is None for g in grads):
            return grads
        dense = [torch.zeros_like(t.parameter) if g is None else g for g, t in zip(grads, group.targets, strict=True)]
        flat = [gather(group.targets, dense)]
        self.method.observe(group, thetas, flat, self.at)
        (found,) = self.method.gradient(group, thetas, flat, self.at)
        return [None] * len(grads) if found is None else lay_out(group.targets, found)

    # ------------------------------------------------------------------ looking

    @torch.no_grad()
    def kept_units(self) -> list[int]:
        """Units kept of each target."""
        if self.frozen:
            sizes = [n for group in self.plan.groups for n in group.size_of_units()]
            return [n // size for n, size in zip([n for m in self.frozen for n in m.kept()], sizes, strict=True)]
        found: list[Tensor] = []
        for group, thetas in self.groups():
            for slab, keep in zip(group.slabs(), self.method.keep(group, thetas), strict=True):
                pieces = [keep] if len(slab) == 1 else keep.split([t.numel for t in slab])
                found += [piece.sum() for piece in pieces]
        return [int(n) for n in torch.stack(found).tolist()]

    @torch.no_grad()
    def masks(self) -> dict[str, Tensor]:
        """Bool per weight, by parameter name."""
        found: list[Tensor] = []
        if self.frozen:
            found = [keep for m in self.frozen for keep in m.keep()]
        else:
            for group, thetas in self.groups():
                keep = group.expand(self.method.keep(group, thetas))
                found += [
                    k.clone() for slab, whole in zip(group.slabs(), keep, strict=True) for k in lay_out(slab, whole)
                ]
        return {t.name: keep for t, keep in zip(self.targets, found, strict=True)}

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
                found[0] += (sum(t.numel for t in master.targets) - master.index.numel()) // size
            return found.tolist()
        for group, thetas in self.groups():
            for mask in group.masks(self.method.ranked(group, thetas)):
                found += torch.histc(mask.float(), bins, 0.0, 1.0).long().cpu()
        return found.tolist()

    # ------------------------------------------------------------------ checks

    def check_same_tensors(self) -> None:
        """The model must hold the parameters that the run was built for."""
        for target, (m, _) in zip(self.targets, self._home, strict=True):
            now, theta = current(target), self.masters[m].theta
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
        """No NaN or infinite gradient may reach θ.

        On an accelerator nothing waits for the answer: a flag keeps θ as it is, and the error comes with a later step.
        """
        which = list(which)
        if self.watch.flags.device.type != "cpu":
            for group, mine in self._groups_of(which):
                grads = [self.targets[i].parameter.grad if i in which else None for i in mine]
                engine = group.engine or group.frozen_engine
                if engine is not None and self._alike(group, grads):
                    engine.check(grads)
                else:
                    there = [(i, g) for i, g in zip(mine, grads, strict=True) if g is not None]
                    self.watch.note(0, [i for i, _ in there], [g for _, g in there])
            return
        bad = _first_non_finite((i, self.targets[i].parameter.grad) for i in which)
        if bad is not None:
            raise RuntimeError(
                f"the gradient of {self.targets[bad].name} holds NaN or infinite values at step {self.at.step}; nothing "
                "was updated. Lower the learning rate, clip gradients, or use a GradScaler with float16."
            )

    def _groups_of(self, which: Sequence[int]) -> Iterator[tuple[Group, range]]:
        """The groups that these targets belong to, each with all its targets."""
        start = 0
        for group in self.plan.groups:
            mine = range(start, start + len(group.targets))
            if any(i in mine for i in which):
                yield group, mine
            start = mine.stop

    def _alike(self, group: Group, grads: Sequence[Tensor | None]) -> bool:
        """Whether gradients lie in memory as their parameters do."""
        pairs = zip(group.targets, grads, strict=True)
        return all(g is None or (g.stride() == t.parameter.stride() and not g.is_sparse) for t, g in pairs)

    def check_weights(self, which: Iterable[int]) -> None:
        """No NaN or infinite θ may be taken from the model."""
        which = list(which)
        if self.watch.flags.device.type != "cpu":
            _, rest = self._by_engine(which)  # kernels look while they take
            self.watch.note(1, rest, [self.targets[i].parameter.detach() for i in rest])
            return
        bad = _first_non_finite((i, self.targets[i].parameter) for i in which)
        if bad is not None:
            raise RuntimeError(
                f"{self.targets[bad].name} would hold NaN or infinite weights after step {self.at.step}; the update was "
                "taken back. The learning rate is probably too high."
            )


def views_of(master: Master) -> list[Tensor]:
    """θ of each target of a master, while it is dense."""
    return master.views if isinstance(master, DenseMaster) else []


def _first_non_finite(tensors: Iterable[tuple[int, Tensor | None]]) -> int | None:
    """Index of the first tensor with a NaN or infinite entry, with one look at the device for all of them."""
    there = [(i, t.detach()) for i, t in tensors if t is not None and t.numel()]
    if not there:
        return None
    if torch.isfinite(torch.stack([t.sum().float() for _, t in there])).all():  # the sum of one that is not, is not
        return None
    largest = torch.stack([n.float() for n in torch._foreach_norm([t for _, t in there], math.inf)])
    finite = torch.isfinite(largest).tolist()
    return None if all(finite) else there[finite.index(False)][0]
