from __future__ import annotations

import pytest
import torch

from spartan.solvers.triton import mailbox
from spartan.solvers.triton.mailbox import Mailbox
from tests.solvers.triton import DEVICE


@pytest.fixture(params=[4, 64])
def slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A short ring, so that it goes around."""
    monkeypatch.setattr(mailbox, "SLOTS", request.param)
    return int(request.param)


@pytest.mark.parametrize(("segments", "columns", "wide"), [(1, 5, 18), (3, 5, 18), (60, 5, 7), (1, 1, 1)])
def test_every_message_arrives_in_its_turn(slots: int, segments: int, columns: int, wide: int) -> None:
    rows = torch.full((segments, wide), -1.0, dtype=torch.float64, device=DEVICE)
    box, seen, wanted = Mailbox(rows, columns), [], []
    for i in range(3 * slots + 1):
        message = [[1000.0 * i + 10 * s + c + 0.1 for c in range(columns)] for s in range(segments)]
        box.send(message)
        box.fetch()
        seen.append(rows.clone())
        wanted.append(message)
    for there, message in zip(seen, wanted, strict=True):
        assert there[:, :columns].tolist() == message
        assert (there[:, columns:] == -1.0).all()


def test_a_host_that_runs_ahead_overwrites_nothing(slots: int) -> None:
    rows = torch.zeros(2, 5, dtype=torch.float64, device=DEVICE)
    box = Mailbox(rows, 5)
    seen = torch.zeros(slots // 2, dtype=torch.float64, device=DEVICE)
    if DEVICE.type == "cuda":
        torch.cuda._sleep(100_000_000)  # the device has read nothing when the host has sent all of them
    for i in range(slots // 2):
        box.send([[float(i)] * 5] * 2)
        box.fetch()
        seen[i] = rows[1, 4]
    assert seen.tolist() == list(range(slots // 2))
