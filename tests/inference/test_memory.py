"""Memory of large outputs: used again when nothing refers to it, and never sooner."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartan
from spartan.inference import accelerate
from spartan.inference.cpu import memory
from spartan.inference.cpu.library import library

ONE = torch.ones(1)
SHAPE = (3, 256, 1024)  # 3 MB


@pytest.fixture(autouse=True)
def own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_pool", memory._Pool())


def free() -> int:
    gc.collect()
    return len(memory._pool.idle())


def test_what_is_left_is_used_again() -> None:
    y = memory.empty(ONE, SHAPE)
    at = y.data_ptr()
    assert (y.shape, y.dtype, y.is_contiguous(), at % 64) == (SHAPE, torch.float32, True, 0)
    other = memory.empty(ONE, SHAPE)
    assert other.data_ptr() != at
    del y
    assert free() == 1
    again = memory.empty(ONE.bfloat16(), (3, 500, 1000))  # smaller, but not by half
    assert (again.data_ptr(), again.dtype) == (at, torch.bfloat16)
    assert memory.empty(ONE, (4,)).numel() == 4
    assert free() == 0, "a small one is the allocator's"


@pytest.mark.parametrize(
    "keep",
    [
        lambda y: y[1, 2],
        lambda y: y.numpy()[2],
        lambda y: y.detach().T,
        lambda y: pickle.loads(pickle.dumps(y)),
        copy.deepcopy,
    ],
)
def test_views_keep_it(keep: Callable[[Tensor], Any]) -> None:
    y = memory.empty(ONE, (1024, 1024))
    kept = keep(y.fill_(7.0))
    del y
    others = [memory.empty(ONE, (1024, 1024)).fill_(-1.0) for _ in range(3)]
    assert len(others) == 3
    assert bool((torch.as_tensor(kept) == 7.0).all())


def test_what_nobody_asks_for_is_given_back() -> None:
    large = memory.empty(ONE, (64, 256, 1024))
    del large
    assert free() == 1
    for _ in range(memory._KEPT + 2):
        memory.empty(ONE, SHAPE)
    assert free() == 1
    assert memory._pool.idle()[0].size < 8 << 20


def test_threads_do_not_share() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            y = memory.empty(ONE, (300, 1024))
            y.fill_(float(number))
            if not bool((y == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert free() <= 8, "the next one is there before the last is gone"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_its_own() -> None:
    y = memory.empty(ONE, SHAPE)
    y.view(-1)[:8] = 1.0
    child = os.fork()
    if not child:
        y.view(-1)[:8] = 2.0
        os._exit(0)
    os.waitpid(child, 0)
    assert y.view(-1)[:8].tolist() == [1.0] * 8


@pytest.mark.skipif(library() is None, reason="no compiled kernels here")
def test_outputs_of_a_model_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1)
    ).eval()
    spartan.prune(model, 0.95, budget="uniform")
    fast = accelerate(model, "sparse", example_inputs=torch.randn(2, 3, 96, 96))
    with torch.no_grad():
        inputs = [torch.randn(n, 3, 96, 96) for n in (2, 4, 2, 3, 2)]
        outputs: list[Tensor] = [fast(x) for x in inputs]
        for x, y in zip(inputs, outputs, strict=True):
            assert torch.allclose(y, model(x), atol=1e-4)
