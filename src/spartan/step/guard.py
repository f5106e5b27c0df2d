"""Looks for mistakes: a model changed behind the run's back, gradients and weights that are not finite, unsolved masks."""

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from spartan.distributed import alike, fsdp_modules, is_dtensor, version
from spartan.problem.targets import current, some_names
from spartan.solvers.base import FINE
from spartan.solvers.theta import copy_all
from spartan.step.gradients import of_part
from spartan.step.weights import Weights, watched_parts

OFTEN = 16  # steps between two looks at the flags of an accelerator: to fetch them takes the host as long as a launch or two
_version_of = operator.attrgetter("_version")
FAR = 1e-3  # a mask this far from its budget, as a fraction of it, deserves a word; 1e-6 is the rule


class Guard:
    """Watches over a model while a run works on it.

    On an accelerator nothing waits for an answer: a flag on the device keeps θ as it is, and the error comes with a
    later step, once the flag has arrived.

    Args:
        weights: θ of the run.
        model: the model.
    """

    def __init__(self, weights: Weights, model: nn.Module) -> None:
        self.weights, self.targets, self.ranks = weights, weights.problem.targets, weights.problem.ranks
        self._parameters = [target.parameter for target in self.targets]
        # Where modules hold them, and under which names.
        self._slots = [t.owner._parameters for t in self.targets], [t.attribute for t in self.targets]
        self.whole = not any(map(is_dtensor, self._parameters))
        self._fsdp = [] if self.whole else fsdp_modules(model)
        self._versions: list[int] = []
        self.perturbed: Callable[[], bool] = lambda: False  # whether weights are moved for a while, and put back
        # Whether answers are waited for: on a CPU, and where processes must agree on them.
        self._waits = weights.bad.device.type == "cpu" or not self.ranks.alone
        on_device = weights.bad.device.type == "cuda"
        # Where the flags and the residuals arrive.
        self._watched = weights.watched.cpu().pin_memory() if on_device else weights.watched
        self._seen = watched_parts(self._watched)
        self._event = torch.cuda.Event() if on_device else None
        self._under_way = False  # whether they are on their way
        self._where: list[int] | None = None  # where parameters lay when they were last found to be the same
        self._step = 0
        self._warned = False
        self._sums: Tensor | None = None  # of what was written, now and then

    def same_tensors(self) -> None:
        """The model must hold the parameters that the run was built for."""
        # With `map` all of this is C: it runs twice in every step.
        held = list(map(dict.get, *self._slots))
        where = list(map(Tensor.data_ptr, self._parameters)) if self.whole else None
        same = all(map(operator.is_, held, self._parameters))
        if same and where is not None and where == self._where:
            return
        if not same:
            self.reshard()
        for target, here in zip(self.targets, held, strict=True):
            now = here if here is target.parameter else current(target)
            if now is not target.parameter or now.device != target.device or now.dtype != target.dtype:
                raise RuntimeError(
                    f"{target.name} was moved, cast or replaced after the sparsifier was built (it is {now.dtype} on "
                    f"{now.device}, the dense weights are {target.dtype} on {target.device}). Build the sparsifier after "
                    "model.to(...); to continue a run, load sparsifier.state_dict() into the new one."
                )
        self._where = where

    def reshard(self) -> None:
        """Let FSDP2 drop whole weights that a forward pass has left: shards are what is trained and written."""
        for module in self._fsdp:
            module.reshard()

    def written(self, anew: bool = True) -> None:
        """The model holds what it should; not `anew` where it is the same as before."""
        self._versions = _versions_of(self._parameters, self.whole)
        self._sums = None if anew else self._sums

    def same_versions(self) -> bool:
        """Whether nobody has written to the model's parameters, as far as torch knows."""
        return _versions_of(self._parameters, self.whole) == self._versions

    def _checksums(self) -> Tensor:
        """A number per target that changes with its values."""
        here = [target.local for target in self.targets]
        norms = torch._foreach_norm(here, 1)
        alike = len({x.dtype for x in norms}) == 1
        return torch.stack(norms if alike else [x.double() for x in norms])

    @torch.no_grad()
    def remember(self) -> None:
        """Remember what is written, to compare before the next step: writes through `.data` leave no trace in versions."""
        self._sums = self._checksums()

    def compare(self) -> None:
        """Flag the first target that is not as it was written, if that was remembered."""
        sums = self._sums
        if sums is None or self.perturbed():
            return
        numbers = torch.arange(len(self.targets), dtype=torch.int32, device=sums.device)
        changed = torch.where(self._checksums() == sums, FINE, numbers).min()
        self.weights.bad[2] = torch.minimum(self.weights.bad[2], changed)
        self._sums = None

    def untouched(self, write: Callable[[], None], look: bool = False) -> None:
        """The model must hold what was written into it; `write` does that again, if somebody has to look.

        Writes through `.data` leave no trace in versions: with `look` the values are compared in any case.
        """
        self.same_tensors()
        same = not look and self.same_versions()
        if not (same or self.weights.method.identity or self.perturbed()):
            self._look_at_values(write)

    @torch.no_grad()
    def _look_at_values(self, write: Callable[[], None]) -> None:
        # Swapping an average in and out again bumps versions too, so look at the values before complaining: written once
        # more, by the same solver, they are the same to the bit.
        held = [target.local.clone() for target in self.targets]
        write()
        pairs = enumerate(zip(self.targets, held, strict=True))
        bad = self.agree(next((i for i, (target, w) in pairs if not torch.equal(target.local, w)), None))
        if bad is not None:
            copy_all([target.local for target in self.targets], held)
            raise RuntimeError(
                f"{self.targets[bad].name} was changed outside the optimizer step. After model.load_state_dict(), also call "
                "sparsifier.load_state_dict() with the state saved beside it; to set weights by hand, or to put an average "
                "of them in, do so inside `with sparsifier.dense_weights():` (sparsifier.ema() and sparsifier.follow() keep "
                "averages that are sparse); to train, attach() the optimizer that does."
            )
        self.written()

    def check_join(self, ddp: DistributedDataParallel) -> None:
        """Refuse DDP's `join` where some processes go on when another has run out of data, whose θ then falls behind."""
        join = ddp._join_config
        if (
            join is not None
            and join.enable
            and not join.throw_on_early_termination
            and not self.weights.method.identity
        ):
            raise RuntimeError(
                "DDP's join lets the other processes go on when one has run out of data: its dense weights and its "
                "optimizer's state then fall behind. Give every process as many batches, as DistributedSampler does, or "
                "end all of them together with join(throw_on_early_termination=True)."
            )

    def gradients(self, which: Sequence[int], grads: Sequence[Tensor | None], step: int, optimizer: Optimizer) -> None:
        """No NaN or infinite gradient may reach θ, unless a loss scaler is there to skip the update.

        Given are those of all targets; `which` of them the optimizer trains.
        """
        if getattr(optimizer, "found_inf", None) is not None:
            return
        if not self._waits:
            for part, mine in zip(self.weights.parts, self.weights.local(which), strict=True):
                if mine:
                    own = of_part(grads, part.problem.numbers, self.whole)
                    if len(mine) < len(own):
                        some = set(mine)
                        own = [grad if i in some else None for i, grad in enumerate(own)]
                    part.check_gradients(own)
            return
        bad = self.agree(_first_non_finite((i, self.targets[i].local_grad) for i in which))
        if bad is not None:
            raise RuntimeError(
                f"the gradient of {self.targets[bad].name} holds NaN or infinite values at step {step}; nothing "
                "was updated. Lower the learning rate, clip gradients, or use a GradScaler with float16."
            )

    def updates(self, which: Sequence[int], step: int) -> None:
        """No NaN or infinite θ may be taken from the model."""
        if not self._waits:
            for part, mine in zip(self.weights.parts, self.weights.local(which), strict=True):
                part.check_weights(mine)
            return
        bad = self.agree(_first_non_finite((i, self.targets[i].local) for i in which))
        if bad is not None:
            raise RuntimeError(
                f"{self.targets[bad].name} would hold NaN or infinite weights after step {step}; the update was "
                "taken back. The learning rate is probably too high."
            )

    def agree(self, bad: int | None) -> int | None:
        """The first bad target of any process: all of them must raise, or the others would wait for one that has."""
        if self.ranks.alone:
            return bad
        number = torch.tensor(FINE if bad is None else bad, dtype=torch.int32, device=self.weights.bad.device)
        first = int(self.ranks.smallest(number))
        return None if first == FINE else first

    def send(self, step: int) -> None:
        """Start fetching the flags, every few steps; nothing waits for them."""
        self._step = step
        if self._event is None or self._under_way or step % OFTEN or torch.cuda.is_current_stream_capturing():
            return
        self._watched.copy_(self.weights.watched, non_blocking=True)
        self._event.record()
        self._under_way = True

    def look(self, wait: bool = False) -> None:
        """Raise what the flags say, if they have arrived."""
        if wait:
            self._watched.copy_(self.weights.watched)
        elif self._event is not None and not (self._under_way and self._event.query()):
            return
        self._under_way = False
        self._look_at_residuals()
        gradient, weight, changed = self._seen[0].tolist()
        if gradient == weight == changed == FINE:
            return
        self.weights.bad.fill_(FINE)
        self._seen[0].fill_(FINE)
        if gradient != FINE:
            raise RuntimeError(
                f"the gradient of {self.targets[gradient].name} held NaN or infinite values, at step {self._step} or "
                "shortly before; since then nothing was updated. Lower the learning rate, clip gradients, or use a "
                "GradScaler with float16."
            )
        if changed != FINE:
            raise RuntimeError(
                f"{self.targets[changed].name} was changed outside the optimizer step, at step {self._step} or shortly "
                "before, probably through `.data`, and the change was lost. Set or clamp weights, or put an average of "
                "them in, inside `with sparsifier.dense_weights():`."
            )
        raise RuntimeError(
            f"{self.targets[weight].name} would have held NaN or infinite weights, at step {self._step} or shortly before; "
            "those were not taken. The learning rate is probably too high: go back to a checkpoint."
        )

    def _look_at_residuals(self) -> None:
        """Warn, once, of a mask that misses its budget."""
        if self._warned:
            return
        worst, row = max((abs(numbers[1]), i) for i, numbers in enumerate(self._seen[1].tolist()))
        if worst > FAR:
            self._warned = True
            names = some_names(self.weights.targets_of_row(row))
            warnings.warn(
                f"the soft mask of {names} was {worst:.2%} off its budget at step {self._step} or shortly before (the hard "
                "one is exact all the same); β is probably too large for these weights' precision",
                RuntimeWarning,
                stacklevel=3,
            )


