"""Lets a sparsifier's state ride in the optimizer's: a loop that saves model and optimizer resumes bit for bit.

`optimizer.state_dict()` gains `param_groups[0]["spartan"]`, and `optimizer.load_state_dict()` takes it out and has it
applied once torch has accepted the rest. Loaded before `attach()`, it waits in the group, where torch keeps keys that it
does not know. (Per-parameter state would break the lazy start of Adam and be cast; a key beside `param_groups` is dropped
or refused by torch.distributed.checkpoint.)
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from spartan.step.wrap import MARK


def taken_out(state: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """An optimizer's state without the sparsifier's, and that one; None where it holds none. For who saves both apart."""
    first, *others = state["param_groups"]
    plain = {key: value for key, value in first.items() if key != MARK}
    return {**state, "param_groups": [plain, *others]}, first.get(MARK)


class Riding:
    """The hooks of one optimizer.

    Args:
        optimizer: who carries the state.
        get: gives it.
        put: goes on from it.
    """

    def __init__(self, optimizer: Optimizer, get: Callable[[], Any], put: Callable[[Mapping[str, Any]], None]) -> None:
        self._get, self._put = get, put
        self._pending: Any = None
        self._handles = [
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._take),
            optimizer.register_load_state_dict_post_hook(self._apply),
        ]
        waiting = optimizer.param_groups[0].get(MARK)
        optimizer.param_groups[0][MARK] = True
        if isinstance(waiting, Mapping):  # loaded before attach()
            put(waiting)

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return self._with_first_group(state, self._get())

    def _take(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        self._pending = state["param_groups"][0].get(MARK) if state["param_groups"] else None
        return self._with_first_group(state, True)

    def _apply(self, optimizer: Optimizer) -> None:
        pending, self._pending = self._pending, None
        if isinstance(pending, Mapping):
            self._put(pending)

    def _with_first_group(self, state: dict[str, Any], ours: Any) -> dict[str, Any]:
        """The state with this under our key in its first group; torch's own dict stays as it is."""
        first, *others = state["param_groups"]
        return {**state, "param_groups": [first | {MARK: ours}, *others]}
