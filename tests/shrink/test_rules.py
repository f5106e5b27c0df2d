"""What is cut, operation by operation: sizes by hand, outputs in float64, and reasons where nothing is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spartan.shrink import shrink
from spartan.shrink.axes import regroup
from spartan.shrink.report import ShrinkReport
from tests.shrink.nets import largest_difference, seeded_model


class Model(nn.Module):
    """Layers by name, and what to do with them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **layers: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, nn.Parameter(layer) if isinstance(layer, Tensor) else layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def zero(weight: Tensor, dim: int, *indices: int) -> None:
    with torch.no_grad():
        weight.index_fill_(dim, torch.tensor(indices), 0.0)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def cut(model: Any, x: Tensor, other: Tensor | None = None) -> tuple[Any, ShrinkReport]:
    """The narrower model, whose outputs are those of the given one on inputs of this shape, and of another."""
    model = model.double().eval()
    x = x.double() if x.is_floating_point() else x
    smaller, report = shrink(model, x, report=True)
    assert report.refused == ()
    for case in (x, x if other is None else other.double()):
        with torch.no_grad():
            assert largest_difference(model(case), smaller(case)) < 1e-10
    return smaller, report


def images(channels: int = 3, size: int = 9) -> Tensor:
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))


def test_linear_both_ways() -> None:
    model = seeded_model(nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)))
    zero(model[0].weight, 0, 1, 4)  # constants: the bias of the next layer takes them over
    zero(model[4].weight, 1, 0)  # nobody reads it
    smaller, _ = cut(model, torch.randn(4, 5))
    assert shapes(smaller)["0.weight"] == (6, 5)
    assert shapes(smaller)["2.weight"] == (5, 6)
    assert repr(smaller[2]) == "Linear(in_features=6, out_features=5, bias=True)"


def test_constants_without_a_bias_to_take_them_are_one_channel() -> None:
    model = seeded_model(nn.Sequential(nn.Linear(5, 8), nn.Sigmoid(), nn.Linear(8, 3, bias=False)))
    zero(model[0].weight, 0, 1, 4, 6)
    smaller, report = cut(model, torch.randn(4, 5))
    assert shapes(smaller)["2.weight"] == (3, 6)
    assert [told.why for told in report.stays] == [
        "they are constant, and one constant is kept for all that the same layer reads"
    ]


@pytest.mark.parametrize(
    ("padding", "mode", "kept"), [(0, "zeros", 5), (1, "zeros", 6), (1, "reflect", 5), (1, "circular", 5)]
)
def test_padding(padding: int, mode: Any, kept: int) -> None:
    """A constant beside zeros is not one at the borders: a channel stands for it. Other paddings repeat the constant."""
    model = seeded_model(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Conv2d(8, 4, 3, padding=padding, padding_mode=mode),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
        )
    )  # fmt: skip
    zero(model[0].weight, 0, 0, 3, 7)
    smaller, _ = cut(model, images(), images(size=14))
    assert shapes(smaller)["0.weight"][0] == shapes(smaller)["3.weight"][1] == smaller[1].num_features == kept


def test_a_map_of_one_pixel_does_not_hide_the_padding() -> None:
    """Where the example is so small that a padded convolution sees a border only, larger inputs still come out right."""
    model = seeded_model(
        nn.Sequential(
            nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 4, 1),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
        )
    )  # fmt: skip
    zero(model[0].weight, 0, 0, 3)
    model[0].bias.data[[0, 3]] = torch.tensor([1.0, -1.0])  # ReLU makes the second one zero
    smaller, report = cut(model, images(size=1), images(size=7))
    assert shapes(smaller)["0.weight"][0] == smaller[2].groups == 5
    assert report.stays[0].why.startswith("they are constant, but not at the borders, because of the padding")


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolutions_of_any_dimension(kind: type[nn.Conv2d]) -> None:
    n = (nn.Conv1d, nn.Conv2d, nn.Conv3d).index(kind) + 1
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[n - 1]
    model = seeded_model(
        nn.Sequential(kind(2, 6, 3), norm(6), nn.ReLU(), kind(6, 4, 2), nn.Flatten(), nn.Linear(4 * 2**n, 3))
    )
    x = torch.randn(2, 2, *[5] * n)
    zero(model[0].weight, 0, 2, 5)
    smaller, _ = cut(model, x)
    assert shapes(smaller)["3.weight"][:2] == (4, 4)


