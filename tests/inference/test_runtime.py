"""Accelerated models: the same function, clear refusals, and the layers' manners."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import spartan
from spartan import Block
from spartan.inference.convert import _usual_shape, accelerate, explain
from spartan.inference.cpu import choice, library
from spartan.inference.cpu.ops import Conv
from spartan.inference.fuse import fold_batch_norm, fuse, plain_conv
from spartan.inference.runtime import DenseConv2d, DenseLinear, InferenceLayer, PackedLayer, SparseLinear
from spartan.inference.stand_ins import Attention, MaxPool
from tests.foreign import Experts
from tests.torchvision_cpu import torchvision

needs_kernels = pytest.mark.skipif(library.library() is None, reason=f"no compiled kernels here: {library.status()}")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.library()  # compiled, where need be, into the user's cache; the choices go to this one
    monkeypatch.setenv("SPARTAN_CACHE", str(tmp_path))


def stir(model: nn.Module) -> nn.Module:
    """Batch norms that do something, as after training."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, -1, 1)
            nn.init.normal_(module.bias, 0, 0.1)
    return model.eval()


def same(fast: nn.Module, model: nn.Module, *inputs: Tensor) -> None:
    with torch.no_grad():
        got, expected = fast(*inputs), model.eval()(*inputs)
    assert (got - expected).abs().max() <= 1e-4
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    assert expected.std() > 1e-3, "a constant would hide everything"


class Tangle(nn.Module):
    """What must not be merged: a convolution used twice, one whose output is used twice, hooks, shared batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.seen, self.hooked = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norm, self.other, self.last = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.hooked.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.twice(x))
        x = F.relu(self.norm(self.twice(x)))
        y = self.seen(x)
        x = self.other(y) + y
        return self.last(self.hooked(x)).mean((2, 3))


class Switch(nn.Module):
    """A forward that a trace would get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor, raw: bool = False) -> Tensor:
        x = self.conv(x)
        return (x if raw else self.norm(x)).mean((2, 3))


def resnet(name: str) -> tuple[nn.Module, Tensor]:
    return stir(getattr(torchvision.models, name)(num_classes=10)), torch.randn(2, 3, 64, 64)


@pytest.mark.parametrize("kernels", ["auto", "sparse"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet(name: str, kernels: str) -> None:
    model, x = resnet(name)
    spartan.prune(model, 0.9, budget="uniform")
    fast = accelerate(model, kernels, example_inputs=x)
    same(fast, model, x)
    same(fast, model, torch.randn(1, 3, 97, 70))
    assert type(fast) is type(model)
    assert not [m for m in fast.modules() if isinstance(m, nn.BatchNorm2d)], "every batch norm is folded"
    block = fast.get_submodule("layer2.0")
    assert isinstance(block, fx.GraphModule)
    assert not [n for n in block.graph.nodes if n.op != "call_module" and n.op not in ("placeholder", "output")]
    lines = {line.layer: line for line in explain(fast)}
    assert len(lines) == sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules())
    if kernels == "sparse" and library.library():
        assert all(isinstance(m, PackedLayer) for m in fast.modules() if isinstance(m, InferenceLayer))
        assert lines["layer1.0.conv1"].kernel.startswith("lanes")
        assert "90.0% zeros" in lines["layer1.0.conv1"].why


@pytest.mark.parametrize("pattern", [Block(16, 16), Block(8, 1), Block(32, 32), None], ids=str)
def test_vision_transformer(pattern: Block | None) -> None:
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10)
    for head in model.heads:
        nn.init.normal_(head.weight, std=0.5)
    spartan.prune(model, 0.8, pattern=pattern, budget="uniform", exclude=["conv_proj*", "heads*"])
    fast, x = accelerate(model, "sparse", example_inputs=torch.randn(2, 3, 32, 32)), torch.randn(5, 3, 32, 32)
    same(fast, model, x)
    sparse = [name for name, m in fast.named_modules() if isinstance(m, SparseLinear)]
    assert len(sparse) == 2 * 4
    first = fast.get_submodule("encoder.layers.encoder_layer_0.mlp.0")
    assert isinstance(first, SparseLinear)
    assert first.activation == "gelu"


