"""What `spartan inspect` prints is what the file holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import spartan
from spartan import Block
from spartan.files import inspect, load, save
from spartan.zoo import digits_cnn
from tests.files.forging import forge, header_of
from tests.inference.models import Everything


def test_every_number_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    model = spartan.prune(nn.Linear(256, 256, bias=False), 0.75, pattern=Block(16, 16))
    size = save(model, path)
    text = inspect(path)
    assert f"{size:,} bytes, format version 1, checksum good" in text
    assert "pattern       Block(h=16, w=16)" in text
    assert "sparsity      75.0000%" in text
    assert "262,144 bytes, " in text
    row = text.splitlines()[-1].split()
    assert row[:3] == ["weight", "256×256", "float32"]
    assert "25.000%" in row
    assert "16x16" in row
    # 64 of 256 blocks of 1,024 bytes, and 256·H(1/4) bits
    assert row[-2] == "65,562"


def test_every_kind_of_tensor_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save(Everything(), path)
    text = inspect(path)
    codes = {row.split()[0]: row for row in text.splitlines() if row}
    assert "tied is gaps" in codes["tied"]
    assert " gaps " in codes["gaps"]
    assert " mask " in codes["mask"]
    assert "8x8" in codes["block"]
    assert "nm 2:4" in codes["nm"]
    assert " dense " in codes["dense"]
    assert "2 others" in text
    assert "not named: load needs the model" in text


def test_kernels_are_named_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save(
        spartan.prune(digits_cnn(), 0.9), path, architecture={"model": "digits-cnn", "classes": 10, "shape": [1, 8, 8]}
    )
    assert '{"model": "digits-cnn", "classes": 10, "shape": [1, 8, 8]}' in inspect(path)
    lines = list(map(str, spartan.explain(load(path, kernels="sparse"))))
    assert len(lines) == 4
    assert all("(" in line for line in lines)


def test_a_damaged_file_is_refused_and_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save(nn.Linear(4, 4), path)
    whole = path.read_bytes()
    header, data = header_of(whole)
    header["\x1b[2Jweight"] = header.pop("weight")
    path.write_bytes(forge(header, data))
    assert "\x1b" not in inspect(path)
    assert "?[2Jweight" in inspect(path)
    path.write_bytes(whole[:-1] + b"?" if whole[-1:] != b"?" else whole[:-1] + b"!")
    with pytest.raises(ValueError, match="checksum"):
        inspect(path)
