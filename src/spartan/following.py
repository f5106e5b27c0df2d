"""Has averaged models of others (torch's AveragedModel, timm's, Lightning's) average θ, and hold the average projected.

An average of sparse weights is denser than each of them. So while a followed average is updated, the model holds θ and the
average holds its own dense weights; afterwards these are put aside and it holds w of them. Whoever evaluates, saves or
swaps it sees weights that are exactly sparse. An average of a model that a sparsifier trains, and that nobody has asked it
to follow, refuses to be updated.
"""

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from spartan.averaging import project
from spartan.distributed import like, local, version
from spartan.problem.targets import Target, all_parameters, unwrap
from spartan.solvers.theta import copy_all
from spartan.step import look

if TYPE_CHECKING:
    from spartan.sparsifier import Sparsifier

# What averaged models call their update; the last is timm's way to begin anew.
UPDATES = ("update_parameters", "update", "set")
# Which sparsifier a parameter belongs to.
_OWNERS: Any = WeakIdKeyDictionary()
_AVERAGES: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # averaged models that have been built


def claim(sparsifier: "Sparsifier", targets: Sequence[Target]) -> None:
    """These belong to a sparsifier from now on; averages of them that it does not follow are refused."""
    for target in targets:
        _OWNERS[target.parameter] = weakref.ref(sparsifier)
    for averaged in list(_AVERAGES):
        _stand_in(averaged)


def release(targets: Sequence[Target]) -> None:
    """These belong to nobody any more."""
    for target in targets:
        _OWNERS.pop(target.parameter, None)


def check_free(targets: Sequence[Target]) -> None:
    """Refuse targets that belong to another sparsifier."""
    for target in targets:
        if owner(target.parameter) is not None:
            raise RuntimeError(
                f"{target.name} already belongs to a sparsifier; finalize() that one before building another"
            )


def owner(parameter: Tensor) -> "Sparsifier | None":
    """The sparsifier that a parameter belongs to."""
    found = _OWNERS.get(parameter)
    return None if found is None else found()


