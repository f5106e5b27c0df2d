"""Attention heads: nn.MultiheadAttention, fused and separate projections, grouped queries, with and without SDPA."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spartan.gpt import GPT
from spartan.narrow import NarrowAttention
from spartan.shrink import shrink
from tests.shrink.nets import largest_difference, seeded_model

X = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0), dtype=torch.double)


def kill_heads(weight: Tensor, parts: int, heads: int, *dead: int, dim: int = 0) -> None:
    """Set rows (or columns) of these heads to zero, in each of the parts of a weight."""
    with torch.no_grad():
        weight.transpose(0, dim).unflatten(0, (parts, heads, -1))[:, list(dead)] = 0.0


class Wrapped(nn.Module):
    """An attention layer around which there is a shortcut, and what to call it with besides its inputs."""

    def __init__(self, attention: nn.MultiheadAttention, memory: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.attention, self.options = attention, options
        self.memory = nn.Buffer(memory) if memory is not None else None

    def forward(self, x: Tensor) -> Tensor:
        memory = x if self.memory is None else self.memory
        return x + self.attention(x, memory, memory, **self.options)[0]


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    made = seeded_model(nn.MultiheadAttention(24, 6, **options).double())
    assert isinstance(made, nn.MultiheadAttention)
    return made


MASK = torch.zeros(7, 7, dtype=torch.bool).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), True)


WAYS: list[dict[str, Any]] = [{}, {"need_weights": False}, {"attn_mask": MASK}]
WAYS += [{"attn_mask": MASK, "is_causal": True, "need_weights": False}]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(options: dict[str, Any], batch_first: bool) -> None:
    model = Wrapped(attention(batch_first=batch_first), **options).eval()
    kill_heads(model.attention.in_proj_weight, 3, 6, 0, 2, 3)
    kill_heads(model.attention.out_proj.weight, 1, 6, 5, dim=1)  # nobody reads this one
    x = X if batch_first else X.transpose(0, 1)
    smaller, report = shrink(model, x, report=True)
    made = smaller.attention
    assert report.refused == ()
    assert (type(made), made.num_heads, tuple(made.in_proj_weight.shape)) == (NarrowAttention, 2, (24, 24))
    assert tuple(made.out_proj.weight.shape) == (24, 8)
    with torch.no_grad():
        assert largest_difference(model(x), smaller(x)) < 1e-10
        # A long sequence, and again after another copy.
        longer = torch.cat([x, x + 1], 0 if batch_first else 1)
        assert largest_difference(model(longer), copy.deepcopy(smaller)(longer)) < 1e-10


def test_cross_attention_with_widths_of_its_own() -> None:
    memory = torch.randn(2, 5, 10, dtype=torch.double)
    model = Wrapped(attention(batch_first=True, kdim=10, vdim=10), memory=memory, need_weights=False).eval()
    with torch.no_grad():
        model.attention.v_proj_weight[:8] = 0.0  # heads 0 and 1
    smaller, report = shrink(model, X, report=True)
    assert report.refused == ()
    assert [tuple(getattr(smaller.attention, f"{k}_proj_weight").shape) for k in "qkv"] == [
        (16, 24),
        (16, 10),
        (16, 10),
    ]


@pytest.mark.parametrize("kind", ["bias", "zero"])
def test_attention_that_cannot_be_narrower_says_so(kind: str) -> None:
    model = Wrapped(attention(batch_first=True, add_bias_kv=kind == "bias", add_zero_attn=kind == "zero")).eval()
    kill_heads(model.attention.out_proj.weight, 1, 6, 0, 2, dim=1)
    with pytest.warns(UserWarning, match="nothing can be cut"):
        _, report = shrink(model, X, report=True)
    if kind == "bias":
        assert [each.why for each in report.refused] == [
            "nn.MultiheadAttention with add_bias_kv or add_zero_attn cannot have fewer heads"
        ]
    else:  # torch's code makes the zeros for a number of heads
        assert any("zeros in attention says how many there are" in each.why for each in report.stays)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_narrow_attention_is_attention_of_the_heads_that_are_left(average: bool, bias: bool) -> None:
    """Against torch's own with every head, the dead ones of which give nothing: all masks, with weights, unbatched."""
    whole = attention(batch_first=True, bias=bias)
    kill_heads(whole.in_proj_weight, 3, 6, 1, 4)
    kill_heads(whole.out_proj.weight, 1, 6, 1, 4, dim=1)
    left = [0, 2, 3, 5]
    narrow = copy.deepcopy(whole)
    rows = torch.arange(72).unflatten(0, (3, 6, 4))[:, left].reshape(-1)
    narrow.in_proj_weight.data = whole.in_proj_weight.data[rows]
    if bias:
        narrow.in_proj_bias.data = whole.in_proj_bias.data[rows]
    narrow.out_proj.weight.data = whole.out_proj.weight.data.unflatten(1, (6, 4))[:, left].flatten(1)
    NarrowAttention.take_over(narrow)
    torch.manual_seed(2)
    padding = torch.rand(2, 7) < 0.3
    padding[:, 0] = False
    each = torch.randn(2 * 6, 7, 7, dtype=torch.double)
    cases: list[tuple[Tensor, dict[str, Any], dict[str, Any]]] = [
        (X, {}, {}),
        (X, {"key_padding_mask": padding}, {}),
        (X, {"key_padding_mask": padding, "attn_mask": MASK}, {}),
        (X, {"attn_mask": torch.randn(7, 7, dtype=torch.double)}, {}),
        (X, {"attn_mask": each}, {"attn_mask": each.unflatten(0, (2, 6))[:, left].flatten(0, 1)}),
        (X[0], {"key_padding_mask": padding[0]}, {}),
    ]
    with torch.no_grad():
        for x, given, own in cases:
            expected, weights = whole(x, x, x, **given, average_attn_weights=False)
            got, mine = narrow(x, x, x, **(own or given), average_attn_weights=average)
            assert torch.allclose(got, expected, atol=1e-12)
            alive = weights[..., left, :, :]
            assert torch.allclose(mine, alive.mean(-3) if average else alive, atol=1e-12)
            fast = narrow(x, x, x, **(own or given), need_weights=False)
            assert torch.allclose(fast[0], expected, atol=1e-12)
            assert fast[1] is None
    with pytest.raises(RuntimeError, match="attn_mask has to be given too"):
        narrow(X, X, X, is_causal=True)


