"""Runs a training: keeps θ, the masks and the moment, and does with them what a step asks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from spartan.distributed import broadcast_from_first, like, replicas, version
from spartan.methods.base import Method
from spartan.problem.problem import Problem
from spartan.problem.schedules import Moment
from spartan.solvers.theta import copy_all
from spartan.solvers.torch import TorchSolver
from spartan.step import look
from spartan.step.clip import JointClip
from spartan.step.gradients import GradientState, of_part, without_grad
from spartan.step.guard import Guard, check_copies
from spartan.step.moments import forget_all, forget_units
from spartan.step.weights import Weights

UNUSED = 2  # gradients cleared without a step, one after the other, until somebody looks at the weights
Closure = Callable[[], Any]
Update = Callable[..., Any]  # the optimizer's own step


class Run:
    """The dense weights behind a model's sparse ones, from the first step to the last.

    Args:
        problem: what is asked.
        method: what is done about it.
        at: where the run begins.
        kernels: "auto", "triton" or "torch".
        model: the model, possibly wrapped.
    """

    def __init__(self, problem: Problem, method: Method, at: Moment, kernels: str, model: nn.Module) -> None:
        self.problem, self.method, self.at = problem, method, at
        self.weights = Weights(problem, method, kernels)
        self.guard = Guard(self.weights, model)
        self.begun = method.begun(problem)
        self._clip = None if method.clip is None else JointClip(self.weights, method.clip)
        self.optimizers: list[Optimizer] = []  # those that are attached
        self._model, self._ddp = model, replicas(model)
        self._decays = False  # whether what the method declared for the last gradients has a decay
        self._alone = problem.ranks.alone  # whether no weight lies in shards
        self.kept: list[int] | None = None  # units kept, where counting takes all processes
        self.sent = self._sent_before = 0  # bytes that processes exchanged for the last choice of masks, and until then
        self.set_budgets()
        for solver in self.weights.solving:
            method.setup(solver, at)
        self.solve()
        followed = [] if method.identity else problem.targets  # where w = θ there is nothing to turn
        self.gradients = GradientState(followed, self.backward, model)

    # ------------------------------------------------------------------ the step

    def step(
        self,
        optimizer: Optimizer,
        mine: Sequence[int],
        update: Update,
        closure: Closure | None,
        skipped: Callable[[], bool],
    ) -> Any:
        """One step of an optimizer that trains these targets: θ is updated, and `finish` is to take it from the model.

        Gradients are turned off around both. `skipped` tells whether a loss scaler made the update be left out.
        """
        evaluate = None if closure is None else Evaluation(self, optimizer, mine, closure)
        if evaluate is None:
            self.turn(optimizer, mine)
        elif self.gradients.raw or self.gradients.left_for_the_step():
            # What processes have not added up yet cannot be turned; the closure's backward may do so.
            self.check_model()
        else:
            self.backward()  # some optimizers look at gradients before they ask for the loss
        self.guard.compare()
        try:
            grads = self.gradients.listed()
            with self.weights.together():
                if evaluate is None:
                    self.guard.gradients(mine, grads, self.at.step, optimizer)
                self.weights.put(mine)
            result = update() if evaluate is None else update(evaluate)
            if not skipped():
                self.guard.updates(mine, self.at.step)
        except BaseException:
            if evaluate is not None:
                evaluate.roll_back()
            self.write()
            raise
        self.gradients.stepped(mine, grads if evaluate is None else self.gradients.listed())
        return result

    def turn(self, optimizer: Optimizer, mine: Sequence[int]) -> None:
        """Gradients for θ, clipped if the method asks for it, with the method's decay."""
        self.backward()
        if self._clip is not None:
            self._clip(optimizer, mine)
        if self._decays:
            self._add_decay(mine, getattr(optimizer, "grad_scale", None))

    def finish(self, optimizer: Optimizer, mine: Sequence[int], skipped: bool, advance: bool) -> None:
        """After one optimizer's step, or all of them: the schedule moves on, masks are solved anew, w goes back."""
        with self.weights.together():
            try:
                # The line search of LBFGS has looked at where it goes.
                self.weights.take(mine, None if isinstance(optimizer, LBFGS) else self.at)
                if not skipped:
                    if advance:
                        self.at = self.at.next()
                    self.solve()
                    self._agree()
                    if advance and self.method.forgets(self.at):
                        forget_all(self.optimizers)
            finally:
                self.write()  # whatever happens, the model holds w
        if self.at.due and not self.method.identity:
            self.guard.remember()
        self.guard.send(self.at.step)

    # ------------------------------------------------------------------ gradients

    def backward(self, check: bool = True) -> None:
        """Turn the fresh gradients for w in `.grad` into gradients for θ, in place; missing ones count as zero.

        Without `check`, only versions are looked at: the rest is for the step to see.
        """
        if check:
            ddp = replicas(self._model)
            if ddp is not None:
                self.guard.check_join(ddp)
            if ddp is not self._ddp:  # wrapped since
                self._ddp = ddp
                check_copies(ddp, [] if self.method.identity else look.thetas(self.weights))
        if check or not self.guard.same_versions():
            self.check_model()
        if not self.method.identity and self.gradients.turn_fresh(self._turn) and self._clip is not None:
            self._clip.remember()

    def _turn(self, fresh: Sequence[bool], grads: Sequence[Tensor | None]) -> None:
        """Turn these gradients, of those of all targets."""
        self._decays = False
        given = grads if all(fresh) else [grad if new else None for grad, new in zip(grads, fresh, strict=True)]
        for part, form in self.weights.each(self.at):
            own = of_part(given, part.problem.numbers, self.guard.whole)
            self._decays = self._decays or (form is not None and form.decay is not None)
            if isinstance(part, TorchSolver) and self.method.observes(self.at):
                part.further = self.gradients.adding
                seen = own if self.method.apart else self.gradients.summed(part.problem.numbers, own)
                self.method.observe(part, seen, self.at)
            replace_gradients(part.problem, own, part.turn(form, own))

    @torch.no_grad()
    def _add_decay(self, mine: Sequence[int], scale: Tensor | None) -> None:
        """Add what the method adds whatever the loss: once per step, unscaled, or scaled where gradients still are."""
        for part, form in self.weights.each(self.at):
            if form is None or form.decay is None or not isinstance(part, TorchSolver):
                continue
            where = [(i, n) for i, n in enumerate(part.problem.numbers) if n in set(mine)]
            targets = part.problem.targets
            wanted = [i for i, n in where if self.gradients.undecayed(n)]
            # What the loss does not reach decays too, if it reaches anything.
            wanted += [i for i, n in where if targets[i].parameter.grad is None and wanted]
            for i in wanted:
                if targets[i].parameter.grad is None:
                    targets[i].parameter.grad = like(targets[i].parameter, torch.zeros_like(targets[i].local))
                    self.gradients.turned(part.problem.numbers[i])
                    self.gradients.undecayed(part.problem.numbers[i])
            if wanted:
                some = set(wanted)
                part.add_decay(form, [t.local_grad if i in some else None for i, t in enumerate(targets)], scale)

    # ------------------------------------------------------------------ masks and weights

    def set_budgets(self) -> None:
        """What every segment may cost at this moment."""
        for solver in self.weights.solving:
            solver.k = solver.problem.budgets(grown(self))

    def solve(self) -> None:
        """New masks for θ at this moment; from the first step of finetuning on they are fixed."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.solve()
            return
        if not self.weights.frozen:
            self._choose()
            if self.at.phase == "finetune" and not self.method.identity:
                self.weights.freeze(self.at)
            if not self._alone:
                self.count()
        if self._alone:
            self.sent = 0
        else:
            self._add_up()

    def _choose(self) -> None:
        """New masks for θ, with the budgets of this moment."""
        before = [solver.k for solver in self.weights.solving]
        self.set_budgets()
        for solver, k in zip(self.weights.solving, before, strict=True):
            # Looking at each layer waits for the device: not at every step.
            if any(solver.problem.floors) and (k != solver.k or self.at.phase == "finetune" or self.at.due):
                self._choose_above_floors(solver)
            else:
                self.method.choose(solver, self.at)
            if solver.forgotten:
                forget_units(solver, self.optimizers)

    def _choose_above_floors(self, solver: TorchSolver) -> None:
        """Choose masks; while layers keep less than their `min_density`, give them budgets of their own and choose anew."""
        problem, before, apart = solver.problem, solver.snapshot(), set[int]()
        while True:
            solver.divide(sorted(apart))
            solver.k = problem.budgets(grown(self))
            self.method.choose(solver, self.at)
            kept = solver.sum_by_target(self.method.keep(solver, self.at))[0].tolist()
            below = problem.below_floor([n * c for n, c in zip(kept, problem.unit_costs, strict=True)])
            if not below:
                return
            apart |= set(below)
            solver.restore(before)

    def _agree(self) -> None:
        """Copies under DDP take process 0's masks: an insurance, since equal weights give equal ones.

        Nothing is asked of numbers that are still on a device.
        """
        ddp, parts = self._ddp, self.weights.solving
        if ddp is None or not parts or self.method.identity or self.weights.bad.device.type != "cpu":
            return
        mine = torch.cat([x.double() for part in parts for x in part.decisive()] or [torch.zeros(0)])
        first = broadcast_from_first(mine.tolist(), ddp.process_group, mine.device)
        self.sent = 8 * len(mine)
        if first != mine.tolist():
            told = iter(first)
            for part in parts:
                for x in part.decisive():
                    x.copy_(torch.tensor([next(told) for _ in x], dtype=torch.float64))
                part.go_on_from(part.solution())

    def write(self, anew: bool = True) -> None:
        """Put w into the model; not `anew` where it is the same as before."""
        self.guard.reshard()
        if not self.method.identity:
            with without_grad():
                self.weights.write(self.at)
        self.guard.written(anew)

    def check_model(self, look: bool = False) -> None:
        """The model must hold what was written into it; with `look`, compare values in any case."""
        # Gradients that are cleared again and again, and no step: somebody may train without an optimizer.
        look = look or self.gradients.unused >= UNUSED
        if look:
            self.gradients.unused = 0
        self.guard.untouched(lambda: self.weights.write(self.at), look)

    # ------------------------------------------------------------------ looking

    def count(self) -> None:
        """Where weights lie in shards: count what is kept, once per choice of masks and by all processes.

        So one of them may ask for `stats` by itself.
        """
        if not self._alone:
            self.kept = look.kept_units(self.weights, self.at)

    def _add_up(self) -> None:
        """The bytes that processes have exchanged since the last time."""
        ranks = {id(part.ranks): part.ranks for part in (self.problem, *self.weights.problems)}
        sent = sum(each.sent for each in ranks.values())
        self.sent, self._sent_before = sent - self._sent_before, sent

    def kept_units(self) -> list[int]:
        """Units kept of each target."""
        return look.kept_units(self.weights, self.at) if self.kept is None else self.kept

    def kept_cost(self) -> float | Tensor | None:
        """What is kept costs, without waiting for it; None where nobody knows yet."""
        if self.kept is not None or self.weights.frozen:
            return math.fsum(n * c for n, c in zip(self.kept_units(), self.problem.unit_costs, strict=True))
        costs = [solver.kept_cost(self.method.form(solver, self.at)) for solver in self.weights.solving]
        return None if None in costs else sum(cost.sum() for cost in costs if cost is not None)


class Evaluation:
    """A closure as the optimizer sees it: it may ask for the loss at any θ, and gets gradients for θ.

    The optimizer's parameters hold θ when it calls; the user's closure must run on w.
    """

    def __init__(self, run: Run, optimizer: Optimizer, mine: Sequence[int], closure: Closure) -> None:
        self.run, self.optimizer, self.mine, self.closure = run, optimizer, mine, closure
        self._put: list[int] | None = None  # versions of the parameters when θ was last put there
        self._before: list[Any] | None = None
        # What else LBFGS moves before it asks for the loss again; the others ask first, and once.
        targets = {id(run.problem.targets[i].parameter) for i in mine} if isinstance(optimizer, LBFGS) else None
        every = [p for group in optimizer.param_groups for p in group["params"]] if targets is not None else []
        self._others = [(p, p.detach().clone()) for p in every if id(p) not in (targets or ())]

    def __call__(self) -> Any:
        """The loss at w = f(θ)."""
        if self._put is not None and self._put != self._versions():
            self._follow()
        self.run.write()
        with torch.enable_grad():
            loss = self.closure()
        self.run.turn(self.optimizer, self.mine)
        self.run.guard.gradients(self.mine, self.run.gradients.listed(), self.run.at.step, self.optimizer)
        with torch.no_grad():
            self.run.weights.put(self.mine)
        self._put = self._versions()
        return loss

    def _versions(self) -> list[int]:
        return [version(self.run.problem.targets[i].parameter) for i in self.mine]

    @torch.no_grad()
    def _follow(self) -> None:
        """The optimizer has moved within its step (LBFGS does): θ is what it put there."""
        if self._before is None:
            self._before = self.run.weights.snapshot()
        self.run.guard.updates(self.mine, self.run.at.step)
        self.run.weights.take(self.mine)
        self.run.solve()

    @torch.no_grad()
    def roll_back(self) -> None:
        """The step failed: back to θ as it was before, and to all else that the optimizer has moved."""
        if self._before is not None:
            self.run.weights.restore(self._before)
            for parameter, was in self._others:
                parameter.copy_(was)


def without_update(run: Run, optimizer: Optimizer, mine: Sequence[int], closure: Closure | None) -> Any:
    """A step that a method takes for its masks: it sees the gradients, and no optimizer moves anything."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    run.turn(optimizer, mine)
    run.guard.compare()
    grads = run.gradients.listed()
    run.guard.gradients(mine, grads, run.at.step, optimizer)
    run.gradients.stepped(mine, grads)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers ask for
    return loss


def replace_gradients(problem: Problem, old: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> None:
    """Put turned gradients where the others were."""
    if new is old:
        return
    changed = []
    for target, before, after in zip(problem.targets, old, new, strict=True):
        if before is None:
            if after is not None and target.parameter.grad is None:
                target.parameter.grad = like(target.parameter, after)
        elif after is None:
            before.zero_()
        elif after is not before and after is not target.local_grad:
            changed.append((before, after))
    copy_all([a for a, _ in changed], [b for _, b in changed])


def grown(run: Run) -> float:
    """How far the sparsity has grown now, as a fraction of the final one, from where the run began."""
    ramp = run.method.ramp.at(run.at.warmed)
    return run.begun + (1.0 - run.begun) * ramp if run.begun else ramp
