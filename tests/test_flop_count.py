import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spartan.problem.flops import FlopCount, LayerFlops, flops, macs_per_parameter
from tests.torchvision_cpu import torchvision

DOUBLE_COUNTED = ("ReLU", "GELU", "MaxPool2d", "AdaptiveAvgPool2d")


def ptflops_macs(model: nn.Module, inputs: Tensor, count_functional: bool) -> int:
    import ptflops  # imports torchvision, which needs tests.torchvision_cpu first

    macs, _ = ptflops.get_model_complexity_info(
        model,
        tuple(inputs.shape[1:]),
        print_per_layer_stat=False,
        as_strings=False,
        backend="pytorch",
        backend_specific_config={"count_functional": count_functional},
    )
    return int(macs)


def rows(count: FlopCount) -> dict[tuple[str, str], tuple[int, int]]:
    return {(layer.name, layer.kind): (layer.dense, layer.sparse) for layer in count.layers}


class Lambda(nn.Module):
    """Call a function of the module itself and its inputs."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def self_attention(**kwargs: Any) -> nn.Module:
    return Lambda(lambda m, x: m.mha(x, x, x, need_weights=False)[0], mha=nn.MultiheadAttention(12, 3, **kwargs))


def cross_attention() -> nn.Module:
    return Lambda(lambda m, x: m.mha(x[:, :2], x, x)[0], mha=nn.MultiheadAttention(12, 3, batch_first=True))


# Each holds only modules that ptflops knows.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3, bias=False)), (7, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2), (4, 11)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), padding=1, bias=False), (4, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 4, 5, 6)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 9, 8)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2), (4, 9, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (4, 5, 7)),
    "transposed, groups": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2, bias=False), (4, 5)),
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False)), (4, 5, 7)),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm(7)), (4, 5, 7)),
    "activations": (
        lambda: nn.Sequential(nn.ReLU(), nn.PReLU(), nn.ELU(), nn.LeakyReLU(), nn.ReLU6(), nn.GELU("tanh")),
        (4, 5),
    ),
    "pooling": (
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2, 1), nn.AdaptiveMaxPool2d(3), nn.AdaptiveAvgPool2d(1)),
        (4, 9, 12),
    ),
    "pooling with indices": (
        lambda: Lambda(lambda m, x: m.pool(x)[0], pool=nn.MaxPool2d(2, return_indices=True)),
        (4, 9, 12),
    ),
    "upsample": (lambda: nn.Upsample(scale_factor=2), (4, 5, 7)),
    "self-attention": (lambda: self_attention(batch_first=True), (5, 12)),
    "self-attention, time first": (self_attention, (1, 12)),
    "cross-attention": (cross_attention, (5, 12)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(12, 3, 20, activation=nn.GELU(), batch_first=True), (5, 12)),
}


@pytest.mark.parametrize("name", NETS)
def test_agrees_with_ptflops(name):
    make, shape = NETS[name]
    model, inputs = make(), torch.randn(1, *shape)
    assert flops(model, inputs).dense == 2 * ptflops_macs(model, inputs, count_functional=False) > 0


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.relu(x),
        lambda m, x: F.gelu(x),
        lambda m, x: F.silu(x),
        lambda m, x: F.softmax(x, dim=-1),
        lambda m, x: F.max_pool2d(x, 2),
        lambda m, x: F.adaptive_avg_pool2d(x, 1),
        lambda m, x: F.interpolate(x, scale_factor=2),
        lambda m, x: torch.add(x, 1.0),
        lambda m, x: torch.mul(x, x),
        lambda m, x: x + x * x,
        lambda m, x: torch.matmul(x, x.transpose(-1, -2)),
        lambda m, x: x[0].bmm(x[0].mT),
        lambda m, x: torch.addmm(x[0, 0] @ x[0, 0].T, x[0, 0], x[0, 0].T, beta=0),
    ],
)
def test_agrees_with_ptflops_on_functions(function):
    model, inputs = Lambda(function), torch.randn(1, 4, 6, 8)
    at = 2 * 6 * 6 * 8 if function(model, inputs).shape == (6, 6) else 0  # the `@`, which ptflops does not see
    assert flops(model, inputs).dense == 2 * ptflops_macs(model, inputs, count_functional=True) + at


@pytest.mark.parametrize(("name", "macs"), [("resnet50", 4_132_436_968), ("vit_b_16", 17_606_030_584)])
def test_agrees_with_ptflops_on_whole_models(name, macs):
    model, inputs = getattr(torchvision.models, name)().eval(), torch.randn(1, 3, 224, 224)
    count = flops(model, inputs)
    assert count.dense == 2 * ptflops_macs(model, inputs, count_functional=False)
    # By default ptflops counts the modules' activations and poolings a second time.
    twice = sum(layer.dense for layer in count.layers if layer.kind in DOUBLE_COUNTED)
    assert count.dense + twice == 2 * ptflops_macs(model, inputs, count_functional=True) == 2 * macs


def test_hand_count():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 2))
    count = flops(model, torch.randn(1, 3, 8, 8))
    assert count.layers == (
        LayerFlops("0", "Conv2d", *[2 * (36 * 4 * 27 + 36 * 4)] * 2),
        LayerFlops("1", "BatchNorm2d", *[2 * 2 * 144] * 2),
        LayerFlops("2", "ReLU", *[2 * 144] * 2),
        LayerFlops("4", "Linear", *[2 * (144 * 2 + 2)] * 2),
    )
    assert count.ratio == 1


def test_sparse_hand_count():
    model: Any = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2), nn.Flatten(2), nn.Linear(49, 5)
    )
    with torch.no_grad():
        model[0].weight[0] = 0  # 18 of 72
        model[2].weight[:, 1:] = 0  # 32 of 48
        model[4].weight.view(-1)[:100] = 0  # of 245
        model[4].bias.zero_()  # biases are dense
    count = flops(model, torch.randn(2, 2, 8, 8))
    assert rows(count) == {
        ("0", "Conv2d"): (2 * 36 * (72 + 4), 2 * 36 * (54 + 4)),
        ("1", "ReLU"): (2 * 144, 2 * 144),
        ("2", "ConvTranspose2d"): (2 * (36 * 48 + 147), 2 * (36 * 16 + 147)),
        ("4", "Linear"): (2 * 3 * (245 + 5), 2 * 3 * (145 + 5)),
    }
    assert count.ratio == count.sparse / count.dense < 1


@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention_of_unequal_widths(bias):
    model = nn.MultiheadAttention(12, 3, kdim=5, vdim=7, bias=bias, batch_first=True)
    q, k, v = torch.randn(2, 4, 12), torch.randn(2, 6, 5), torch.randn(2, 6, 7)
    products = 4 * 12 + 2 * 4 * 6 * 12 + 3 * 4 * 6
    biases = (4 + 6 + 6 + 4) * 12 if bias else 0
    dense = products + biases + 4 * 12 * 12 + 6 * 12 * 5 + 6 * 12 * 7 + 4 * 12 * 12
    assert flops(model, (q, k, v)).dense == 2 * dense
    with torch.no_grad():
        model.k_proj_weight.zero_()
        model.out_proj.weight[:6] = 0
    count = flops(model, (q, k, v))
    assert rows(count) == {("", "MultiheadAttention"): (2 * dense, 2 * (dense - 6 * 12 * 5 - 4 * 6 * 12))}
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")
    params = {name: model.get_parameter(name) for name in names}
    assert list(macs_per_parameter(model, params, (q, k, v)).values()) == [4, 6, 6, 4]


def test_in_proj_weight_zeros_count_where_they_lie():
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    inputs = (torch.randn(1, 3, 4), torch.randn(1, 9, 4), torch.randn(1, 9, 4))
    with torch.no_grad():
        model.in_proj_weight[:4] = 0  # the queries': 3 tokens
    count = flops(model, inputs)
    assert count.dense - count.sparse == 2 * 3 * 16


def test_extra_keys_of_attention():
    plain, extra = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, add_bias_kv=True, add_zero_attn=True)
    x = torch.randn(3, 1, 4)
    # Two more keys for 3 queries: products over 4 channels twice, and a softmax over 2 heads.
    assert 3 * (flops(extra, (x, x, x)).dense - flops(plain, (x, x, x)).dense) == 2 * 2 * 3 * (4 + 4 + 2)


def test_scaled_dot_product_attention_counts_like_multi_head_attention():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    x = torch.randn(2, 5, 12)
    count = flops(Attention(), x)
    assert count.dense == flops(nn.MultiheadAttention(12, 3, batch_first=True), (x, x, x)).dense
    assert [(layer.name, layer.kind) for layer in count.layers] == [
        ("qkv", "Linear"),
        ("", "scaled_dot_product_attention"),
        ("proj", "Linear"),
    ]


def test_fused_encoder_layers_are_counted_in_full():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    names = {layer.name for layer in flops(model, torch.randn(2, 3, 8)).layers}
    parts = ("", ".self_attn", ".norm1", ".linear1", ".linear2", ".norm2")
    assert names == {f"layers.{i}{part}" for i in (0, 1) for part in parts}


def test_functions_with_parameters_are_weights_too():
    weight = nn.Linear(6, 4, bias=False)
    with torch.no_grad():
        weight.weight[0] = 0
    x = torch.randn(2, 5, 6)
    for use in (
        lambda m, x: F.linear(x, m.fc.weight),
        lambda m, x: x @ m.fc.weight.t(),
        lambda m, x: torch.matmul(x, other=m.fc.weight.mT),
        lambda m, x: torch.addmm(torch.zeros(4), x.flatten(0, 1), m.fc.weight.t(), beta=0),
        lambda m, x: torch.cat([F.linear(x, part) for part in m.fc.weight.split((1, 3))], -1),
    ):
        model = Lambda(use, fc=weight)
        count = flops(model, x)
        assert (count.dense, count.sparse) == (2 * 5 * 24, 2 * 5 * 18)
        assert macs_per_parameter(model, {"fc.weight": weight.weight}, x) == {"fc.weight": 5}


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers(kind):
    model = kind(6, 4, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(3, 5, 6)
    assert flops(model, x).dense == 2 * 5 * sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        model.bias_ih_l0.zero_()
        model.weight_hh_l1.zero_()
    count = flops(model, x)
    assert count.dense - count.sparse == 2 * 5 * model.weight_hh_l1.numel()
    per_parameter = macs_per_parameter(model, {n: p for n, p in model.named_parameters() if p.dim() == 2}, x)
    assert set(per_parameter.values()) == {5}
    assert len(per_parameter) == 8


def test_rows_stay_right_after_a_caught_exception():
    def forward(m: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            m.fc(x)
        return F.relu(x)

    assert rows(flops(Lambda(forward, fc=nn.Linear(3, 2)), torch.randn(1, 5))) == {("", "relu"): (10, 10)}


def test_work_of_hooks_counts_for_the_module_around_them():
    model = nn.Linear(3, 2)
    model.register_forward_pre_hook(lambda module, args: (torch.mul(args[0], 2.0),))
    assert flops(model, torch.randn(1, 3)).dense == 2 * (6 + 2 + 3)


def test_sparse_tensors_as_factors():
    model = Lambda(lambda m, x: torch.eye(3).to_sparse() @ m.fc(x), fc=nn.Linear(3, 2, bias=False))
    assert flops(model, torch.randn(1, 3, 3)[0]).dense == 2 * (3 * 6 + 3 * 6) // 3


def test_batch_size_does_not_matter():
    model = torchvision.models.resnet18()
    one, five = (flops(model, torch.randn(n, 3, 32, 32)) for n in (1, 5))
    assert one == five


def test_kinds_of_inputs():
    model = Lambda(lambda m, x, y=None: m.fc(x if y is None else torch.add(x, y)), fc=nn.Linear(3, 2))
    x = torch.randn(4, 3)
    alone, both = 2 * (6 + 2), 2 * (6 + 2 + 3)
    assert flops(model, x).dense == flops(model, (x,)).dense == flops(model, {"x": x}).dense == alone
    assert flops(model, [x, x]).dense == flops(model, {"y": x, "x": x}).dense == both
    assert rows(flops(model, (x, x)))["", "add"] == (6, 6)
    with pytest.raises(ValueError, match="example_inputs"):
        flops(model, ())


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_the_model_as_it_was(fails):
    def forward(m: Any, x: Tensor) -> Tensor:
        m.bn.running_mean.add_(1)
        modes = (m.training, m.fc.training, torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled())
        assert not any(modes)
        x = F.dropout(m.bn(m.fc(x.add_(1))).relu_())
        if fails:
            raise ArithmeticError
        return x

    model: Any = Lambda(forward, fc=nn.Linear(3, 3), bn=nn.BatchNorm1d(3))
    model.bn.eval()
    x = torch.randn(4, 3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    versions = [value._version for value in model.state_dict().values()]
    rng, example = torch.get_rng_state(), x.clone()
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
        flops(model, x)
    assert [module.training for module in model.modules()] == [True, True, False]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [value._version for value in model.state_dict().values()] == versions
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.equal(x, example)
    assert torch.backends.mha.get_fastpath_enabled() is fastpath is True
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._forward_hooks_always_called for m in model.modules())
    assert torch.is_grad_enabled()


def test_the_fast_path_setting_is_restored_when_off():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        flops(nn.Linear(2, 2), torch.randn(1, 2))
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_wrapped_models_have_the_names_of_plain_ones():
    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    x = torch.randn(2, 3)
    plain = flops(model, x)
    assert flops(nn.DataParallel(model), x) == plain
    compiled: Any = torch.compile(model[1], backend="eager")
    assert flops(nn.Sequential(model[0], compiled), x) == plain
    compiled = torch.compile(model, backend="eager")
    assert flops(compiled, x) == plain
    names = [name for name, _ in compiled.named_parameters()]
    assert names[0] == "_orig_mod.0.weight"


def test_table():
    count = FlopCount((LayerFlops("conv", "Conv2d", 1500, 20), LayerFlops("", "add", 5, 5)))
    assert str(count).splitlines() == [
        "layer    kind    dense FLOPs  sparse FLOPs",
        "conv     Conv2d        1,500            20",
        "(model)  add               5             5",
        "total                  1,505            25",
    ]
    assert FlopCount(()).ratio == 1


def test_positions_in_resnet():
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    params = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    macs = macs_per_parameter(model, params, torch.empty(2, 3, 224, 224))
    assert macs.keys() == params.keys()
    assert macs["conv1.weight"] == 112 * 112
    assert macs["layer1.0.conv1.weight"] == macs["layer2.0.conv1.weight"] == 56 * 56
    assert macs["layer4.2.conv2.weight"] == 49
    assert macs["fc.weight"] == 1


def test_positions_in_vit():
    with torch.device("meta"):
        model = torchvision.models.vit_b_16()
    params = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    macs = macs_per_parameter(model, params, torch.empty(2, 3, 224, 224))
    assert macs.pop("conv_proj.weight") == 196
    assert macs.pop("heads.head.weight") == 1
    assert macs.pop("class_token") == macs.pop("encoder.pos_embedding") == 0
    assert set(macs.values()) == {197}
    assert len(macs) == 12 * 4


def test_positions():
    def macs(model: nn.Module, *inputs: Tensor) -> float:
        return next(iter(macs_per_parameter(model, dict(model.named_parameters()), inputs).values()))

    assert macs(nn.ConvTranspose2d(4, 6, 3, stride=2), torch.randn(2, 4, 5, 7)) == 35
    assert macs(nn.Conv2d(4, 8, 3, groups=4), torch.randn(2, 4, 5, 7)) == 15
    x, y = torch.randn(2, 3, 4), torch.randn(2, 9, 4)
    assert macs(nn.MultiheadAttention(4, 2, batch_first=True), x, y, y) == (3 + 9 + 9) / 3
    tied: Any = Lambda(lambda m, x: m.b(m.a(x)[:, :2]), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    tied.b.weight = tied.a.weight
    assert macs(tied, x) == 3 + 2
    names = {"a.weight": tied.a.weight, "b.weight": tied.b.weight}
    assert macs_per_parameter(tied, names, x) == {"a.weight": 5, "b.weight": 5}


def test_parameters_that_share_a_storage_are_told_apart():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Flatten(), nn.Linear(12, 2, bias=False))
    flat = torch.randn(16 + 24)
    model[0].weight = nn.Parameter(flat[:16].view(4, 4))
    model[2].weight = nn.Parameter(flat[16:].view(2, 12))
    macs = macs_per_parameter(model, dict(model.named_parameters()), torch.randn(2, 3, 4))
    assert macs == {"0.weight": 3, "2.weight": 1}
