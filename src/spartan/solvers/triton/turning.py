"""Turns gradients of single weights as forms say, by kernels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from spartan.problem.problem import Problem
from spartan.solvers.base import Flags, Grads
from spartan.solvers.forms import KEPT, VJP, Form, Mask, Shifted, Stored, Where
from spartan.solvers.triton import gradient, powers, ratios, weights
from spartan.solvers.triton.reading import FormReader, Reading
from spartan.solvers.triton.tables import Addresses, Numbers

Launch = Callable[[], None]
NOTHING: AbstractContextManager[None] = nullcontext()


class KernelGradients(FormReader):
    """Launches the kernels that turn gradients, in place. What they cannot do, plain torch does."""

    def __init__(self, problem: Problem, flags: Flags, alias: bool = False) -> None:
        super().__init__(problem, flags, alias)
        self._to_learned = Addresses(self.device, replay=self.kernels.replay)
        self._b_there = torch.empty(0), torch.empty(0)  # the thresholds of B, where kernels read them

    def prepare(self) -> None:
        """Tables of what competes, and what gradients need."""
        super().prepare()
        self.prepare_gradients()

    def prepare_gradients(self) -> None:
        """Room for the factors that forms give, and for thresholds."""
        n = len(self.problem.segments)
        self._factors_there, self._decay_there, self.pace_there = (Numbers(n, self.device) for _ in range(3))
        # What masks are shrunk by, and what of each piece is just below its threshold.
        self._taus = torch.zeros(n, dtype=torch.float64, device=self.device)
        self._found = torch.zeros(self.ranked.count, dtype=torch.float32, device=self.device)
        self._on_shifts = ShiftGradient(self.ranked.tensors, len(self.problem.targets), self.device)

    def turn(self, form: Form | None, grads: Grads) -> Grads:
        """Gradients for w into gradients for θ, in place."""
        assert form is not None
        straight = isinstance(form.back, Where) and form.back.everywhere and form.learned is None
        if straight and form.damp is None and self.power == 1.0 and form.own is None:
            return grads
        x, shifted = self.kernels, form.mask.name if isinstance(form.mask, Shifted) else None
        learning = NOTHING if shifted is None else self._on_shifts.given_to(self.state.learned_per_target[shifted])
        if x.alike(grads) and (last := x.before.of("turn", form, x.to_grads, grads, self.sources(form))):
            with learning:
                x.replay(*last)
            return grads
        turned = x.laid_out(self.with_missing(form, grads))
        if all(g is None for g in turned):
            return turned
        if not self.turns(form):
            return super().turn(form, turned)
        if shifted is not None:
            with learning:
                self.through_shift(shifted, form, turned)
        elif form.back is VJP.THROUGH:
            self.through_mask(form, turned)
        else:
            with x.replay.as_one():
                self.teach(form, turned)
                if isinstance(form.back, Where) and form.back.everywhere and form.damp is None:
                    self._times_slope(turned)
                else:
                    self.where(form, turned)
        return turned

    def through_mask(self, form: Form, grads: Grads) -> None:
        """Through the mask, in place: the slope of a soft one goes to what ranks."""
        x, p, reading = self.kernels, self.ranked, self.reading(form)
        assert reading is not None
        kinds, to_grads = self._kinds(grads), x.to_grads.of(grads)
        if isinstance(form.mask, Stored):
            masked = to_grads, reading.masks, x.pieces.table
            x.replay(("times", kinds["GRAD"]), lambda: x.run(gradient.times_mask, *masked, GRAD=kinds["GRAD"]))
            self._times_slope(grads)
            return
        thetas, floats, out = x.to_thetas.of(self._theta.views), reading.states.floats, self.flags.residuals
        tables = to_grads, thetas, p.table, p.segments, p.factors
        learned, add = (None, False) if form.learned is None else self._to_learn(form.learned)

        def launch_pull() -> None:
            x.run(gradient.pull, *tables[:2], reading.ranks, *tables[2:], floats, self._sums, pieces=p, **kinds)

        def launch_turn() -> None:
            if learned is None:
                x.run(gradient.through_mask, *tables, p.costs, floats, out, pieces=p, **kinds)
            else:
                both = *tables[:2], reading.ranks, learned, p.table, p.segments, p.costs, floats, out
                x.run(gradient.through_learned, *both, pieces=p, ADD=add, **kinds)

        key = "through_mask", form.learned, add, *plain(kinds)
        self.pull_back(form, key, launch_pull, launch_turn, to_grads, floats)
        if learned is not None:
            self._times_slope(grads)

    def pull_back(self, form: Form, key: Any, pull: Launch, turn: Launch, to_grads: Tensor, floats: Tensor) -> None:
        """Launch what sums pulls over pieces, then a₁/a₂ of every segment from these, then what reads it."""
        p, out = self.ranked, self.flags.residuals

        def launch_all() -> None:
            pull()
            ratios.ratios[(len(p.limits),)](to_grads, p.limits, self._sums, p.costs, floats, out, ROWS=512, num_warps=8)
            turn()

        self.replay_turn(form, key, launch_all)

    def replay_turn(self, form: Form, key: Any, launch: Launch) -> None:
        """Launch what turns gradients, and is all that does."""
        x = self.kernels
        x.replay(key, launch)
        x.before.note("turn", form, x.to_grads, self.sources(form), key, launch)

    def cuts_here(self, cuts: Tensor) -> Tensor:
        """Positions in segments as those that kernels know: all units are here."""
        return cuts

    def through_shift(self, name: str, form: Form, grads: Grads) -> None:
        """g where kept, in place; and the sum over each target for what shifts its ranks."""
        x, p, reading = self.kernels, self.ranked, self.reading(form)
        assert reading is not None
        states, kinds = reading.states, self._kinds(grads)
        tables = x.to_grads.of(grads), x.to_thetas.of(self._theta.views), reading.ranks, self._taus, p.table, p.segments
        rest = p.factors, states.floats, states.ints, self._sums
        shifts = self.state.learned_per_target[name]
        learn = self._on_shifts.launch(shifts, self._sums)
        key, launch, _ = self.where_launch(form, KEPT, grads, self._factors_there)

        def launch_all() -> None:
            x.run(gradient.pull_on_shift, *tables, *rest, pieces=p, **kinds)
            learn()
            launch()

        self.replay_turn(form, ("on shift", shifts.data_ptr(), *key), launch_all)

    def where(self, form: Form, grads: Grads) -> None:
        """Factors on A, on B∖A and on the rest, in place."""
        x, reading = self.kernels, self.reading(form)
        assert reading is not None
        assert isinstance(form.back, Where)
        if reading.kind is weights.STORED and form.back == KEPT and self.problem.pattern.single and self.power == 1.0:
            kind, tables = x.kinds(grads)["GRAD"], (x.to_grads.of(grads), reading.masks, x.pieces.table)
            self.replay_turn(form, ("where stored", kind), lambda: x.run(gradient.where_stored, *tables, GRAD=kind))
            return
        key, launch, same = self.where_launch(form, form.back, grads, self._factors_there)
        if same:
            self.replay_turn(form, key, launch)
        else:
            x.replay(key, launch)

    def _times_slope(self, grads: Grads) -> None:
        """Gradients for ψ into gradients for θ, in place."""
        if self.power != 1.0:
            x, kinds = self.kernels, self._kinds(grads)
            tables = x.to_grads.of(grads), x.to_thetas.of(self._theta.views), x.pieces.table
            x.replay(("slope", *kinds.values()), lambda: x.run(powers.times_slope, *tables, **kinds))

    def add_decay(self, form: Form, grads: Grads, scale: Tensor | None = None) -> None:
        """Add to gradients for θ what the form adds whatever the loss."""
        assert form.decay is not None
        if self.reading(form) is None or not self.kernels.alike(grads):
            super().add_decay(form, grads, scale)
            return
        key, launch, _ = self.where_launch(form, form.decay, grads, self._decay_there, gradient.DECAY, scale)
        if scale is None:
            self.kernels.replay(key, launch)
        else:  # its address may change
            launch()

    def where_launch(
        self,
        form: Form,
        by: Where,
        grads: Grads,
        there: Numbers,
        do: Any = gradient.TIMES,
        scale: Tensor | None = None,
    ) -> tuple[Any, Launch, bool]:
        """What launches `where`, its name, and whether nothing need be told before it is launched again."""
        reading, more, more_masks = self.reading(form), weights.EVERYTHING, None
        assert reading is not None
        if by.divides_the_rest and form.more is not None:
            more, more_masks = weights.STORED, self.stored_more(self.state.per_unit[form.more])
        elif by.divides_the_rest and self.b is not None:
            more = weights.ABOVE
            self.place_b()
        firsts = self.constant([segment.targets[0] for segment in self.problem.segments])
        numbers = there.of_each((by.a, by.b, by.c), firsts)
        kinds = {"KEPT": reading.kind, "MORE": more, "DO": do, **self._kinds(grads)}
        to = self.kernels.to_parameters if do is gradient.PACE else self.kernels.to_grads
        launch = self.launch_where(to, grads, reading, (more_masks, numbers, scale), kinds)
        same = more is weights.EVERYTHING and self.problem.pattern.rows is None
        return ("where", form.learned, *plain(kinds)), launch, same

    def place_b(self) -> None:
        """Put the thresholds of B where kernels read them."""
        if len(self._b_there[0]) != len(self.b.value):
            self._b_there = torch.empty_like(self.b.value), torch.empty_like(self.b.cut)
        self._b_there[0].copy_(self.b.value)
        self._b_there[1].copy_(self.cuts_here(self.b.cut))

    def launch_where(
        self, to: Addresses, grads: Grads, reading: Reading, rest: tuple[Tensor | None, ...], kinds: dict[str, Any]
    ) -> Callable[[], None]:
        """What launches `where`; `rest` is where B is stored, the factors, and the scale of what decays."""
        x, p, states = self.kernels, self.ranked, reading.states
        sources = x.to_thetas.of(self._theta.views), reading.ranks, reading.masks, *rest
        tables = to.of(grads), *sources, p.table, p.segments, p.factors, states.floats, states.ints
        return lambda: x.run(gradient.where, *tables, *self._b_there, pieces=p, **kinds)

    def teach(self, form: Form, grads: Grads) -> None:
        """The gradient of learned ranks, into their `.grad`: g·θ, where masks are stored."""
        if form.learned is None or form.mask is Mask.ONE:
            return
        if not isinstance(form.mask, Stored) or not self.problem.pattern.single:
            super().teach(form, grads)
            return
        learned, add = self._to_learn(form.learned)
        x, kinds = self.kernels, {**self._kinds(grads), "ADD": add}
        tables = x.to_grads.of(grads), x.to_thetas.of(self._theta.views), learned, x.pieces.table
        x.replay(("teach", *kinds.values()), lambda: x.run(gradient.teach, *tables, **kinds))

    def _to_learn(self, name: str) -> tuple[Tensor, bool]:
        """Where the gradient of learned ranks lies, and whether there is one to add to."""
        parameter = self.state.learned[name]
        add = parameter.grad is not None
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        return self._to_learned.along(parameter.grad, self.starts), add

    def _kinds(self, grads: Grads) -> dict[str, Any]:
        """The power of θ that methods see, and the types of gradients and θ."""
        return {"POWER": self.power, **self.kernels.kinds(grads)}


class ShiftGradient:
    """The gradient of what shifts the ranks of each target: made in one place, so that launches are replayed.

    Args:
        owners: the target of each piece that kernels sum over.
        targets: how many there are.
        device: where they lie.
    """

    def __init__(self, owners: Sequence[int], targets: int, device: torch.device) -> None:
        self.found = torch.zeros(targets, dtype=torch.float32, device=device)
        stretches = [(0, 0)] * targets  # from where to where the pieces of each target are
        for piece, i in enumerate(owners):
            stretches[i] = stretches[i][0] if stretches[i][1] else piece, piece + 1
        self.stretches = torch.tensor(stretches, dtype=torch.int64).to(device)

    def launch(self, shifts: Tensor, sums: Tensor) -> Launch:
        """What makes it from sums over pieces."""
        tables = sums, self.stretches, shifts.detach(), self.found
        return lambda: gradient.learn_shift[(len(shifts),)](*tables, ROWS=512, num_warps=4)

    @contextmanager
    def given_to(self, parameter: Tensor) -> Iterator[None]:
        """Inside it is made; then it is the parameter's gradient, or added to that."""
        if parameter.grad is self.found:
            parameter.grad = parameter.grad.clone()  # the last one, to which more is to be added
        yield
        if parameter.grad is None:
            parameter.grad = self.found
        else:
            parameter.grad.add_(self.found)


def plain(kinds: Mapping[str, Any]) -> tuple[Any, ...]:
    """Kinds of launches as what tells them apart, and takes no time to be looked up: Triton's types are named."""
    return tuple(getattr(kind, "value", getattr(kind, "name", kind)) for kind in kinds.values())