def test_encoder_layers_on_torch_s_fused_path() -> None:
    """In eval mode without gradients torch runs a whole layer as one operation, which knows no narrower attention."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 6, 40, batch_first=True)
    model = seeded_model(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).double()
    for block in model.layers:
        kill_heads(block.self_attn.in_proj_weight, 3, 6, 0, 1, 4, 5)  # two are left: an even number
        block.linear1.weight.data[::2] = 0.0
    smaller, report = shrink(model, X, report=True)
    assert report.refused == ()
    assert [tuple(block.self_attn.in_proj_weight.shape) for block in smaller.layers] == [(24, 24)] * 2
    assert [tuple(block.linear2.weight.shape) for block in smaller.layers] == [(24, 20)] * 2
    with torch.no_grad():
        assert largest_difference(model(X), smaller(X)) < 1e-10


class Grouped(nn.Module):
    """Six queries' heads, three of keys and values, and different ways to compute attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.num_heads, self.num_kv_heads = how, 6, 3
        self.q, self.k, self.v, self.o = (nn.Linear(*sizes) for sizes in ((24, 24), (24, 12), (24, 12), (24, 24)))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], self.num_heads, 4).transpose(1, 2)
        k, v = (p(x).view(*x.shape[:2], self.num_kv_heads, 4).transpose(1, 2) for p in (self.k, self.v))
        if self.how == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        elif self.how == "interleave":
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for y in (k, v))
            mixed = (q @ k.transpose(-1, -2) / 2).softmax(-1).to(v.dtype) @ v
        return x + self.o(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("how", ["sdpa", "interleave", "by hand"])
@pytest.mark.parametrize("by", ["values", "output"])
def test_grouped_queries(how: str, by: str) -> None:
    """A head of keys and values goes if all its queries' heads do; a single one of these does not go."""
    torch.manual_seed(0)
    model = seeded_model(Grouped(how)).double()
    if by == "values":
        kill_heads(model.v.weight, 1, 3, 1)
    else:
        kill_heads(model.o.weight, 1, 6, 0, 2, 3, dim=1)
    smaller, report = shrink(model, X, report=True)
    assert report.refused == ()
    assert (smaller.num_heads, smaller.num_kv_heads) == (4, 2)
    assert tuple(smaller.o.weight.shape) == (24, 16)
    with torch.no_grad():
        assert largest_difference(model(X), smaller(X)) < 1e-10
    if by == "output":
        assert {(told.name, told.count) for told in report.stays} == {("o.weight", 4)}


def test_width_of_heads_stays() -> None:
    """The scale depends on it: one over the root of it."""
    torch.manual_seed(0)
    model = seeded_model(Grouped("sdpa")).double()
    with torch.no_grad():
        model.q.weight.view(6, 4, 24)[:, 1] = 0.0
        model.q.bias.view(6, 4)[:, 1] = 0.0
    with pytest.warns(UserWarning, match="nothing can be cut"):
        _, report = shrink(model, X, report=True)
    assert [(told.name, told.count) for told in report.stays] == [("q.weight", 6)]


def test_the_decoder_on_bytes_generates_as_before() -> None:
    torch.manual_seed(0)
    model = seeded_model(GPT(classes=50, context=16, layers=2, width=32, heads=4)).double()
    for layer in model.layers:
        kill_heads(layer.attention.qkv.weight, 3, 4, 1, 2)
        layer.up.weight.data[::2] = 0.0
    tokens = torch.randint(0, 50, (2, 9))
    smaller, report = shrink(model, tokens, report=True)
    assert report.refused == ()
    assert [layer.attention.heads for layer in smaller.layers] == [2, 2]
    assert [tuple(layer.attention.qkv.weight.shape) for layer in smaller.layers] == [(48, 32)] * 2
    assert torch.equal(smaller.generate(tokens, 20, temperature=0), model.generate(tokens, 20, temperature=0))


def test_a_narrow_model_is_narrowed_again() -> None:
    model = Wrapped(attention(batch_first=True), need_weights=False).eval()
    kill_heads(model.attention.in_proj_weight, 3, 6, 0)
    once = shrink(model, X)
    kill_heads(once.attention.in_proj_weight, 3, 5, 0, 1)
    twice = shrink(once, X)
    assert (type(twice.attention), twice.attention.num_heads) == (NarrowAttention, 3)
    with torch.no_grad():
        assert largest_difference(once(X), twice(X)) < 1e-10
