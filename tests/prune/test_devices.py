"""Where blocks are while a model is pruned on another device: one at a time there, and all at home in the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import spartan
from spartan.prune.devices import Mover
from tests.prune.test_criteria import inputs, seeded
from tests.prune.test_stages import TwoChains


class Ledger(Mover):
    """Writes down which modules are on the device; there is only one here, so that nothing really moves."""

    away: set[int]
    most: int

    def __init__(self, model: nn.Module, device: Any) -> None:
        super().__init__(model, None)
        self.moves, Ledger.away, Ledger.most = True, set(), 0

    def _move(self, modules: list[nn.Module], device: torch.device) -> None:
        super()._move(modules, device)
        change = {id(module) for module in modules}
        Ledger.away ^= change
        Ledger.most = max(Ledger.most, len(Ledger.away))


@contextmanager
def watched(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, a module that runs while it is not on the device fails."""

    def check(module: nn.Module, _: Any) -> None:
        assert id(module) in Ledger.away, f"{type(module).__name__} runs where it is not"

    hooks = [module.register_forward_pre_hook(check) for module in model.modules() if isinstance(module, nn.Linear)]
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["spartan.prune"], "Mover", Ledger)
        yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("criterion", ["wanda", "sparsegpt"])
def test_one_block_at_a_time(criterion: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seeded(TwoChains()), inputs(30, 6)
    expected = spartan.prune(seeded(TwoChains()), 0.5, criterion=criterion, calibration=[x[:10], x[10:]])
    with watched(model, monkeypatch):
        spartan.prune(model, 0.5, criterion=criterion, calibration=[x[:10], x[10:]], device="cpu")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    rest = len(list(model.modules())) - 5 * 3  # five blocks of three modules
    assert Ledger.most == rest + 3
    assert Ledger.away == set()


def test_everything_is_at_home_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seeded(TwoChains()), inputs(30, 6)
    with watched(model, monkeypatch), pytest.raises(ValueError, match="cannot be run on batch 1"):
        spartan.prune(model, 0.5, criterion="wanda", calibration=[x, x[:, :3]], device="cpu")
    assert Ledger.away == set()


class Interrupted(Ledger):
    """Ctrl-C while a block is on its way home: its first module is there, the others are not."""

    homeward: int

    def __init__(self, model: nn.Module, device: Any) -> None:
        super().__init__(model, device)
        Interrupted.homeward = 0

    def _move(self, modules: list[nn.Module], device: torch.device) -> None:
        blocks = [module for module in modules if id(module) in Ledger.away]
        if len(modules) == 3 and blocks:
            Interrupted.homeward += 1
            if Interrupted.homeward == 7:  # five while it is explored
                Ledger.away.discard(id(modules[0]))
                raise KeyboardInterrupt
        super()._move(blocks or modules, device)


def test_everything_is_at_home_after_an_interrupt_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seeded(TwoChains()), inputs(30, 6)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    monkeypatch.setattr(sys.modules["spartan.prune"], "Mover", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        spartan.prune(model, 0.5, criterion="wanda", calibration=[x], device="cpu")
    assert Interrupted.homeward == 8
    assert Ledger.away == set()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_model_on_several_devices_is_not_moved() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with pytest.raises(
        ValueError, match=r"device='cpu': the model lies on several devices \(cpu, meta\); leave device out"
    ):
        Mover(model, "cpu")
    assert Mover(model, None).device == torch.device("cpu")
