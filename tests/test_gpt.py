"""The decoder on bytes: its cache, and what it generates."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spartan.gpt import GPT
from spartan.zoo import build_model


def small() -> GPT:
    torch.manual_seed(0)
    return GPT(classes=50, context=16, layers=2, width=32, heads=4).double()


def test_the_cache_changes_nothing() -> None:
    model, tokens = small(), torch.randint(50, (3, 16))
    whole, cache, parts = model(tokens), None, []
    for part in tokens.split([5, 1, 4, 6], 1):
        scores, cache = model.run(part, cache)
        parts.append(scores)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


def test_it_sees_no_later_token() -> None:
    model, tokens = small(), torch.randint(50, (2, 16))
    others = tokens.clone()
    others[:, 9:] = torch.randint(50, (2, 7))
    torch.testing.assert_close(model(tokens)[:, :9], model(others)[:, :9], rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_plain_call_keeps_no_keys_and_values() -> None:
    """Those of all layers together may be larger than anything else; calibration has memory for a layer or so."""
    model, alive = small(), list[int]()
    seen: list[Any] = []

    def look(module: nn.Module, given: Any, outputs: Any) -> None:
        alive.append(sum(x() is not None for x in seen))
        seen.extend(weakref.ref(x) for x in outputs[1])

    for layer in model.layers:
        layer.register_forward_hook(look)
    model(torch.randint(50, (2, 16)))
    assert alive == [0, 0]


def one_by_one(model: GPT, tokens: Tensor, length: int) -> Tensor:
    """The likeliest token each time, without a cache; within the context."""
    for _ in range(length):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
    return tokens


def test_what_it_generates() -> None:
    model, tokens = small(), torch.randint(50, (2, 6))
    assert torch.equal(model.generate(tokens, 10, temperature=0), one_by_one(model, tokens, 10))
    # Where the context is full it goes on from its second half.
    long = model.generate(tokens, 30, temperature=0)
    assert long.shape == (2, 36)
    assert torch.equal(long[:, :17], one_by_one(model, tokens, 11))
    assert torch.equal(long[:, 17:25], one_by_one(model, long[:, 9:17], 8)[:, 8:])


def test_draws_follow_the_scores() -> None:
    model, tokens = small(), torch.randint(50, (1, 6)).expand(20_000, -1)
    drawn = model.generate(tokens, 1, temperature=0.5, generator=torch.Generator().manual_seed(1))[:, -1]
    chances = (model(tokens[:1])[0, -1] / 0.5).softmax(-1)
    found = drawn.bincount(minlength=50) / len(drawn)
    assert (found - chances).abs().max() < 0.02
    again = model.generate(tokens, 1, temperature=0.5, generator=torch.Generator().manual_seed(1))[:, -1]
    assert torch.equal(drawn, again)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="heads=5 does not divide width=32"):
        GPT(width=32, heads=5)
    with pytest.raises(ValueError, match="layers=0; a whole number"):
        GPT(layers=0)
    with pytest.raises(ValueError, match="at least one is needed"):
        small().generate(torch.zeros(2, 0, dtype=torch.long), 3)
    with pytest.raises(ValueError, match="temperature=-1"):
        small().generate(torch.zeros(2, 1, dtype=torch.long), 3, temperature=-1)
    with pytest.raises(ValueError, match="gpt takes sequences of tokens"):
        build_model("gpt", 10, (3, 32, 32))
    with pytest.raises(ValueError, match="wrn-10-1 takes images"):
        build_model("wrn-10-1", 256, (64,))
    with pytest.raises(ValueError, match="model_args"):
        build_model("gpt", 256, (64,), {"depth": 3})


def test_the_size_of_the_recipe() -> None:
    model = build_model("gpt", 256, (256,), {"layers": 6, "width": 384, "heads": 6})
    blocks = [p for name, p in model.named_parameters() if name.startswith("layers.") and p.ndim > 1]
    assert sum(p.numel() for p in blocks) == 10_616_832
