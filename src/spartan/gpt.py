"""A small decoder on bytes: the language model of the recipe `bytes-gpt`, as a plain module."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Cache = list[tuple[Tensor, Tensor]]  # keys and values of every layer, [B, heads, positions so far, width of a head]


class GPTAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, before: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The output, and keys and values of all positions so far, those `before` included."""
        length = x.shape[1]
        # All heads together may be narrower than the model: `spartan.shrink` cuts heads out.
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None
        if before is not None:
            past = before[0].shape[2]
            k, v = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
            # Position past + i sees everything up to itself; a single one sees all there is.
            mask = (
                torch.ones(length, past + length, dtype=torch.bool, device=x.device).tril(past) if length > 1 else None
            )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=before is None)
        return self.out(mixed.transpose(1, 2).flatten(2)), (k, v)


class GPTLayer(nn.Module):
    """Layer norm, attention, layer norm, two linear layers with GELU between, each around a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = GPTAttention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, before: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The output, and the attention's keys and values."""
        mixed, seen = self.attention(self.norm1(x), before)
        x = x + mixed
        return x + self.down(F.gelu(self.up(self.norm2(x)))), seen


class GPT(nn.Module):
    """A decoder of the usual form (Radford et al., 2019): learned positions, layer norm first, no biases, no dropout.

    Args:
        classes: how many tokens there are; 256 for bytes.
        context: the longest sequence it sees.
        layers: how many layers.
        width: of the residual stream.
        heads: of attention; they divide the width.

    Example:
        >>> model = GPT(context=16, layers=1, width=32, heads=2)
        >>> tuple(model(torch.zeros(3, 16, dtype=torch.long)).shape)
        (3, 16, 256)
    """

    def __init__(
        self, classes: int = 256, context: int = 256, layers: int = 6, width: int = 384, heads: int = 6
    ) -> None:
        super().__init__()
        for name, value in (("context", context), ("layers", layers), ("width", width), ("heads", heads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"gpt: {name}={value!r}; a whole number of at least 1 is needed")
        if width % heads:
            raise ValueError(f"gpt: heads={heads} does not divide width={width}")
        self.context = context
        self.tokens, self.positions = nn.Embedding(classes, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(GPTLayer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # what adds to the residual stream begins smaller, the more there is of it
                adds = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores [B, T, classes] of what comes after each of the tokens [B, T]; keys and values are not kept."""
        x = self._embedded(tokens, 0)
        for layer in self.layers:
            x = layer(x)[0]
        return self._scores(x)

    def run(self, tokens: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Scores of what comes after each token, and keys and values so far: give these to go on without the tokens."""
        x = self._embedded(tokens, cache[0][0].shape[2] if cache else 0)
        seen: Cache = []
        for i, layer in enumerate(self.layers):
            x, here = layer(x, cache[i] if cache else None)
            seen.append(here)
        return self._scores(x), seen

    def _embedded(self, tokens: Tensor, past: int) -> Tensor:
        at = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        found: Tensor = self.tokens(tokens) + self.positions(at)
        return found

    def _scores(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(x))
        return found

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, length: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """The tokens [B, T] and `length` more, drawn one after the other; with temperature 0 the likeliest each time.

        Every token is computed once. Where the context is full, it goes on from its second half.
        """
        if tokens.ndim != 2 or not tokens.shape[1]:
            raise ValueError(f"generate: tokens of shape {tuple(tokens.shape)}; [B, T] with at least one is needed")
        if not temperature >= 0:
            raise ValueError(f"generate: temperature={temperature!r}; a number of at least 0 is needed")
        cache: Cache | None = None
        fresh = tokens[:, -self.context :]
        for _ in range(length):
            if cache and cache[0][0].shape[2] + fresh.shape[1] > self.context:
                cache, fresh = None, tokens[:, -max(1, self.context // 2) :]
            scores, cache = self.run(fresh, cache)
            last = scores[:, -1].float()
            if temperature == 0:
                fresh = last.argmax(-1, keepdim=True)
            else:
                fresh = torch.multinomial((last / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, fresh), 1)
        return tokens
