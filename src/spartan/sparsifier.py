"""The sparsifier: binds a model, a method and an optimizer, and owns the dense weights θ.

The model always holds the sparse weights w = f(θ). Three moves make a training step:

    forward, backward    run on w; the model is plain and unmodified
    when it ends         the gradient for w becomes the one for θ, in `.grad`
    optimizer.step()     θ goes into the parameters, is updated and kept; new masks are chosen; w goes back
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spartan.averaging import Average
from spartan.distributed import check_same, is_dtensor, same_on_all
from spartan.following import Follower, check_free, claim
from spartan.methods import as_method, check_together
from spartan.methods.base import Method
from spartan.problem.budgets import Budget
from spartan.problem.costs import Cost, as_cost
from spartan.problem.coverage import ask_about_adapters, coverage_of
from spartan.problem.patterns import Pattern
from spartan.problem.problem import make_problem
from spartan.problem.schedules import Moment
from spartan.problem.targets import Globs, find_targets, some_names
from spartan.problem.zeros import zeros_of
from spartan.scalars import as_plain
from spartan.solvers.base import check_kernels
from spartan.state import plain
from spartan.state.copies import rebuilt
from spartan.state.riding import Riding
from spartan.step import look
from spartan.step.notices import Notices, check_decay, sparse_already
from spartan.step.run import Run
from spartan.step.stats import Layer, Stats, describe, progress_of
from spartan.step.wrap import Attachment, add_learned, remove_learned
from spartan.stepping import check_alive, finalize, step


class Sparsifier:
    """Trains a model to an exact sparsity budget.

    Build it after the model is on its device and wrapped (`.to()`, DDP); from then on the model holds sparse weights.

    Args:
        model: any module; it is not changed except for the values of its target weights.
        sparsity: fraction of the counted weights (with a cost: of the cost) that is gone at the end, in [0, 1).
        total_steps: optimizer steps of the whole run.
        method: a name (`spartan.methods()` lists them) or a method object; "spartan" is that of the paper.
        pattern: the unit that lives or dies together: `Unstructured()` (default), `Block(h, w)`, `Channel()`,
            `NM(n, m)` or `Heads(count)`.
        cost: what a parameter costs: `Params()` (default), `Flops(example_inputs)`, or {glob: cost per parameter}.
        budget: "global", "balanced", "uniform", "erk" or {glob: sparsity}; None is the method's own.
        include: globs over parameter names; None is the weights of every Linear, Conv*d, transformers' Conv1D,
            MultiheadAttention, LSTM, GRU and RNN, and of experts in one tensor; embeddings only by name.
        exclude: globs of those to leave dense.
        warmup: fraction of total_steps over which the sparsity grows; None is the method's own.
        finetune: fraction of total_steps, at the end, with the mask fixed; None is the method's own.
        count: "targets", or "model": biases and norms count too, and the targets get sparser to make up for it.
        min_density: fraction of a layer that is kept at least, where layers share a budget; or {glob: fraction}. Seen
            to while the budget changes, then every hundredth of the run, and when the mask is fixed.
        kernels: "auto" (Triton on a CUDA device, chunks of weights on a CPU), "torch" or "triton".

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
        method: str | Method | type[Method] = "paced",
        *,
        pattern: Pattern | None = None,
        cost: Cost | Mapping[str, float] | None = None,
        budget: Budget | None = None,
        include: Globs = None,
        exclude: Globs = None,
        warmup: float | None = None,
        finetune: float | None = None,
        count: str = "targets",
        min_density: float | Mapping[str, float] = 0.0,
        kernels: str = "auto",
    ) -> None:
        self.model, self.method = model, as_method(method)
        sparsity, total_steps, warmup, finetune = map(as_plain, (sparsity, total_steps, warmup, finetune))
        cost, budget, min_density = map(as_plain, (cost, budget, min_density))
        include, exclude = (x if x is None or isinstance(x, str) else list(x) for x in (include, exclude))
        # What a copy is built with.
        self._arguments: dict[str, Any] = {
            "sparsity": sparsity, "total_steps": total_steps, "method": self.method, "pattern": pattern, "cost": cost,
            "budget": budget, "include": include, "exclude": exclude, "warmup": warmup, "finetune": finetune,
            "count": count, "min_density": min_density, "kernels": kernels,
        }  # fmt: skip
        check_same(self._arguments | {"cost": as_cost(cost).describe(), "kernels": None}, model)
        warmup = self.method.warmup if warmup is None else warmup
        finetune = self.method.finetune if finetune is None else finetune
        at = Moment.start(total_steps, warmup, finetune, seed=int(torch.randint(1 << 31, ()).item()))
        if budget is None:
            budget = getattr(pattern, "budget", None) or self.method.budget
        problem = make_problem(
            model, sparsity, pattern=pattern, cost=cost, budget=budget, include=include, exclude=exclude, count=count,
            min_density=min_density, scale=self.method.scale,
        )  # fmt: skip
        ask_about_adapters(model, include)
        check_together(self.method, problem.pattern)
        self.method.check(problem)
        self._flops = as_cost(cost).counts_flops
        self._targets = problem.targets
        check_free(self._targets)
        found = sparse_already(self.method, self._targets)
        chosen_by_name = include is not None or bool(exclude)
        self._notices = Notices(coverage_of(model, self._targets, include, exclude), chosen_by_name, found)
        # What a saved state must agree with.
        self.settings: dict[str, Any] = {
            "method": repr(self.method),
            "sparsity": float(sparsity),
            "pattern": repr(problem.pattern),
            "cost": as_cost(cost).describe(),
            "budget": dict(budget) if isinstance(budget, Mapping) else budget,
            "count": count,
            "total_steps": total_steps,
            "warmup_steps": at.warmup_steps,
            "freeze_step": at.freeze_step,
            "min_density": dict(min_density) if isinstance(min_density, Mapping) else float(min_density),
        }
        # Every process must draw the same random numbers: process 0's seed is that of all.
        at = replace(at, seed=same_on_all(at.seed, self._targets[0].parameter.device))
        self._run = Run(problem, self.method, at, check_kernels(kernels), model)
        # Nothing of the model has been touched up to here, so a bad argument changes nothing.
        claim(self, self._targets)
        self._attachment = Attachment(self._targets)
        self._run.guard.perturbed = lambda: self._attachment.perturbed
        self._riding: Riding | None = None
        self._mine: list[list[int]] = []  # the targets that each optimizer trains
        self._lent = False  # inside dense_weights()
        self._averages: list[Average] = []
        self._followers: list[Follower] = []
        self._waiting: list[Any] = []  # averages of a loaded state that nobody has asked to follow yet
        self._final: tuple[Stats, list[Layer], str] | None = None
        if found is not None and found.refused:
            self._run.guard.written()  # what the first step will refuse to destroy stays as it is
        else:
            self._run.write()

    @classmethod
    def from_sparse(
        cls, model: nn.Module, *, include: Globs = None, exclude: Globs = None, kernels: str = "auto"
    ) -> "Sparsifier":
        """Train a model that is sparse already: the zeros that it has stay, exactly, and none are added.

        Any optimizer will do, and there is no schedule: `finalize()` may come at any time. To go on after a crash, load
        the model's, the optimizer's and this sparsifier's state. The arguments are those of `Sparsifier`.

        Example:
            >>> model = spartan.prune(torch.nn.Linear(10, 10), sparsity=0.9)
            >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            >>> sparsifier = Sparsifier.from_sparse(model).attach(optimizer)
            >>> model(torch.randn(8, 10)).square().mean().backward()
            >>> optimizer.step()
            >>> int((model.weight != 0).sum())
            10
        """
        globs = [x if x is None or isinstance(x, str) else list(x) for x in (include, exclude)]
        targets = find_targets(model, *globs)
        zeros, whole = sum(zeros_of(targets)), sum(t.numel for t in targets)
        if zeros in (0, whole):
            raise ValueError(
                f"from_sparse(): the model has {'no zeros' if not zeros else 'nothing but zeros'} in {some_names(targets)}; "
                "load the weights of a sparse model first, or train one with Sparsifier(model, sparsity=…, total_steps=…)"
            )
        found = cls(model, zeros / whole, 1, "fixed", include=globs[0], exclude=globs[1], kernels=kernels)
        found.settings |= {"sparsity": None, "total_steps": None}  # it has neither, so that any such state fits
        return found

    # ------------------------------------------------------------------ the optimizer

    def attach(self, *optimizers: Optimizer) -> "Sparsifier":
        """Wrap the step of the optimizer, or optimizers, that train the targets. Returns the sparsifier."""
        check_alive(self, "attach")
        mine = self._attachment
        if mine.optimizers:
            raise RuntimeError("this sparsifier is attached already; detach() it first")
        self._mine = mine.attach(optimizers, partial(step, self))
        first, learned, self._run.optimizers = mine.first, self._run.weights.learned(), mine.optimizers
        if learned:
            options = self.method.learned_options
            beside = self._targets[0].parameter
            check_decay(self.method, add_learned(first, learned, options, beside, mine.scheduled))
        self._run.gradients.paused = False
        sharded = any(is_dtensor(t.parameter) for t in self._run.problem.targets)
        if not sharded and hasattr(first, "register_state_dict_post_hook"):
            self._riding = Riding(first, self.state_dict, self.load_state_dict)
        return self

    def detach(self) -> "Sparsifier":
        """Give the optimizers their own step back. The model keeps the sparse weights it holds."""
        learned = self._run.weights.learned()
        if self._attachment.optimizers and learned:
            remove_learned(self._attachment.first, learned)
        if self._riding is not None:
            self._riding.close()
        self._riding, self._run.gradients.paused = None, True
        self._attachment.detach()
        self._mine, self._run.optimizers = [], []
        return self

    # ------------------------------------------------------------------ the step

    def backward(self) -> None:
        """Turn the gradients for w in `.grad` into gradients for θ, where the end of the backward has not done so.

        Needed only before clipping or logging gradients, and only in a few places (docs/concepts.md); elsewhere it does
        nothing. `optimizer.step()` does it otherwise.
        """
        check_alive(self, "backward")
        self._run.backward()

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
        check_alive(self, "dense_weights")
        run, every = self._run, range(len(self._targets))
        run.check_model()
        self._lent = run.gradients.paused = True
        try:
            with torch.no_grad():
                run.weights.put(every)
            yield
            run.guard.same_tensors()
            run.guard.updates(every, run.at.step)
        except BaseException:
            run.write()
            raise
        else:
            try:
                with torch.no_grad():
                    run.weights.take(every)
                run.solve()
            finally:
                run.write()
        finally:
            self._lent = run.gradients.paused = False

    def finalize(self) -> None:
        """End training: drop θ and leave an ordinary sparse model. `optimizer.step()` raises from then on.

        From here on nothing guards the zeros: a plain optimizer that trains the model further fills them in, by its
        gradients, momentum and weight decay. To train on and keep them, `Sparsifier.from_sparse(model)`.
        """
        finalize(self)

    def ema(self, decay: float) -> Average:
        """An average of θ and of all other parameters, moved after each step; projected when it is used."""
        check_alive(self, "ema")
        self._averages.append(Average(self, decay))
        return self._averages[-1]

    def follow(self, averaged: Any) -> "Sparsifier":
        """Let an averaged model of yours average θ, and hold the average projected: as sparse as the model.

        What it evaluates, saves, or puts into the model at the end is exactly sparse, for the budgets of its last update.
        Its dense weights are saved with the sparsifier's state. Returns the sparsifier.

        Args:
            averaged: torch's `AveragedModel`, timm's `ModelEmaV3`, or the like: a module around a copy of the model, with
                `update_parameters(model)` or `update(model)`; or Lightning's `WeightAveraging` or
                `StochasticWeightAveraging` callback, from `on_fit_start` on.

        Example:
            >>> model = torch.nn.Linear(16, 16)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> averaged = torch.optim.swa_utils.AveragedModel(model)
            >>> sparsifier = Sparsifier(model, sparsity=0.75, total_steps=10).attach(optimizer).follow(averaged)
            >>> for _ in range(10):
            ...     model(torch.randn(8, 16)).square().mean().backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            ...     averaged.update_parameters(model)
            >>> int((averaged.module.weight != 0).sum())
            64
        """
        check_alive(self, "follow")
        self._followers.append(Follower(self, averaged))
        if self._waiting:
            self._followers[-1].load_state_dict(self._waiting.pop(0))
        return self

    # ------------------------------------------------------------------ looking

    @property
    def stats(self) -> Stats:
        """Where the run stands: step, phase, achieved and asked density and cost, β, μ, threshold, passes."""
        if self._final is not None:
            return self._final[0]
        return Stats.of(self._run)

    def progress(self) -> dict[str, Any]:
        """The part of `stats` that costs nothing to read: what is asked for, what is kept, how the mask was solved.

        Densities are fractions of the whole cost here. On an accelerator some of it is still on the device, as tensors.
        """
        return progress_of(self._run)

    def layers(self) -> list[Layer]:
        """Per-layer shape, parameters, kept weights, density and (with a FLOP cost) FLOPs."""
        if self._final is not None:
            return self._final[1]
        return Layer.of(self._run.problem, self._run.kept_units(), self._flops)

    def masks(self) -> dict[str, Tensor]:
        """Bool per weight: what is kept now, by parameter name."""
        if self._final is not None:
            return {t.name: t.parameter.detach() != 0 for t in self._targets}
        return look.masks(self._run.weights, self._run.at)

    def mask_histogram(self, bins: int = 50) -> list[int] | None:
        """How many units have a soft mask value in each of `bins` equal parts of [0, 1]; None for hard masks."""
        check_alive(self, "mask_histogram")
        return look.histogram(self._run.weights, self._run.at, as_plain(bins))

    def __repr__(self) -> str:
        path = look.path(self._run.weights, self._run.at) if self._final is None else self._final[2]
        return describe(self.method, self.settings, self.stats, self.layers(), path, self._notices.coverage)

    # ------------------------------------------------------------------ copying and saving

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied or pickled together with its model and its optimizers, it goes on with the copies."""
        check_alive(self, "copy")
        learned = [part.state.learned | part.state.learned_per_target for part in self._run.weights.parts]
        given = self._attachment.outer, self._attachment.optimizers
        return rebuilt, (type(self), self.model, self._arguments, self.state_dict(), *given, learned)

    def state_dict(self) -> dict[str, Any]:
        """θ by parameter name, the step and all else that a bit-identical resume needs; tensors are not copied."""
        check_alive(self, "state_dict")
        self._run.guard.look(wait=True)
        averages = [follower.state_dict() for follower in self._followers]
        more = {"round": sorted(self._attachment.round)} | ({"averages": averages} if averages else {})
        return plain.pack(self.settings, self._run) | more

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state saved with the same model and settings. Load the model and the optimizer as well."""
        check_alive(self, "load_state_dict")
        run = self._run
        run.guard.same_tensors()
        plain.check(state, self.settings, run)
        plain.restore(state, run)
        self._attachment.round, self._notices.sparse_already = set(state["round"]), None
        run.count()
        run.write()
        averages = list(state.get("averages", ()))
        for follower, average in zip(self._followers, averages, strict=False):
            follower.load_state_dict(average)
        self._waiting = averages[len(self._followers) :]