def test_channels_flattened_with_their_pixels() -> None:
    model = seeded_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 5)))
    zero(model[0].weight, 0, 1, 2, 3)
    smaller, _ = cut(model, images())
    assert shapes(smaller)["3.weight"] == (5, 5 * 49)


def test_columns_for_single_pixels_are_no_channel() -> None:
    """A column of a flattened map is one pixel of a channel: the channel goes if all its columns are zero."""
    model = seeded_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 49, 5)))
    zero(model[3].weight, 1, *range(49, 98), 3)
    smaller, report = cut(model, images())
    assert shapes(smaller)["0.weight"][0] == 3
    assert [(told.count, told.side) for told in report.stays] == [(1, "inputs")]


def test_depthwise_and_groups() -> None:
    model = seeded_model(
        nn.Sequential(
            nn.Conv2d(3, 6, 1), nn.ReLU6(), nn.Conv2d(6, 12, 3, padding=1, groups=6), nn.Conv2d(12, 4, 1),
            nn.Conv2d(4, 8, 1), nn.Conv2d(8, 12, 1, groups=4), nn.Conv2d(12, 4, 1), nn.Flatten(), nn.Linear(4 * 81, 2),
        )
    )  # fmt: skip
    zero(model[0].weight, 0, 1)
    model[0].bias.data[1] = -1.0
    zero(model[3].weight, 1, 4, 5, 6)  # both outputs of input 2, and one of input 3
    zero(model[6].weight, 1, 3, 4, 5)  # group 1 of four
    smaller, _ = cut(model, images())
    two, five = smaller[2], smaller[5]
    assert (two.in_channels, two.out_channels, two.groups) == (4, 8, 4)
    assert (five.in_channels, five.out_channels, five.groups) == (6, 9, 3)


def test_the_same_channel_of_every_group() -> None:
    model = seeded_model(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1, groups=2), nn.Conv2d(6, 2, 1), nn.Flatten())
    )
    zero(model[1].weight, 1, 2)
    smaller, _ = cut(model, images())
    assert shapes(smaller)["0.weight"][0] == 6
    assert (smaller[1].in_channels, smaller[1].groups, shapes(smaller)["1.weight"]) == (6, 2, (6, 3, 1, 1))


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution(groups: int) -> None:
    up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=groups)
    model = seeded_model(nn.Sequential(nn.Conv2d(3, 4, 1), up, nn.ReLU(), nn.Conv2d(6, 2, 1), nn.Flatten()))
    zero(model[3].weight, 1, 0, 3)  # the first output of each group
    zero(up.weight, 0, 1, 3)  # the second input of each
    smaller, _ = cut(model, images())
    assert (smaller[1].in_channels, smaller[1].out_channels) == (2, 4)


def test_norms_of_channels() -> None:
    norms = nn.Sequential(nn.GroupNorm(4, 8), nn.InstanceNorm2d(8), nn.InstanceNorm2d(8, affine=True), nn.PReLU(8))
    model = seeded_model(nn.Sequential(nn.Conv2d(3, 8, 1), norms, nn.Conv2d(8, 2, 1), nn.Flatten()))
    zero(model[2].weight, 1, 2, 3, 6)  # group 1, and a half of group 3
    smaller, _ = cut(model, images())
    group, plain, affine, prelu = smaller[1]
    assert (group.num_groups, group.num_channels) == (3, 6)
    assert plain.num_features == affine.num_features == prelu.num_parameters == 6


