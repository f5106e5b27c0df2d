"""The sparsifier: binds a model, a method and an optimizer, and owns the dense weights θ.

The model always holds the sparse weights w = f(θ). Three moves make a training step:

    forward, backward    run on w; the model is plain and unmodified
    backward()           turns the gradient for w into the one for θ, in `.grad`
    optimizer.step()     θ goes into the parameters, is updated and kept; new masks are chosen; w goes back
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from spartan import checkpoint
from spartan.budgets import Budget
from spartan.costs import Cost, Flops, as_cost
from spartan.fast import check_kernels
from spartan.groups import make_plan
from spartan.ledger import Ledger
from spartan.methods import as_method, check_together
from spartan.methods.base import Method
from spartan.ops.collective import share
from spartan.patterns import Pattern
from spartan.run import Run
from spartan.schedules import Moment
from spartan.stats import Layer, Stats, describe
from spartan.wrap import Closure, add_learned, check_optimizers, remove_learned, skipped, wrap_step

# Which sparsifier a parameter belongs to, so that a second one on the same model is refused.
_OWNERS: Any = WeakIdKeyDictionary()


class Sparsifier:
    """Trains a model to an exact sparsity budget.

    Build it after the model is on its device and wrapped (`.to()`, DDP); from then on the model holds sparse weights.

    Args:
        model: any module; it is not changed except for the values of its target weights.
        sparsity: fraction of the counted weights (with a cost: of the cost) that is gone at the end, in [0, 1).
        total_steps: optimizer steps of the whole run.
        method: a name (`spartan.methods()` lists them) or a method object.
        pattern: the unit that lives or dies together: `Unstructured()` (default), `Block(h, w)`, `Channel()` or
            `NM(n, m)`.
        cost: what a parameter costs: `Params()` (default), `Flops(example_inputs)`, or {glob: cost per parameter}.
        budget: "global", "uniform", "erk" or {glob: sparsity}; None is the method's own.
        include: globs over parameter names; None is every Linear, Conv*d and MultiheadAttention weight.
        exclude: globs of those to leave dense.
        warmup: fraction of total_steps over which the sparsity grows; None is the method's own.
        finetune: fraction of total_steps, at the end, with the mask fixed; None is the method's own.
        count: "targets", or "model": biases and norms count too, and the targets get sparser to make up for it.
        kernels: "auto" (Triton on a CUDA device, plain torch elsewhere), "torch" or "triton".

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparsifier = Sparsifier(model, sparsity=0.9, total_steps=20).attach(optimizer)
        >>> for _ in range(20):
        ...     model(torch.randn(8, 16)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> sparsifier.finalize()
        >>> int(sum((p != 0).sum() for p in (model[0].weight, model[2].weight)))
        64
    """

    def __init__(
        self,
        model: nn.Module,
        sparsity: float,
        total_steps: int,
        method: str | Method | type[Method] = "spartan",
        *,
        pattern: Pattern | None = None,
        cost: Cost | Mapping[str, float] | None = None,
        budget: Budget | None = None,
        include: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] | None = None,
        warmup: float | None = None,
        finetune: float | None = None,
        count: str = "targets",
        kernels: str = "auto",
    ) -> None:
        self.model = model
        self.method = as_method(method)
        at = Moment.start(
            total_steps,
            self.method.warmup if warmup is None else warmup,
            self.method.finetune if finetune is None else finetune,
            seed=int(torch.randint(1 << 31, ()).item()),
        )
        if budget is None:
            budget = getattr(pattern, "budget", None) or self.method.budget
        plan = make_plan(
            model, sparsity, pattern=pattern, cost=cost, budget=budget, include=include, exclude=exclude, count=count
        )
        check_together(self.method, plan.groups[0].pattern)
        self._flops = isinstance(cost, Flops)
        self._targets = [target for group in plan.groups for target in group.targets]
        for target in self._targets:
            other = _OWNERS.get(target.parameter)
            if other is not None and other() is not None:
                raise RuntimeError(
                    f"{target.name} already belongs to a sparsifier; finalize() that one before building another"
                )
        # What a saved state must agree with.
        self.settings: dict[str, Any] = {
            "method": repr(self.method),
            "sparsity": float(sparsity),
            "pattern": repr(plan.groups[0].pattern),
            "cost": as_cost(cost).describe(),
            "budget": dict(budget) if isinstance(budget, Mapping) else budget,
            "count": count,
            "total_steps": total_steps,
            "warmup_steps": at.warmup_steps,
            "freeze_step": at.freeze_step,
        }
        # Every process must draw the same random numbers: process 0's seed is that of all.
        at = replace(at, seed=share(at.seed, self._targets[0].parameter.device))
        self._run = Run(plan, self.method, at, check_kernels(kernels), model)
        # Nothing of the model has been touched up to here, so a bad argument changes nothing.
        self._ledger = Ledger(self._targets)
        for target in self._targets:
            _OWNERS[target.parameter] = weakref.ref(self)
        self._optimizers: list[Optimizer] = []
        self._owner: list[int] = []  # index of the optimizer that trains each target
        self._undo: list[Callable[[], None]] = []
        self._round: set[int] = set()  # optimizers that have stepped since the schedule last advanced
        self._lent = False  # inside dense_weights()
        self._final: tuple[Stats, list[Layer]] | None = None
        self._run.write()

    # ------------------------------------------------------------------ the optimizer

    def attach(self, *optimizers: Optimizer) -> Sparsifier:
        """Wrap the step of the optimizer, or optimizers, that train the targets. Returns the sparsifier."""
        self._alive("attach")
        if self._optimizers:
            raise RuntimeError("this sparsifier is attached already; detach() it first")
        self._owner = check_optimizers(optimizers, self._targets)
        if self._learned():
            add_learned(optimizers[self._owner[0]], self._learned(), self.method.learned_options)
        self._optimizers = list(optimizers)
        self._undo = [wrap_step(optimizer, self._step) for optimizer in optimizers]
        return self

    def detach(self) -> Sparsifier:
        """Give the optimizers their own step back. The model keeps the sparse weights it holds."""
        for undo in self._undo:
            undo()
        if self._optimizers and self._learned():
            remove_learned(self._optimizers[self._owner[0]], self._learned())
        self._optimizers, self._owner, self._undo, self._round = [], [], [], set()
        return self

    def _learned(self) -> list[nn.Parameter]:
        return [p for group in self._run.plan.groups for p in group.learned.values()]

    # ------------------------------------------------------------------ the step

    def backward(self) -> None:
        """Turn the gradients for w in `.grad` into gradients for θ, once per step.

        Needed only before clipping or logging gradients; `optimizer.step()` does it otherwise. The map is linear, so
        accumulated and loss-scaled gradients are fine (a method with a penalty of its own wants them unscaled).
        """
        self._alive("backward")
        self._run.check_model()
        fresh = [self._ledger.fresh(i) for i in range(len(self._targets))]
        if any(fresh) and not self.method.identity:
            self._run.transform(fresh)
            for i in range(len(self._targets)):
                self._ledger.transformed(i)

    def _step(self, optimizer: Optimizer, inner: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """What `optimizer.step()` does now."""
        self._alive("optimizer.step")
        self._run.watch.look()
        if self.method.identity:
            result = inner() if closure is None else inner(closure)
            self._after(optimizer)
            return result
        run, mine = self._run, [i for i, j in enumerate(self._owner) if self._optimizers[j] is optimizer]

        def ready() -> None:
            """Gradients for θ, and finite ones, unless a loss scaler is there to skip the update."""
            if getattr(optimizer, "grad_scale", None) is not None and not self.method.linear:
                raise RuntimeError(
                    f"{self.method!r} adds a penalty to the gradients, which must not be scaled: call "
                    "scaler.unscale_(optimizer) before scaler.step(optimizer)"
                )
            self.backward()
            if getattr(optimizer, "found_inf", None) is None:
                run.check_gradients(mine)

        evaluate = None if closure is None else Closure(run, mine, closure, ready)
        if evaluate is None:
            ready()
        else:
            run.check_model()
        with torch.no_grad():
            try:
                run.put(mine)
                result = inner() if evaluate is None else inner(evaluate)
                if not skipped(optimizer):
                    run.check_weights(mine)
            except BaseException:
                if evaluate is not None:
                    evaluate.roll_back()
                run.write()
                raise
            try:
                run.take(mine)
                for i in mine:
                    self._ledger.stepped(i)
            finally:
                self._after(optimizer)
        return result

    def _after(self, optimizer: Optimizer) -> None:
        """Advance the schedule when all optimizers have stepped, or one steps again; choose masks; write w."""
        try:
            if skipped(optimizer):
                return
            me = next(j for j, other in enumerate(self._optimizers) if other is optimizer)
            again = me in self._round
            self._round = {me} if again else self._round | {me}
            everyone = len(self._round) == len(self._optimizers)
            if again or everyone:
                self._run.advance()
            if everyone:
                self._round = set()
            self._run.choose()
            self._run.agree()
        finally:
            self._run.write()  # whatever happens, the model holds w
        self._run.watch.send(self._run.at.step)

    @contextmanager
    def dense_weights(self) -> Iterator[None]:
        """Inside, the parameters hold θ; what they hold at the end becomes θ, and w is chosen anew.

        For averaging (EMA, SWA): an average of sparse weights is denser than either. Average θ instead, then put the
        average back and let it be projected:

            with sparsifier.dense_weights():
                ema.update_parameters(model)                     # every step
            with sparsifier.dense_weights():
                model.load_state_dict(ema.module.state_dict())   # at the end
        """
        self._alive("dense_weights")
        run, every = self._run, range(len(self._targets))
        run.check_model()
        self._lent = True
        try:
            with torch.no_grad():
                run.put(every)
            yield
            run.check_same_tensors()
            run.check_weights(every)
        except BaseException:
            run.write()
            raise
        else:
            try:
                with torch.no_grad():
                    run.take(every)
                run.choose()
            finally:
                run.write()
        finally:
            self._lent = False

    def finalize(self) -> None:
        """End training: drop θ and leave an ordinary sparse model. `optimizer.step()` raises from then on."""
        self._alive("finalize")
        self._run.watch.look(wait=True)
        self._run.check_model()
        at = self._run.at
        sparse_at = {"never": 0, "finetune": at.freeze_step}.get(self.method.sparse_from, at.warmup_steps)
        if at.step < sparse_at:
            raise RuntimeError(
                f"finalize() at step {at.step} of {at.total_steps}: {self.method.name} reaches the target density at "
                f"step {sparse_at}; train on, or build the sparsifier with fewer total_steps"
            )
        self._final = (self.stats, self.layers())
        self._ledger.close()
        self._run.masters = []
        for target in self._targets:
            _OWNERS.pop(target.parameter, None)

    def _alive(self, what: str) -> None:
        if self._final is not None:
            raise RuntimeError(
                f"{what}() after finalize(): the dense weights are gone, and a further step would undo the sparsity. "
                "detach() gives the optimizer back its own step."
            )
        if self._lent:
            raise RuntimeError(f"{what}() inside dense_weights(): leave the block first, so that the model holds w")

    # ------------------------------------------------------------------ looking

    @property
    def stats(self) -> Stats:
        """Where the run stands: step, phase, achieved and asked density and cost, β, μ, threshold, passes."""
        if self._final is not None:
            return self._final[0]
        return Stats.of(self._run.plan, self.method, self._run.at, self._run.kept_units(), self._run.sent)

    def progress(self) -> dict[str, Any]:
        """The part of `stats` that costs nothing to read: what is asked for, what is kept, how the mask was solved.

        Densities are fractions of the whole cost here. On an accelerator some of it is still on the device, as tensors.
        """
        run = self._run
        groups, duals = run.plan.groups, [g.dual for g in run.plan.groups if g.dual is not None]
        kept = sum(math.nan if g.threshold is None else g.threshold.cost for g in groups) + run.plan.untouched
        unknown = not isinstance(kept, Tensor) and math.isnan(kept)
        return {
            "target_density": (sum(g.k for g in groups) + run.plan.untouched) / run.plan.total,
            "density": None if unknown else kept / run.plan.total,
            "beta": self.method.beta_at(groups[0], run.at),
            "mu": duals[0].mu if len(duals) == 1 else None,
            "passes": _most([d.passes for d in duals]),
        }

    def layers(self) -> list[Layer]:
        """Per-layer shape, parameters, kept weights, density and (with a FLOP cost) FLOPs."""
        if self._final is not None:
            return self._final[1]
        return Layer.of(self._run.plan, self._run.kept_units(), self._flops)

    def masks(self) -> dict[str, Tensor]:
        """Bool per weight: what is kept now, by parameter name."""
        if self._final is not None:
            return {t.name: t.parameter.detach() != 0 for t in self._targets}
        return self._run.masks()

    def mask_histogram(self, bins: int = 50) -> list[int] | None:
        """How many units have a soft mask value in each of `bins` equal parts of [0, 1]; None for hard masks."""
        self._alive("mask_histogram")
        return self._run.mask_histogram(bins)

    def __repr__(self) -> str:
        return describe(self.method, self.settings, self.stats, self.layers(), self._run.path())

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """θ by parameter name, the step and all else that a bit-identical resume needs; tensors are not copied."""
        self._alive("state_dict")
        self._run.watch.look(wait=True)
        state = checkpoint.pack(self.settings, self._run.at, self._run.plan.groups, self._run.masters)
        return {**state, "round": sorted(self._round)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved with the same model and settings. Load the model and the optimizer as well."""
        self._alive("load_state_dict")
        run = self._run
        run.check_same_tensors()
        checkpoint.check(state, self.settings, run.plan.groups)
        run.at, run.masters = checkpoint.restore_weights(state, run.at, run.masters)
        run.attach_kernels()
        checkpoint.restore_groups(state, run.plan.groups)
        self._round = set(state["round"])
        run.set_budgets()
        run.solve_anew([i for i, of in enumerate(state["groups"]) if checkpoint.needs_solving(of)])
        run.count()
        run.write()


def _most(passes: list[int | Tensor]) -> int | Tensor:
    """The largest; on the device if they are there."""
    tensors = [p for p in passes if isinstance(p, Tensor)]
    return torch.stack(tensors).max() if tensors else max((p for p in passes if not isinstance(p, Tensor)), default=0)
