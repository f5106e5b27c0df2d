"""Checkpoints: whole or not at all, two kept, damage found and said."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from spartan.app.train.checkpoint import CheckpointError, checkpoints, load_newest, save

CPU = torch.device("cpu")


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((1000,), float(step)), "nested": {"list": [1, 2.5, None, "x"]}}


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step, state(step))
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000010.pt", "step-00000003.pt"]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4  # and their digests
    found = load_newest(tmp_path, CPU)
    assert found is not None
    path, loaded, trouble = found
    assert (path.name, loaded["step"], trouble) == ("step-00000010.pt", 10, [])
    assert torch.equal(loaded["weights"], state(10)["weights"])
    assert loaded["nested"] == state(10)["nested"]


def test_none_yet(tmp_path: Path) -> None:
    assert load_newest(tmp_path, CPU) is None


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "garbage"])
@pytest.mark.parametrize("digest", [True, False])
def test_damage_falls_back_to_the_one_before(tmp_path: Path, damage: str, digest: bool) -> None:
    save(tmp_path, 1, state(1))
    newest = save(tmp_path, 2, state(2))
    data = bytearray(newest.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    truncated = bytes(data[: len(data) // 2])
    damaged = {"truncated": truncated, "flipped": bytes(data), "empty": b"", "garbage": b"x" * 99}
    newest.write_bytes(damaged[damage])
    if not digest:
        if damage == "flipped":
            pytest.skip("without its digest a flipped bit cannot be told from a weight")
        newest.with_suffix(".sha256").unlink()
    found = load_newest(tmp_path, CPU)
    assert found is not None
    path, loaded, trouble = found
    assert (path.name, loaded["step"]) == ("step-00000001.pt", 1)
    assert len(trouble) == 1
    assert "step-00000002.pt" in trouble[0]
    assert newest.exists(), "nothing is deleted"


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1)).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be read: step-00000001.pt .*Nothing was changed"):
        load_newest(tmp_path, CPU)


def test_a_full_disk_leaves_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, state(1))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        CheckpointError, match=r"could not write checkpoint .*No space left.*the last good one is step-00000001.pt"
    ):
        save(tmp_path, 2, state(2))
    monkeypatch.undo()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000001.pt"]
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "owned",))

    path = tmp_path / "checkpoints" / "step-00000001.pt"
    path.parent.mkdir()
    torch.save({"step": 1, "evil": Evil()}, path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_newest(tmp_path, CPU)
    assert not (tmp_path / "owned").exists()