def test_a_weight_of_zero_in_a_norm_kills_a_channel() -> None:
    model = seeded_model(
        nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Sigmoid(), nn.Conv2d(6, 2, 1), nn.Flatten())
    )
    zero(model[1].weight, 0, 0, 5)
    smaller, _ = cut(model, images())
    assert shapes(smaller)["0.weight"][0] == 4


def test_layer_norm_keeps_its_width_and_says_so() -> None:
    model = seeded_model(nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)))
    zero(model[0].weight, 0, 1, 2)
    zero(model[2].weight, 0, 3)
    smaller, report = cut(model, torch.randn(4, 5))
    assert shapes(smaller)["0.weight"] == (8, 5)
    assert shapes(smaller)["2.weight"] == (5, 8)
    assert [str(told) for told in report.stays] == [
        "2 outputs of 0.weight: all zero, but 1 (layer_norm) takes the mean over all of them"
    ]


def test_rms_norm_keeps_its_width() -> None:
    model = seeded_model(nn.Sequential(nn.Linear(5, 8), nn.RMSNorm(8), nn.Linear(8, 2)))
    zero(model[0].weight, 0, 1)
    with pytest.warns(
        UserWarning, match="nothing can be cut out of Sequential; 1 outputs of 0.weight: all zero, but 1"
    ):
        cut(model, torch.randn(4, 5))


def test_concatenation_split_and_gates() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        both = torch.cat([self.a(x), x, self.b(x).relu()], -1)
        left, right = self.c(both).split([4, 6], -1)
        one, two = self.d(right).chunk(2, -1)
        return self.e(F.silu(one) * two) + self.f(left) + self.g(F.glu(self.h(x), -1))

    model = seeded_model(
        Model(
            run, a=nn.Linear(5, 6), b=nn.Linear(5, 4), c=nn.Linear(15, 10), d=nn.Linear(6, 16), e=nn.Linear(8, 2),
            f=nn.Linear(4, 2), g=nn.Linear(3, 2), h=nn.Linear(5, 6),
        )
    )  # fmt: skip
    zero(model.a.weight, 0, 0, 5)
    zero(model.b.weight, 0, 1)
    zero(model.d.weight, 0, 2, 11)  # a gate, and what another one lets through
    model.d.bias.data[[2, 11]] = 0.0
    zero(model.h.weight, 0, 1)
    model.h.bias.data[1] = 0.0
    smaller, _ = cut(model, torch.randn(4, 5))
    found = shapes(smaller)
    assert found["c.weight"][1] == 4 + 5 + 3
    assert found["d.weight"][0] == 12
    assert found["e.weight"][1] == 6
    assert found["h.weight"][0] == 4


def test_products_of_matrices_and_stacks() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        y = torch.stack([x @ self.w, (self.v @ x.transpose(1, 2)).transpose(1, 2)], 1).mean(1)
        return self.out(y.relu())

    w, v = torch.randn(5, 6), torch.randn(6, 5)
    zero(w, 1, 2, 3)
    zero(v, 0, 2)
    smaller, _ = cut(seeded_model(Model(run, w=w, v=v, out=nn.Linear(6, 3))), torch.randn(2, 4, 5))
    assert (tuple(smaller.w.shape), tuple(smaller.v.shape)) == ((5, 5), (5, 5))


def test_embeddings_and_tied_weights() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        return self.head(self.up(self.table(x) + self.place.weight[: x.shape[1]]).relu())

    model = seeded_model(
        Model(
            run,
            table=nn.Embedding(11, 8),
            place=nn.Embedding(7, 8),
            up=nn.Linear(8, 8),
            head=nn.Linear(8, 11, bias=False),
        )
    )
    model.head.weight = model.table.weight
    zero(model.table.weight, 1, 1, 4)
    zero(model.place.weight, 1, 1, 2)
    zero(model.up.weight, 0, 1, 5)
    smaller, _ = cut(model, torch.randint(0, 11, (2, 5)))
    # Channel 1 of the tied table: a constant zero as an embedding, and as a head it reads a constant.
    assert tuple(smaller.table.weight.shape) == (11, 7)
    assert smaller.head.weight is smaller.table.weight
    assert tuple(smaller.up.weight.shape) == (7, 7)