def test_what_must_not_be_merged() -> None:
    model, x = stir(Tangle()), torch.randn(2, 8, 9, 9)
    spartan.prune(model, 0.8)
    fast = accelerate(model, "sparse", example_inputs=x)
    same(fast, model, x)
    assert sum(isinstance(m, nn.BatchNorm2d) for m in fast.modules()) == 3
    other = stir(Switch())
    spartan.prune(other, 0.8)
    quick, x = accelerate(other, "sparse"), torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        assert torch.allclose(quick(x, True), other(x, True), atol=1e-5)
        assert torch.allclose(quick(x), other(x), atol=1e-5)


def test_a_dense_layer_without_a_bias_adds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias of zeros is read and added as any other."""
    given: list[Tensor | None] = []
    plain = F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        given.append(bias)
        return plain(x, weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    layer = nn.Linear(6, 4, bias=False)
    x = torch.randn(3, 6)
    torch.testing.assert_close(
        DenseLinear(layer.weight, layer.bias)(x), plain(x, layer.weight.detach()), rtol=0, atol=0
    )
    assert given == [None]
    conv = nn.Conv2d(3, 4, 3, bias=False)
    constants = plain_conv(conv)
    assert constants is not None
    images = torch.randn(1, 3, 5, 5)
    torch.testing.assert_close(DenseConv2d(conv.weight, conv.bias, constants)(images), conv(images).detach())


def test_fold_batch_norm() -> None:
    conv, norm = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)
    stir(nn.Sequential(norm)).double()
    conv.double()
    conv.weight.data[0] = 0.0
    weight, bias = fold_batch_norm(conv.weight, conv.bias, norm)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    assert torch.allclose(F.conv2d(x, weight, bias), norm(conv(x)), atol=1e-12)
    assert not weight[0].signbit().any()


def test_fuse_puts_the_residual_and_the_activation_into_the_convolution() -> None:
    model, x = resnet("resnet18")
    before = model(x)
    fuse(model)
    assert torch.allclose(model(x), before, atol=1e-5)
    block = model.get_submodule("layer1.0")
    assert isinstance(block, fx.GraphModule)
    assert next(n.kwargs for n in block.graph.nodes if n.target == "conv2").keys() == {"residual"}
    second = block.conv2
    assert isinstance(second, DenseConv2d)
    assert second.activation == "relu"


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kernel", [("rows", 16, 8), ("lanes", 1, 1)], ids=str)
def test_attention(batch_first: bool, kernel: tuple[str, int, int]) -> None:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(32, 4, batch_first=batch_first).eval()
    nn.init.normal_(plain.in_proj_bias)
    spartan.prune(plain, 0.8, pattern=Block(16, 1))
    ours = Attention(plain)
    ours.in_proj = SparseLinear(ours.in_proj.weight, ours.in_proj.bias, kernel)
    ours.out_proj = SparseLinear(ours.out_proj.weight, ours.out_proj.bias, kernel)
    x, y = torch.randn(5, 6, 32), torch.randn(5, 6, 32)
    images, tokens = (5, 6) if batch_first else (6, 5)
    causal = torch.ones(tokens, tokens).triu(1).bool()
    padding = torch.zeros(images, tokens).bool()
    padding[0, -1] = True
    calls: list[tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = [
        ((x, x, x), {}),
        ((x, x, x), {"need_weights": False}),
        ((x, y, y), {"need_weights": False, "key_padding_mask": padding}),
        ((x, y, x), {"average_attn_weights": False, "attn_mask": causal}),
        ((x, x, x), {"need_weights": False, "attn_mask": causal, "is_causal": True, "key_padding_mask": padding}),
        ((x, x, x), {"attn_mask": torch.randn(images * 4, tokens, tokens), "need_weights": False}),
        ((x[0], x[0], x[0]), {}),
    ]
    with torch.no_grad():
        for args, options in calls:
            got, expected = ours(*args, **options), plain(*args, **options)
            assert torch.allclose(got[0], expected[0], atol=1e-5), options
            assert (got[1] is None) == (expected[1] is None)
            assert got[1] is None or torch.allclose(got[1], expected[1], atol=1e-5)
    with pytest.raises(RuntimeError, match="is_causal hint"):
        ours(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="add_bias_kv"):
        Attention(nn.MultiheadAttention(32, 4, add_bias_kv=True))


def test_transformer_encoder_of_torch() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    )
    model.eval()
    spartan.prune(model, 0.8)
    fast, x = accelerate(model, "sparse"), torch.randn(3, 7, 32)
    same(fast, model, x)
    padding = torch.zeros(3, 7).bool()
    padding[1, 4:] = True
    with torch.no_grad():
        got, expected = fast(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding)
    assert torch.allclose(got[~padding], expected[~padding], atol=1e-5)


def test_bfloat16() -> None:
    model, x = resnet("resnet18")
    spartan.prune(model, 0.9, budget="uniform")
    model, x = model.bfloat16(), x.bfloat16()
    fast = accelerate(model, "sparse", example_inputs=x)
    with torch.no_grad():
        got, expected = fast(x), copy.deepcopy(model).float()(x.float())
    assert got.dtype == torch.bfloat16
    assert (got - expected).abs().max() <= 0.03 * expected.abs().max()


def test_values_follow_the_model_to_bfloat16_and_back() -> None:
    layer = SparseLinear(torch.eye(8) * 0.1, None, ("lanes", 1, 1)).bfloat16()
    assert layer.values.dtype == torch.float32
    assert torch.equal(layer.weight, (torch.eye(8) * 0.1).bfloat16().float())


def test_no_training_no_gradients() -> None:
    fast = accelerate(spartan.prune(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), 0.9), "sparse")
    with pytest.raises(RuntimeError, match="cannot be trained"):
        fast.train()
    x = torch.randn(2, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="no gradients"):
        fast(x)
    with torch.inference_mode():
        assert fast(x).shape == (2, 32)
    assert not list(fast.parameters())


def test_inputs() -> None:
    layer = nn.Linear(24, 40)
    spartan.prune(layer, 0.8)
    conv = nn.Conv2d(8, 16, 3, padding=1, stride=2)
    spartan.prune(conv, 0.8)
    fast, fast_conv = accelerate(layer, "sparse"), accelerate(conv, "sparse")
    with torch.no_grad():
        for x in (torch.randn(24, 7).T, torch.randn(2, 3, 4, 24), torch.randn(5, 48)[:, ::2], torch.randn(24)):
            assert torch.allclose(fast(x), layer(x), atol=1e-5)
        image = torch.randn(2, 8, 9, 10)
        for x in (image.to(memory_format=torch.channels_last), image[:, :, 1:, ::2], image[0]):
            assert torch.allclose(fast_conv(x), conv(x), atol=1e-5)
    with pytest.raises(ValueError, match="dimension -1 must be 24"):
        fast(torch.randn(3, 25))
    with pytest.raises(ValueError, match="float32 and bfloat16"):
        fast(torch.randn(3, 24).half())
    with pytest.raises(ValueError, match="smaller than the kernel"):
        accelerate(nn.Sequential(spartan.prune(nn.Conv2d(8, 16, 5), 0.8)), "sparse")(torch.randn(1, 8, 3, 3))


def test_copies_and_state() -> None:
    model, x = resnet("resnet18")
    spartan.prune(model, 0.9, budget="uniform")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fast = accelerate(model, "sparse", example_inputs=x)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items()), "the model is left alone"
    with torch.no_grad():
        expected = fast(x)
        assert torch.equal(copy.deepcopy(fast)(x), expected)
        file = io.BytesIO()
        torch.save(fast.state_dict(), file)
        file.seek(0)
        twin = accelerate(model, "sparse", example_inputs=x)
        for buffer in twin.buffers():
            buffer.zero_()
        twin.load_state_dict(torch.load(file))
        assert torch.equal(twin(x), expected)


def test_the_fall_back_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = resnet("resnet18")
    spartan.prune(model, 0.9, budget="uniform")
    fast = accelerate(model, "sparse", example_inputs=x)
    monkeypatch.setattr("spartan.inference.runtime.library", lambda: None)
    same(copy.deepcopy(fast), model, x)


WINDOWS: list[tuple[Any, Any, Any]] = [(3, 2, 1), (2, 2, 0), ((3, 5), (1, 3), (1, 2)), (4, 5, 2)]


@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@pytest.mark.parametrize("kernels", [True, False])
def test_max_pool(kernel: Any, stride: Any, padding: Any, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels:
        monkeypatch.setattr("spartan.inference.stand_ins.library", lambda: None)
    plain = nn.MaxPool2d(kernel, stride, padding)
    ours, x = MaxPool(plain), torch.randn(2, 3, 11, 14)
    x[0, 0, 4, 4], x[1, 1] = torch.nan, -torch.inf
    wide = torch.randn(1, 2, 5, 5000)
    for image in (
        x,
        x[0],
        x.to(memory_format=torch.channels_last),
        x.bfloat16(),
        x[..., :5, :6],
        wide,
        wide.bfloat16(),
    ):
        assert torch.equal(ours(image).nan_to_num(7.0), plain(image).nan_to_num(7.0))
    assert torch.equal(ours(x.double()).nan_to_num(7.0), plain(x.double()).nan_to_num(7.0))
    assert ours(x[:0]).shape == plain(x[:0]).shape
    with pytest.raises(RuntimeError, match="no gradients"):
        ours(x.clone().requires_grad_())
    with pytest.raises(ValueError, match="smaller than the window"):
        MaxPool(nn.MaxPool2d(5))(x[..., :3, :])
    assert not MaxPool.suits(nn.MaxPool2d(3, ceil_mode=True))
    assert not MaxPool.suits(nn.MaxPool2d(3, return_indices=True))
    assert MaxPool.suits(plain)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_max_pool_on_several_threads(threads: int) -> None:
    plain = nn.MaxPool2d(3, 2, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for images in (1, 2, 5):
            x = torch.randn(images, 5, 9, 12)
            assert torch.equal(MaxPool(plain)(x), plain(x))
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_the_choice_is_measured_once_and_kept(tmp_path: Path) -> None:
    model = spartan.prune(nn.Linear(256, 256), 0.95)
    x = torch.randn(64, 256)
    first = explain(accelerate(model, example_inputs=x))[0]
    assert "ms" in first.why
    kept = json.loads((tmp_path / "choices.json").read_text())
    ((key, times),) = kept.items()
    assert "dense" in times
    assert "(64, 256)" in key
    # What is on disk is what counts: a made-up winner wins.
    loser = max(times, key=times.get)
    (tmp_path / "choices.json").write_text(json.dumps({key: {**times, loser: 0.0}}))
    assert explain(accelerate(model, example_inputs=x))[0].kernel == loser


@needs_kernels
@pytest.mark.parametrize(
    "damage",
    [
        "{damaged", "", "[]", "null", "[" * 100_000, b"\xff\xfe\x00", '{"KEY": {"dense": "fast"}}',
        '{"KEY": []}', '{"KEY": {}}', '{"KEY": {"dense": NaN}}', '{"KEY": {"dense": -1}}', '{"KEY": {"dense": true}}',
        '{"other": 3}', '{"KEY": {"dense": null}}',
    ],
)  # fmt: skip
def test_a_damaged_choice_is_told_and_measured_again(tmp_path: Path, damage: str | bytes) -> None:
    model, x = spartan.prune(nn.Linear(256, 256), 0.95), torch.randn(64, 256)
    accelerate(model, example_inputs=x)
    path = tmp_path / "choices.json"
    ((key, _),) = json.loads(path.read_text()).items()
    whole = {"kept": {"dense": 1.0}}
    text = damage.replace("KEY", json.dumps(key)[1:-1]) if isinstance(damage, str) else damage
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.warns(UserWarning, match=r"choices.json is damaged: kernels whose times it lost are timed again"):
        assert "ms" in explain(accelerate(model, example_inputs=x))[0].why
    assert "ms" in explain(accelerate(model, example_inputs=x))[0].why, "and it is whole again"
    path.write_text(json.dumps(whole | {"other": 3}))
    with pytest.warns(UserWarning, match="is damaged"):
        accelerate(model, example_inputs=x)
    assert set(json.loads(path.read_text())) == {key, "kept"}, "what could be read is kept"


@needs_kernels
def test_candidates_follow_the_pattern() -> None:
    def best(pattern: Block | None, conv: bool = False) -> tuple[str, int, int]:
        layer = spartan.prune(nn.Conv2d(16, 64, 3) if conv else nn.Linear(256, 256), 0.9, pattern=pattern)
        dense = accelerate(layer, "dense")
        if conv:
            exposed = DenseConv2d(dense.weight, None, Conv((3, 3), (1, 1), (0, 0), (1, 1), 1, 16))
            return choice.candidates(exposed)[0][0]
        return choice.candidates(accelerate_exposed(dense))[0][0]

    def accelerate_exposed(layer: nn.Module):
        from spartan.inference.runtime import DenseLinear

        assert isinstance(layer.weight, Tensor)
        return DenseLinear(layer.weight, None)

    assert best(None) == ("lanes", 1, 1)
    assert best(Block(32, 32))[0] == "rows"
    assert best(Block(32, 32))[1] in (16, 32)
    assert best(Block(8, 8), conv=True) == ("lanes", 8, 1)
    assert best(None, conv=True) == ("lanes", 1, 1)


def test_explain_and_the_other_kernels() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    dense = accelerate(model, "dense")
    assert [str(line) for line in explain(dense)] == ["0: dense (as it was given)", "2: dense (as it was given)"]
    assert type(dense[0]) is nn.Linear
    untouched = explain(accelerate(model))
    assert {line.kernel for line in untouched} == {"dense"}
    with pytest.raises(ValueError, match="kernels='fast'; one of 'auto', 'dense', 'sparse'"):
        accelerate(model, "fast")
    with pytest.raises(ValueError, match="sparse kernels for the CPU"):
        accelerate(nn.Linear(4, 4), "sparse", device="meta")


def test_zeros_that_no_kernel_knows_are_told() -> None:
    """An LSTM's, a 1-d convolution's, and those of experts in one tensor."""
    model = nn.ModuleDict({"lstm": nn.LSTM(8, 16), "conv": nn.Conv1d(8, 16, 3), "experts": Experts(4, 8, 16)})
    spartan.prune(model, 0.9)
    told = {line.layer: str(line) for line in explain(accelerate(model))}
    for name, kind in (("lstm", "LSTM"), ("conv", "Conv1d"), ("experts", "Experts")):
        assert told[name].startswith(f"{name}: dense (")
        assert told[name].endswith(f" zeros: there is no kernel for {kind})")
    assert not explain(nn.ModuleDict({"lstm": nn.LSTM(8, 16), "conv": nn.Conv1d(8, 16, 3)}))


def test_a_wrong_copy_is_never_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = resnet("resnet18")
    spartan.prune(model, 0.9, budget="uniform")
    broken = lambda weight, bias, norm: (weight, torch.zeros(len(weight)))  # noqa: E731
    monkeypatch.setattr("spartan.inference.fuse.fold_batch_norm", broken)
    with pytest.raises(RuntimeError, match="differs from the model's"):
        accelerate(model, "sparse", example_inputs=x)


@needs_kernels
@pytest.mark.parametrize("faster", ["rows 16×8", "dense"])
def test_a_large_layer_without_zeros_takes_what_is_faster(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a kernel for whole weights, too; small layers, and `kernels="sparse"`, leave it out."""
    seen: list[list[str]] = []

    def measured(case: Any, measure: Any, kernels: Any) -> dict[str, float]:
        seen.append(list(kernels))
        times = measure()
        return {name: (0.0 if name == faster else 1.0) for name in times}

    monkeypatch.setattr(choice, "measured", measured)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 511))
    x = torch.randn(3, 512)
    fast = accelerate(model, example_inputs=x)
    assert seen == [["rows 16×8", "dense"]], "the second one is too small"
    assert [line.kernel for line in explain(fast)] == [faster, "dense"]
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    assert [line.kernel for line in explain(accelerate(model, kernels="sparse"))] == ["dense", "dense"]


def test_layers_of_many_outputs_are_timed_on_few_tokens() -> None:
    """256 tokens would take a thousand times what the weight does."""
    wide, narrow = (DenseLinear(torch.zeros(n, 4), None) for n in (1_000_000, 64))
    assert _usual_shape(wide) == (8, 4)
    assert _usual_shape(narrow) == (256, 4)
    many, large = (plain_conv(nn.Conv2d(2, n, k)) for n, k in ((500_000, 1), (8, 31)))
    assert many is not None
    assert large is not None
    assert _usual_shape(DenseConv2d(torch.zeros(500_000, 2, 1, 1), None, many)) == (1, 2, 4, 4)
    assert _usual_shape(DenseConv2d(torch.zeros(8, 2, 31, 31), None, large)) == (1, 2, 31, 31)


def test_a_kernel_larger_than_the_usual_image_is_no_mistake() -> None:
    torch.manual_seed(0)
    model = spartan.prune(nn.Conv2d(4, 16, 31), 0.99)
    x = torch.randn(1, 4, 40, 40)
    torch.testing.assert_close(spartan.accelerate(model, kernels="sparse")(x), model(x), rtol=1e-3, atol=1e-4)
