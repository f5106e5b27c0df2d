"""A run: θ, the masks and the moment, and how w is made of them. It knows nothing of optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spartan.checks import Checks
from spartan.fast import Teams, engine_for, frozen_engine_for, paths
from spartan.groups import Group, Plan
from spartan.masters import (
    DenseMaster,
    FrozenMaster,
    Grads,
    Master,
    as_one,
    copy_all,
    flat,
    in_memory_order,
    lay_out,
    like_parameter,
)
from spartan.methods.base import Method
from spartan.ops.collective import first_says, side_by_side
from spartan.ops.soft_topk import Dual
from spartan.schedules import Moment
from spartan.sharding import fsdp_modules, like, ranks_of, replicas, version
from spartan.watch import Watch

if TYPE_CHECKING:
    from spartan.kernels.engine import Engine
    from spartan.kernels.frozen_engine import FrozenEngine


class Run(Checks):
    """The dense weights behind a model's sparse ones, from the first step to the last."""

    def __init__(self, plan: Plan, method: Method, at: Moment, kernels: str, model: nn.Module) -> None:
        self.plan, self.method, self.at, self.kernels = plan, method, at, kernels
        self.targets = [target for group in plan.groups for target in group.targets]
        self.masters: list[Master] = [DenseMaster(s, method.identity) for g in plan.groups for s in g.slabs()]
        # Where each target is: its master, and its place there.
        self._home = [(m, j) for m, master in enumerate(self.masters) for j in range(len(master.targets))]
        self._versions: list[int] = []
        self.ranks = ranks_of([t.parameter for t in self.targets])
        self._fsdp = fsdp_modules(model) if self.ranks is not None else []
        self._ddp = replicas(model)
        self._kept: list[int] | None = None  # units kept, where counting takes all processes
        self.sent = self._sent_before = 0  # bytes that processes exchanged for the last choice of masks, and until then
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
                views = [view for m in mine if isinstance(m, DenseMaster) for view in m.views]
                out = self.watch.residuals[group.index]
                group.engine, group.path = engine_for(group, views, flags, first, out, self.kernels)
                if group.engine is not None and type(self.method).write_fast is Method.write_fast:
                    group.path += " for thresholds, plain torch for the method's own masks"
            else:
                lists = [(m.theta, m.mask, m.index) for m in mine if isinstance(m, FrozenMaster)]
                group.frozen_engine, group.path = frozen_engine_for(group, lists, flags, first, self.kernels)
            start += len(group.shapes)
        self.teams = Teams(self.plan.groups, self.watch.residuals)

    def path(self) -> str:
        """What does the work: kernels, or plain torch and why."""
        return "nothing to do" if self.method.identity else paths(self.plan.groups)

    def groups(self) -> Iterator[tuple[Group, list[Tensor]]]:
        """Each group with its θ, as methods see it."""
        start = 0
        for group in self.plan.groups:
            end = start + len(group.shapes)
            thetas = [m.theta for m in self.masters[start:end]]
            if thetas[0].ndim > 1 and group.fused:
                thetas = [in_memory_order(group.targets[0], thetas[0]).view(group.shapes[0])]
            yield group, thetas
            start = end

    @property
    def frozen(self) -> tuple[FrozenMaster, ...]:
        """The masters, once the mask is fixed; nothing before."""
        return tuple(m for m in self.masters if isinstance(m, FrozenMaster))

    def put(self, which: Iterable[int]) -> None:
        """Write θ into the parameters of these targets."""
        engines, rest = self._by_engine(which)
        with self.teams.at_once():
            for engine in engines:
                engine.put()
        for m, places in self._by_master(rest):
            self.masters[m].put(places)

    def take(self, which: Iterable[int]) -> None:
        """Read θ from the parameters of these targets."""
        engines, rest = self._by_engine(which)
        with self.teams.at_once():
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
            self._add_up()
            return
        self.set_budgets()
        with self.teams.expecting({g.index: (g.k, self.method.beta_at(g, self.at)) for g in self.plan.groups}):
            jobs = [partial(self.method.choose, group, thetas, self.at) for group, thetas in self.groups()]
            side_by_side(jobs, self.ranks)
        if self.at.phase == "finetune" and not self.method.identity:
            self.masters = self._freeze()
            self.attach_kernels()
        self.count()

    @torch.no_grad()
    def solve_anew(self, which: Sequence[int]) -> None:
        """Masks of these groups that a saved state leaves to be solved from θ."""
        for group, thetas in self.groups():
            if group.index in which and not self.frozen:
                self.method.choose(group, thetas, self.at)

    def agree(self) -> None:
        """Copies under DDP take process 0's thresholds and duals: an insurance, since equal weights give equal ones.

        Nothing is asked while some processes have run out of data (`join`), nor of numbers that are still on a device.
        """
        solved = [(g.threshold, g.dual) for g in self.plan.groups]
        if self._ddp is None or self.frozen or self.method.identity or self._ddp._join_config.enable:
            return
        mine: list[float] = []
        for threshold, dual in solved:
            soft = dual if isinstance(dual, Dual) else None
            found = (None, None) if threshold is None else (threshold.value, threshold.cut)
            numbers = [*found, *((None, None) if soft is None else (soft.center, soft.offset))]
            if any(isinstance(x, Tensor) for x in numbers):
                return
            mine += [0.0 if x is None else float(x) for x in numbers]
        first = first_says(mine, self._ddp.process_group, self.targets[0].parameter.device)
        self.sent = 8 * len(mine)
        if first == mine:
            return
        for i, (group, (threshold, dual)) in enumerate(zip(self.plan.groups, solved, strict=True)):
            value, cut, center, offset = first[4 * i : 4 * i + 4]
            if isinstance(dual, Dual):
                dual = replace(dual, center=center, offset=offset)
            group.go_on_from(None if threshold is None else replace(threshold, value=value, cut=int(cut)), dual)

    def _freeze(self) -> list[Master]:
        frozen: list[Master] = []
        for group, thetas in self.groups():
            keep = group.expand(self.method.keep(group, thetas))
            mask = group.expand(self.method.freeze(group, thetas, self.at))
            each = (flat(group, x) for x in (thetas, keep, mask))
            frozen += [FrozenMaster.of(*of) for of in zip(group.slabs(), *each, strict=True)]
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
        for slab, w in zip(group.slabs(), flat(group, self.method.weights(group, thetas, self.at)), strict=True):
            found += lay_out(slab, w)
        return found

    def reshard(self) -> None:
        """Let FSDP2 drop whole weights that a forward pass has left: shards are what is trained and written."""
        for module in self._fsdp:
            module.reshard()

    @torch.no_grad()
    def write(self) -> None:
        """Put w into the model."""
        self.reshard()
        with self.teams.at_once():
            if self.frozen:
                self._write_frozen()
            elif not self.method.identity:
                for group, thetas in self.groups():
                    if group.engine is None or not self.method.write_fast(group, thetas, group.engine):
                        copy_all([t.local for t in group.targets], self._weights(group, thetas))
        self._versions = [version(target.parameter) for target in self.targets]

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
        with self.teams.at_once():
            self._transform(fresh)

    def _transform(self, fresh: Sequence[bool]) -> None:
        jobs, start = [], 0
        for group, thetas in self.groups():
            jobs.append(partial(self._transform_group, group, thetas, fresh, start))
            start += len(group.targets)
        side_by_side(jobs, None if self.frozen else self.ranks)

    def _transform_group(self, group: Group, thetas: Sequence[Tensor], fresh: Sequence[bool], start: int) -> None:
        grads = [t.local_grad if f else None for t, f in zip(group.targets, fresh[start:], strict=False)]
        seen = None if self.frozen else self._observe(group, thetas, grads)
        if (group.engine or group.frozen_engine) is not None and self._transform_fast(group, thetas, grads):
            return
        found = self._frozen_gradients(grads, start) if self.frozen else self._gradients(group, thetas, grads, seen)
        for parameter, old, new in zip((t.parameter for t in group.targets), grads, found, strict=True):
            if old is None:
                # A parameter that the loss did not reach still feels the others through the shared budget.
                if parameter.grad is None and new is not None and group.largest_over_ranks(new.any().int()):
                    parameter.grad = like(parameter, new.clone())
            elif new is None:
                old.zero_()
        changed = [(g, x) for g, x in zip(grads, found, strict=True) if g is not None and x is not None and x is not g]
        if changed:
            copy_all([g for g, _ in changed], [x for _, x in changed])

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

    def check_gradients(self, which: Iterable[int]) -> None:
        """No NaN or infinite gradient may reach θ."""
        with self.teams.at_once():
            super().check_gradients(which)

    def _frozen_gradients(self, grads: Sequence[Tensor | None], start: int) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        while len(found) < len(grads):
            master = self.frozen[self._home[start + len(found)][0]]
            found += master.gradients(grads[len(found) : len(found) + len(master.targets)])
        return found

    def _gradients(self, group: Group, thetas: Sequence[Tensor], grads: Grads, seen: Grads | None) -> Grads:
        """The method's gradients, for the tensors that it sees."""
        if group.fused and all(g is None for g in grads):
            return grads
        found = self.method.gradient(group, thetas, seen or as_one(group, grads), self.at)
        if not group.fused:
            return found
        return [None] * len(grads) if found[0] is None else lay_out(group.targets, found[0].reshape(-1))

    def _observe(self, group: Group, thetas: Sequence[Tensor], grads: Grads) -> Grads | None:
        """Let the method look at the gradients, if it is one that does; what it saw, to be gathered only once."""
        if type(self.method).observe is Method.observe or (group.fused and all(g is None for g in grads)):
            return None
        self.method.observe(group, thetas, seen := as_one(group, grads), self.at)
        return seen

    # ------------------------------------------------------------------ looking

    def count(self) -> None:
        """Where weights lie in shards: count what is kept, and the bytes of it all.

        Once per choice of masks and by all processes, so that one of them may ask for `stats` by itself.
        """
        if self.ranks is None:
            return
        here = torch.tensor(self._kept_units(), device=self.targets[0].local.device)
        mine = torch.tensor(self.ranks.counts, device=here.device)
        self._kept = [int(n) for n in self.ranks.sum(torch.where(mine, here, 0)).tolist()]
        self._add_up()

    def _add_up(self) -> None:
        """The bytes that processes have exchanged since the last time."""
        if self.ranks is None:
            return
        sent = self.ranks.sent + sum(group.ranks.sent for group in self.plan.groups if group.ranks is not None)
        self.sent, self._sent_before = sent - self._sent_before, sent

    def kept_units(self) -> list[int]:
        """Units kept of each target."""
        return self._kept_units() if self._kept is None else self._kept

    @torch.no_grad()
    def _kept_units(self) -> list[int]:
        """Units kept of each target on this process."""
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
                keep = flat(group, group.expand(self.method.keep(group, thetas)))
                found += [
                    k.clone() for slab, whole in zip(group.slabs(), keep, strict=True) for k in lay_out(slab, whole)
                ]
        return {t.name: like(t.parameter, keep) for t, keep in zip(self.targets, found, strict=True)}

    @torch.no_grad()
    def mask_histogram(self, bins: int) -> list[int] | None:
        """How many units have a mask value in each of `bins` equal parts of [0, 1]; None without a soft mask.

        Where weights lie in shards, every process must ask.
        """
        if any(group.dual is None for group in self.plan.groups):
            return None
        found = []  # of each tensor that methods see
        if self.frozen:
            sizes = [n for group in self.plan.groups for n in group.sizes]
            for master, size in zip(self.frozen, sizes, strict=True):
                found.append(torch.histc(master.mask.float(), bins, 0.0, 1.0).long().cpu() // size)
                found[-1][0] += (sum(t.local.numel() for t in master.targets) - master.index.numel()) // size
        else:
            for group, thetas in self.groups():
                for mask in group.masks(self.method.ranked(group, thetas)):
                    found.append(torch.histc(mask.float(), bins, 0.0, 1.0).long().cpu())
        if self.ranks is None:
            return torch.stack(found).sum(0).tolist()
        mine = [x if counted else torch.zeros_like(x) for x, counted in zip(found, self.ranks.counts, strict=True)]
        return self.ranks.sum(torch.stack(mine).sum(0).to(self.targets[0].local.device)).tolist()