def test_what_differs_beyond_the_example_is_not_constant() -> None:
    """Positions that the example is too short for are not zero."""

    def run(self: Any, x: Tensor) -> Tensor:
        return self.out(self.table(x) + self.place[: x.shape[1]])

    place = torch.randn(9, 6)
    place[:4, 2] = 0.0
    model: Any = Model(run, table=nn.Embedding(11, 6), place=place, out=nn.Linear(6, 2)).double().eval()
    zero(model.table.weight, 1, 2)
    with pytest.warns(UserWarning, match="nothing can be cut"):
        smaller = shrink(model, torch.randint(0, 11, (2, 4)))
    x = torch.randint(0, 11, (2, 9))
    assert torch.equal(smaller(x), model(x))


def test_pooling_padding_and_pixels() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.a(x).sigmoid(), 3, 1, 1)
        x = F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0, mode="bilinear")
        return self.b(F.pixel_shuffle(x.roll(1, 2), 2)).amax((2, 3))

    model = seeded_model(Model(run, a=nn.Conv2d(3, 12, 1), b=nn.Conv2d(3, 2, 1)))
    zero(model.b.weight, 1, 1)  # four of a's
    zero(model.a.weight, 0, 0)  # one of four
    smaller, _ = cut(model, images(size=8))
    assert (smaller.a.out_channels, smaller.b.in_channels) == (8, 2)


def test_borders_that_are_filled_in_and_sums_that_are_divided() -> None:
    """A channel of zeros is none where ones are put around it, and a constant is another one where its sum is halved."""

    def run(self: Any, x: Tensor) -> Tensor:
        y = F.avg_pool2d(self.a(x).sigmoid(), 2, divisor_override=2)
        return self.c(F.pad(self.b(y).relu(), (1, 1, 1, 1), value=1.0)).mean((2, 3))

    model = seeded_model(Model(run, a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(6, 5, 1), c=nn.Conv2d(5, 2, 3)))
    zero(model.a.weight, 0, 1, 4)
    zero(model.b.weight, 0, 2)
    model.b.bias.data[2] = -1.0
    model, x = model.double(), images(size=8).double()
    with pytest.warns(UserWarning, match="nothing can be cut"):
        smaller, report = shrink(model, x, report=True)
    assert report.refused == ()
    assert torch.equal(model(x), smaller(x))


def test_a_layer_that_is_called_twice() -> None:
    """What it reads the first time is constant and what it reads the second time is not, so that no bias can take it."""

    def run(self: Any, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()) + self.b(self.c(x).tanh())

    model = seeded_model(Model(run, a=nn.Linear(5, 6), b=nn.Linear(6, 3), c=nn.Linear(5, 6)))
    zero(model.a.weight, 0, 1, 2)
    zero(model.c.weight, 0, 2, 3)
    model.a.bias.data[2] = model.c.bias.data[2] = 0.0
    smaller, _ = cut(model, torch.randn(4, 5))
    assert shapes(smaller)["b.weight"] == (3, 5)


def test_a_layer_that_is_dead_as_a_whole_keeps_one_channel() -> None:
    model = seeded_model(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)))
    zero(model[0].weight, 0, *range(8))
    smaller, _ = cut(model, torch.randn(4, 5))
    assert shapes(smaller)["0.weight"] == (1, 5)


