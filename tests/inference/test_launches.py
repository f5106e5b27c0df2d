"""What is read off a kernel that Triton compiled, to launch it without Triton."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spartan.inference.gpu import compiled
from spartan.inference.gpu.linear import Launch, TileLinear
from spartan.inference.gpu.tiles import Tiling

PTX = """
.visible .entry some_kernel(
	.param .align 64 .b8 some_kernel_param_0[128],
	.param .u32 some_kernel_param_1,
	.param .u32 some_kernel_param_2,
	.param .u64 some_kernel_param_3,
	.param .u64 some_kernel_param_4,
	.param .u64 .ptr .global .align 1 some_kernel_param_5,
	.param .u32 some_kernel_param_6,
	.param .u64 .ptr .global .align 1 some_kernel_param_7,
	.param .u64 .ptr .global .align 1 some_kernel_param_8
)
.reqntid 128
{
"""


def made(**other: Any) -> Any:
    about = {"tensordesc_meta": [{}], "global_scratch_size": 0, "profile_scratch_size": 0} | other
    return SimpleNamespace(asm={"ptx": PTX}, metadata=SimpleNamespace(**about))


@pytest.fixture
def descriptor(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiled, "_described", lambda descriptor, about: bytes(range(128)))
    return SimpleNamespace(shape=[3, 5], strides=[8, 1])


def test_arguments_are_packed_as_the_kernel_wants_them(descriptor: Any) -> None:
    tensor = torch.zeros(4)
    packed, begins, firsts = compiled._packed([descriptor, tensor, -7], made())
    assert begins == [0, 128, 132, 136, 144, 152, 160, 168, 176]
    assert firsts == [0, 5, 6]
    assert packed[:128] == bytes(range(128))
    assert struct.unpack_from("iiQQQi", packed, 128) == (3, 5, 8, 1, tensor.data_ptr(), -7)
    assert struct.unpack_from("QQ", packed, 168) == (0, 0)


def test_another_kernel_is_left_to_triton(descriptor: Any) -> None:
    tensor = torch.zeros(4)
    for arguments, kernel in (
        ([descriptor, tensor], made()),
        ([tensor, descriptor, 7], made()),
        ([descriptor, tensor, 7], made(global_scratch_size=64)),
        ([descriptor, tensor, 7], made(tensordesc_meta=[{}, {}])),
        ([descriptor, tensor, 1 << 40], made()),
        ([descriptor, tensor, 7], SimpleNamespace()),
    ):
        assert compiled.launch_of(kernel, 1, arguments, 0, 1, 0) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("loads", ["async", "tma", "tma in", "l1"])
def test_a_second_call_does_what_the_first_did(loads: str) -> None:
    weight = torch.randn(256, 512, device="cuda").bfloat16() * (torch.rand(4, 8) < 0.3).repeat_interleave(
        64, 0
    ).repeat_interleave(64, 1).to("cuda")
    layer = TileLinear(weight, None, Tiling(64, 64, 64, 64), Launch(128, 4, 2, 64, loads))
    for tokens in (1, 64, 300):
        x, other = (torch.randn(tokens, 512, device="cuda").bfloat16() for _ in range(2))
        first, second = layer(x), layer(other)
        assert torch.equal(layer(x), first)
        assert torch.equal(layer(x.clone()), first)
        assert torch.equal(layer(other), second)
    assert len(layer._calls) == 3, "launches were kept"