def _versions_of(parameters: Sequence[Tensor], whole: bool) -> list[int]:
    """How often torch has seen each of them written to; `whole` where none is in shards, which is C."""
    return list(map(_version_of, parameters)) if whole else [version(p) for p in parameters]


def check_copies(ddp: DistributedDataParallel | None, thetas: Sequence[Tensor]) -> None:
    """Refuse a DDP that was put around the model later, and gave it the first process's weights, but not its θ."""
    if ddp is None:
        return
    mine = [float(torch.linalg.vector_norm(theta.double())) for theta in thetas]
    if not alike(mine, ddp.process_group):
        raise RuntimeError(
            "DDP was put around the model after the sparsifier was built, and the processes had begun with other weights: "
            "it copies those of the first to all, but not the dense weights behind them. Build the sparsifier after DDP "
            "(with accelerate, after prepare()), or the models with the same seed."
        )


def _first_non_finite(tensors: Iterable[tuple[int, Tensor | None]]) -> int | None:
    """Index of the first tensor with a NaN or infinite entry, with one look at the device for all of them."""
    there = [(i, t.detach()) for i, t in tensors if t is not None and t.numel()]
    if not there:
        return None
    # The sum of one that is not, is not: on a CPU that is faster; on an accelerator it is a launch for each.
    if there[0][1].device.type == "cpu" and torch.isfinite(torch.stack([t.sum().float() for _, t in there])).all():
        return None
    largest = torch.stack([n.float() for n in torch._foreach_norm([t for _, t in there], math.inf)])
    finite = torch.isfinite(largest).tolist()
    return None if all(finite) else there[finite.index(False)][0]