def test_memory_format_dtype_and_frozen_weights_stay() -> None:
    model = seeded_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten()))
    model = model.to(torch.bfloat16).to(memory_format=torch.channels_last)
    model[0].weight.requires_grad_(False)
    zero(model[0].weight, 0, 1, 2)
    smaller = shrink(model, images().bfloat16())
    assert smaller[2].weight.is_contiguous(memory_format=torch.channels_last)
    assert smaller[2].weight.dtype == torch.bfloat16
    assert not smaller[0].weight.requires_grad
    assert smaller[2].weight.requires_grad


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda self, x: self.b(self.lstm(self.a(x))[0]), "lstm in lstm is no operation that shrink knows"),
        (lambda self, x: self.b(torch.einsum("btc,bsc->btc", self.a(x), self.a(x))), "einsum in the model is no operation"),
        (lambda self, x: self.b(F.pad(self.a(x)[..., 1:], (1, 0))), "slice in the model counts on how many there are"),
        (lambda self, x: self.b(self.a(x) / self.a(x).sum(-1, keepdim=True)), "sum in the model is over all of them"),
        (lambda self, x: self.b(self.a(x)) + self.a(x).cumsum(-1)[..., :2], "cumsum in the model counts on how many"),
    ],
)  # fmt: skip
def test_what_is_not_cut_has_a_reason(run: Callable[[Any, Tensor], Tensor], told: str) -> None:
    model = seeded_model(Model(run, a=nn.Linear(5, 6), b=nn.Linear(6, 2), lstm=nn.LSTM(6, 6, batch_first=True)))
    zero(model.a.weight, 0, 1, 3)
    with pytest.warns(UserWarning, match="nothing can be cut"):
        _, report = shrink(model, torch.randn(2, 3, 5), report=True)
    assert any(told in each.why for each in report.stays)
    assert told in str(report)


def test_code_that_counts_is_found_and_named() -> None:
    """Two parts could be smaller; the code of one has its size in it."""

    def run(self: Any, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x)).view(len(x), 8)).relu())

    model = seeded_model(Model(run, a=nn.Linear(5, 6), b=nn.Linear(6, 8), c=nn.Linear(8, 7), d=nn.Linear(7, 3)))
    for layer in (model.a, model.b, model.c):
        zero(layer.weight, 0, 1, 2)
    smaller, report = shrink(model, torch.randn(4, 5), report=True)
    assert [tuple(p.shape) for p in smaller.parameters() if p.ndim == 2] == [(4, 5), (8, 4), (5, 8), (3, 5)]
    (refused,) = report.refused
    assert set(refused.names) == {"b.weight", "b.bias", "c.weight"}
    assert "the model's code would fail (shape '[4, 8]' is invalid" in refused.why


def test_code_that_is_traced_away_is_found_by_running_it() -> None:
    """A layer whose result nobody uses is not in the graph, and reads what could be cut."""

    def run(self: Any, x: Tensor) -> Tensor:
        y = self.a(x)
        self.unused(y)
        return self.b(y)

    model = seeded_model(Model(run, a=nn.Linear(5, 6), b=nn.Linear(6, 3), unused=nn.Linear(6, 2)))
    zero(model.a.weight, 0, 1, 2)
    with pytest.warns(
        UserWarning, match="nothing can be cut out of Model; a.weight, a.bias, b.weight: could be smaller, but"
    ):
        smaller = shrink(model, torch.randn(4, 5))
    assert shapes(smaller) == shapes(model)


def test_tracing_leaves_nothing_in_the_model() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        if "seen" not in vars(self):
            self.seen = torch.arange(3.0)
        return self.b(self.a(x)) + self.seen

    model = seeded_model(Model(run, a=nn.Linear(5, 6), b=nn.Linear(6, 3)))
    zero(model.a.weight, 0, 1)
    smaller = shrink(model, torch.randn(4, 5))
    assert type(model.seen) is type(smaller.seen) is Tensor


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 3), (6,)), ((1, 6), (2, 1, 3)), ((4, 1), (4,)), ((1, 1), (1,)), ((6, 4), (3, 8)), ((0, 3), (3, 0))],
)
def test_regroup_covers_every_dimension_once(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    groups = regroup(before, after)
    assert [i for old, _ in groups for i in old] == list(range(len(before)))
    assert [j for _, new in groups for j in new] == list(range(len(after)))
