"""The CPU kernel for attention against float64, on odd sizes, for every instruction set this processor has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spartan
from spartan.inference.convert import accelerate
from spartan.inference.cpu import library, ops
from spartan.inference.stand_ins import Attention

pytestmark = pytest.mark.skipif(library.library() is None, reason=f"no compiled kernels here: {library.status()}")
# images, heads, queries, keys, width of a head: one of each, more keys than are taken at a time, no multiples of a vector
SIZES = [
    (1, 1, 1, 1, 1),
    (2, 3, 7, 5, 3),
    (1, 12, 29, 29, 64),
    (2, 2, 13, 700, 40),
    (1, 1, 6, 1025, 72),
    (3, 1, 50, 512, 16),
]


@pytest.fixture(params=["portable", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    kernels = library.library()
    assert kernels is not None
    if not kernels.spartan_use_isa(["portable", "avx2", "avx512"].index(request.param)):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    kernels.spartan_use_isa(-1)


def projected(images: int, heads: int, queries: int, keys: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as one layer for all three gives them: runs of a longer row each."""
    rows = torch.randn(images, max(queries, keys), 3 * heads * width)
    q, k, v = (x.unflatten(-1, (heads, width)).transpose(1, 2) for x in rows.chunk(3, -1))
    return q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    return found.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_against_float64(sizes: tuple[int, ...], dtype: torch.dtype, threads: int, isa: str) -> None:
    torch.manual_seed(0)
    q, k, v = (x.to(dtype) for x in projected(*sizes))
    assert ops.attends(q, k, v)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = ops.attend(q, k, v)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(
        found, expected(q, k, v).to(dtype), rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=2e-6
    )


def test_scores_far_apart_and_out_of_order(isa: str) -> None:
    """The highest score comes last, so that all that was summed before fades away."""
    q, k, v = torch.ones(1, 1, 8, 16), torch.zeros(1, 1, 1200, 16), torch.randn(1, 1, 1200, 16)
    k[0, 0, :, 0] = torch.linspace(-400.0, 400.0, 1200)
    torch.testing.assert_close(ops.attend(q, k, v), expected(q, k, v).float(), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_reaches_its_own_query(value: float, isa: str) -> None:
    torch.manual_seed(0)
    q, k, v = (x.contiguous() for x in projected(1, 2, 9, 20, 8))
    q[0, 1, 4, 2] = value
    found, plain = ops.attend(q, k, v), F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    assert torch.equal(found.isnan(), plain.isnan())
    torch.testing.assert_close(found, plain, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_what_it_does_not_take() -> None:
    q, k, v = projected(1, 2, 3, 4, 8)
    assert not ops.attends(q.double(), k.double(), v.double())
    assert not ops.attends(q, k.bfloat16(), v)
    assert not ops.attends(*(x.transpose(2, 3) for x in (q, k, v)))
    assert not ops.attends(q, k[:, :, :0], v[:, :, :0])
    assert not ops.attends(*(torch.zeros(1, 1, 2, 513) for _ in range(3)))
    q.requires_grad_()
    assert not ops.attends(q, k, v)
    with torch.no_grad():
        assert ops.attends(q, k, v)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_model_s_attention_takes_it_where_nothing_is_masked(
    batch_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = spartan.prune(nn.MultiheadAttention(32, 4, batch_first=batch_first), 0.8).eval()
    fast: nn.Module = accelerate(plain, kernels="sparse")
    assert type(fast) is Attention
    calls, attend = [], ops.attend

    def counted(*qkv: Tensor) -> Tensor:
        calls.append(qkv)
        return attend(*qkv)

    monkeypatch.setattr(ops, "attend", counted)
    x, y = torch.randn(5, 6, 32), torch.randn(5, 6, 32)
    mask = torch.ones(6, 6).triu(1).bool() if batch_first else torch.ones(5, 5).triu(1).bool()
    with torch.inference_mode():
        for kwargs in ({"need_weights": False}, {"need_weights": False, "attn_mask": mask}, {"need_weights": True}):
            torch.testing.assert_close(fast(x, x, x, **kwargs)[0], plain(x, x, x, **kwargs)[0], rtol=1e-5, atol=1e-6)
            assert len(calls) == 1  # the first time
        torch.testing.assert_close(fast(x, y, y, need_weights=False)[0], plain(x, y, y, need_weights=False)[0])
    assert len(calls) == 2
