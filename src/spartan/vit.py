"""A vision transformer for small images, in plain layers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD = 64  # width of an attention head, as in ViT-B/16 and in DeiT


class ViTAttention(nn.Module):
    """Self-attention; one matrix holds the queries', keys' and values' projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Every token from all of its image, [B, tokens, width]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ViTBlock(nn.Module):
    """Attention, then an MLP four times as wide, each behind a norm and around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = ViTAttention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, [B, tokens, width]."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """vit-DEPTH-WIDTH-PATCH (Dosovitskiy et al., 2021) with heads of 64, a class token and learned positions.

    Args:
        depth: blocks.
        width: of a token; a multiple of 64.
        patch: side of the squares that an image is cut into.
        classes: how many scores it gives an image.
        shape: of an image: channels, height, width.
    """

    def __init__(self, depth: int, width: int, patch: int, classes: int, shape: Sequence[int]) -> None:
        super().__init__()
        name, (channels, height, across) = f"vit-{depth}-{width}-{patch}", shape
        if depth < 1 or width < HEAD or width % HEAD:
            near = max(HEAD, round(width / HEAD) * HEAD)
            raise ValueError(
                f"model: {name} does not exist: the depth is at least 1 and the width a multiple of {HEAD} "
                f"(did you mean vit-{max(depth, 1)}-{near}-{patch}?)"
            )
        if depth > 1000 or width > 100 * HEAD:
            raise ValueError(f"model: {name} is too large; a depth of at most 1000 and a width of at most {100 * HEAD}")
        if patch < 1 or height % patch or across % patch:
            raise ValueError(f"model: {name} cannot cut images of {height}×{across} into squares of {patch}×{patch}")
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + height // patch * (across // patch), width))
        self.blocks = nn.Sequential(*(ViTBlock(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        # As in timm and DeiT: 0.02 keeps attention and scores flat at the start, whatever the depth.
        linear = [m for m in self.modules() if isinstance(m, nn.Linear)]
        for weight in (self.token, self.positions, *(m.weight for m in linear)):
            nn.init.trunc_normal_(weight, std=0.02)
        for layer in linear:
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores [B, classes]."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])