def _built(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """torch calls this whenever a module gets another; averaged models keep theirs under the name `module`."""
    if name == "module" and any(hasattr(type(module), update) for update in UPDATES):
        _AVERAGES.add(module)
        if len(_OWNERS):
            _stand_in(module)


register_module_module_registration_hook(_built)


def _stand_in(holder: Any, follower: "Follower | None" = None) -> None:
    """Be called instead of whatever updates an average."""
    for name in UPDATES:
        if hasattr(type(holder), name):
            mine = holder.__dict__.get(name)
            if not isinstance(mine, Update):
                mine = holder.__dict__[name] = Update(holder, name)
            mine.follower = follower or mine.follower


class Update:
    """Stands where an averaged model has `update_parameters`, and the like, and calls that with θ in place."""

    def __init__(self, holder: Any, name: str) -> None:
        self._holder, self._name = holder, name
        self.follower: Follower | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Update the average."""
        holder, follower = self._holder, self.follower
        inner = own_update(holder, self._name)
        sparsifier = _trained_by([x for x in (*args, *kwargs.values()) if isinstance(x, nn.Module)])
        if follower is not None and (sparsifier is None or follower.sparsifier is sparsifier):
            return follower.update(inner, *args, **kwargs)
        if sparsifier is not None and not sparsifier._lent and not sparsifier.method.identity:
            raise RuntimeError(_unfollowed(f"{type(holder).__name__}.{self._name}()"))
        return inner(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Update":
        return Update(memo[id(self._holder)], self._name)  # nobody follows the copy

    def __reduce__(self) -> tuple[Any, ...]:
        return own_update, (self._holder, self._name)  # a pickled average has its own again


def own_update(holder: Any, name: str) -> Any:
    """What an averaged model's class has under a name, bound to it."""
    return inspect.getattr_static(type(holder), name).__get__(holder, type(holder))


def _trained_by(models: Sequence[nn.Module]) -> "Sparsifier | None":
    """The sparsifier that trains one of these models, if any."""
    for model in models if len(_OWNERS) else ():
        for parameter in model.parameters():
            found = owner(parameter)
            if found is not None and not found._attachment.released:
                return found
    return None


def _unfollowed(what: str) -> str:
    return (
        f"{what} would average the sparse weights of a model that a sparsifier trains, and that average is not sparse. "
        "Call sparsifier.follow(…) with it once, before the first step: then it averages the dense weights, and is as "
        "sparse as the model. Or let sparsifier.ema(decay) keep the average."
    )


def check_callbacks(sparsifier: "Sparsifier") -> None:
    """Refuse callbacks of Lightning that average the model, and that nobody has asked the sparsifier to follow."""
    trainer = vars(unwrap(sparsifier.model)).get("_trainer")
    if trainer is None:
        return
    followed = [follower.averaged for follower in sparsifier._followers]
    for callback in getattr(trainer, "callbacks", None) or ():
        averaged = getattr(callback, "_average_model", None)
        if isinstance(averaged, nn.Module) and not any(averaged is x for x in followed):
            raise RuntimeError(_unfollowed(type(callback).__name__))


class Follower:
    """Keeps the dense weights of one average.

    Args:
        sparsifier: who trains the model.
        averaged: what averages it: a module around its copy, or a callback of Lightning's that has one.
    """

    def __init__(self, sparsifier: "Sparsifier", averaged: Any) -> None:
        self.sparsifier, self._run = sparsifier, sparsifier._run
        holder, self.averaged, module = _parts(averaged)
        held = _counterparts(module, unwrap(sparsifier.model))
        if held is None:
            raise ValueError(
                f"follow() got {type(averaged).__name__}, which averages another model than the sparsifier's: their "
                "parameters have other names or shapes"
            )
        targets = self._run.problem.targets
        self._held = [held[target.name] for target in targets]
        self._versions: list[int] | None = None  # when the average was last written; None: whatever it holds is ours
        # A copy that was made since the sparsifier was built has w, and θ is behind it.
        pairs = zip(targets, look.thetas(self._run.weights), self._local, strict=True)
        self._thetas = [
            (theta if torch.equal(t.local, mine.to(t.device)) else mine).to(mine, copy=True) for t, theta, mine in pairs
        ]
        _stand_in(holder, self)
        self._inside = False
        self.write()

    @property
    def _local(self) -> list[Tensor]:
        """What the average holds."""
        return [local(p).detach() for p in self._held]

    @torch.no_grad()
    def update(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what `inner` does, with θ in the model and the average's own in it; then project the average."""
        run, mine = self._run, self.sparsifier
        if self._inside or mine._lent or mine.method.identity or mine._attachment.released:
            return inner(*args, **kwargs)
        if mine._final is not None:
            raise RuntimeError("an average is updated after finalize(): the dense weights are gone")
        run.check_model()
        self._look_for_changes()
        try:
            self._inside = True
            copy_all(self._local, self._thetas)
            run.weights.put(range(len(self._held)))
            result = inner(*args, **kwargs)
            self._thetas = [x.clone() for x in self._local]
            return result
        finally:
            self._inside = False
            run.write(anew=False)
            self.write()

    @torch.no_grad()
    def write(self) -> None:
        """Put w of the averaged θ into the average, for the budgets of this moment."""
        if not self.sparsifier.method.identity:
            copy_all(self._local, project(self._run, self._thetas))
        self._versions = [version(p) for p in self._held]

    def _look_for_changes(self) -> None:
        """What somebody has put into the average since is its θ."""
        versions = [version(p) for p in self._held]
        if self._versions is None or versions == self._versions:
            return
        written = project(self._run, self._thetas)
        for theta, w, now in zip(self._thetas, written, self._local, strict=True):
            if not torch.equal(w.to(now.device), now):
                theta.copy_(now)

    @torch.no_grad()
    def moved_in(self) -> bool:
        """Whether the model holds the average: somebody has put it there, to keep it."""
        pairs = zip(self._run.problem.targets, self._local, strict=True)
        same = all(torch.equal(target.local, mine.to(target.device)) for target, mine in pairs)
        return self._run.guard.agree(None if same else 0) is None

    @torch.no_grad()
    def become(self) -> None:
        """Let the averaged θ be the run's."""
        every = range(len(self._held))
        copy_all([target.local for target in self._run.problem.targets], self._thetas)
        self._run.weights.take(every)
        self._run.solve()
        self._run.write()

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged θ by name; tensors are not copied."""
        pairs = zip(self._run.problem.targets, self._thetas, strict=True)
        return {target.name: like(target.parameter, theta) for target, theta in pairs}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from an averaged θ; what is loaded into the average before or after agrees with it."""
        for target, theta in zip(self._run.problem.targets, self._thetas, strict=True):
            theta.copy_(local(state[target.name]))
        self.write()
        self._versions = None


def _parts(averaged: Any) -> tuple[Any, nn.Module, nn.Module]:
    """Who is told to update, what it is known by, and the copy of the model that it averages into."""
    callback = hasattr(averaged, "_average_model")  # of Lightning's
    known: Any = averaged._average_model if callback else averaged
    inside = [getattr(known, name, None) for name in ("module", "ema")]
    module = next((x for x in inside if isinstance(x, nn.Module)), known if callback else None)
    holder = averaged if module is known else known
    if not isinstance(module, nn.Module) or not any(hasattr(type(holder), name) for name in UPDATES):
        later = " It makes its average when fitting begins: call follow() in on_fit_start." if callback else ""
        raise ValueError(
            f"follow() got {type(averaged).__name__}; an averaged model is needed that has a copy of the model in `module` "
            "and is updated by update_parameters(model) or update(model), as torch's AveragedModel and timm's ModelEmaV3 "
            f"are, or Lightning's callback that averages weights.{later} sparsifier.ema(decay) is an average of its own."
        )
    return holder, known, module


def _counterparts(module: nn.Module, model: nn.Module) -> dict[str, nn.Parameter] | None:
    """The parameters by name of that part of a module which is a copy of the model."""
    wanted = {target.name: target.shape for target in all_parameters(model)}
    for part in _inwards(module):
        found = {target.name: target.parameter for target in all_parameters(part)}
        if {name: tuple(p.shape) for name, p in found.items()} == wanted:
            return found
    return None


def _inwards(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those inside it, of which the model may be one: Lightning's module around it."""
    yield module
    yield from (part for part in module.modules() if part is not module and any(part.children()))
