"""From a trained run to a small file, a fast model and an ONNX file, as a user goes there; a line for every mistake."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import spartan
from spartan.app import bench
from spartan.app.cli import app
from spartan.app.terminal import status_line
from spartan.app.train.config import load_recipe
from spartan.app.train.data import build_data
from spartan.files import read
from spartan.inference.cpu.library import library
from spartan.inference.runtime import SparseLayer
from spartan.zoo import digits_cnn


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Choices of kernels that other tests do not see; the compiled library is loaded before."""
    library()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARTAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "measure", partial(bench.measure, seconds=0.1))  # shorter; who wins is not asked here


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, of some epochs so that its answers mean something."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    result = invoke("train", "digits", "--set", "epochs=6", "--out", out, "--quiet")
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Over a thousand real images, as the model sees them."""
    data = build_data(load_recipe("digits"), torch.device("cpu"))
    return torch.cat([x for x, _ in [*data.train(0), *data.test()]])


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def works(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def facts(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def plain_copy(run: Path, path: Path) -> Path:
    """The run's weights in a plain safetensors file, as other programs write them."""
    save_file(read(run / "model.safetensors"), path)
    return path


# ---------------------------------------------------------------------- the same answers


def test_a_thousand_real_images_get_the_same_answers(run: Path, images: Tensor) -> None:
    works("export", run, "--out", "small.safetensors")
    dense = spartan.load("small.safetensors", kernels="dense")
    model = digits_cnn().eval()
    model.load_state_dict(read(run / "model.safetensors"))
    sparse = spartan.load("small.safetensors", kernels="sparse")
    assert len(images) >= 1000
    assert sum(isinstance(m, SparseLayer) for m in sparse.modules()) == 4, "every layer is a sparse one"
    with torch.inference_mode():
        expected, again, got = model(images), dense(images), sparse(images)
    assert torch.equal(again, expected)
    assert torch.equal(got.argmax(1), expected.argmax(1))
    assert float((got - expected).abs().max()) <= 1e-4
    assert expected.argmax(1).unique().numel() == 10, "a net that has learned nothing would prove nothing"


def test_onnx_runtime_gives_the_same_answers(run: Path, images: Tensor) -> None:
    import onnxruntime

    text = facts(works("export", run, "--onnx", "net.onnx"))["onnx"]
    assert text.startswith(f"net.onnx, {Path('net.onnx').stat().st_size:,} bytes; ONNX Runtime and torch agree within")
    session = onnxruntime.InferenceSession("net.onnx", providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.inference_mode():
        expected = spartan.load("digits.safetensors", kernels="dense")(images)
    assert torch.equal(torch.from_numpy(got).argmax(1), expected.argmax(1))
    assert torch.allclose(torch.from_numpy(got), expected, atol=1e-4)


# ---------------------------------------------------------------------- export


def test_a_run_ends_with_a_packed_file_that_names_its_model(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    file = run / "model.safetensors"
    assert summary["model_bytes"] == file.stat().st_size
    state = spartan.load(file, kernels="dense").state_dict()
    assert summary["dense_bytes"] == sum(t.nbytes for t in state.values())
    assert summary["model_bytes"] < summary["dense_bytes"] / 10
    assert sum(int((state[layer["name"]] != 0).sum()) for layer in summary["layers"]) == summary["nonzero"]


def test_export_names_the_file_after_the_run(run: Path) -> None:
    said = facts(works("export", run))
    assert said["file"] == "digits.safetensors"
    assert said["model"] == "digits-cnn, 95.00% of the weights are zero"
    size = Path("digits.safetensors").stat().st_size
    assert said["packed"].startswith(f"{size:,} bytes, ")
    assert Path("digits.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    assert facts(works("export", "digits.safetensors"))["file"] == "digits-packed.safetensors"


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose zeros are whole channels."""
    out = tmp_path_factory.mktemp("runs") / "channels"
    settings = ("--set", "epochs=3", "--set", "pattern=channel", "--set", "sparsity=.5", "--set", "exclude=[11.weight]")
    result = invoke("train", "digits", *settings, "--out", out, "--quiet")
    assert result.exit_code == 0, result.output
    return out


def test_export_shrinks(channels: Path, images: Tensor) -> None:
    said = facts(works("export", channels, "--shrink", "--onnx", "narrow.onnx"))
    assert said["file"] == "channels-shrunk.safetensors"
    assert said["shrunk"].startswith("56,554 → ")
    assert said["onnx"].startswith("narrow.onnx, ")
    whole, narrow = (spartan.load(f, kernels="dense") for f in (channels / "model.safetensors", said["file"]))
    with torch.inference_mode():
        expected, got = whole(images), narrow(images)
    assert float((got - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    sizes = [sum(p.numel() for p in model.parameters()) for model in (whole, narrow)]
    assert said["shrunk"].startswith(f"{sizes[0]:,} → {sizes[1]:,} parameters")
    assert sizes[1] < 0.5 * sizes[0]
    # Every other command takes the file as it takes a run, by itself and with a recipe.
    assert "narrowed" in works("inspect", said["file"])
    assert f"dense, eager  {sum(t.nbytes for t in narrow.state_dict().values()):,}" in works(
        "bench", said["file"], "--batch", "1"
    )
    scores = [
        facts(works("evaluate", *target))["top-1"] for target in ((channels,), (said["file"], "--recipe", "digits"))
    ]
    assert scores[0] == scores[1]
    answers = works("bench", said["file"], "--recipe", "digits", "--batch", "1")
    assert "the same answer on 360 of 360 test images" in answers
    # Again: it is as narrow as it gets.
    again = facts(works("export", said["file"], "--shrink", "--out", "again.safetensors"))
    assert again["shrunk"] == "nothing is dead"


def test_export_shrink_says_what_stays(run: Path) -> None:
    """Single weights: hardly a channel is dead, and the classes are the model's output."""
    said = works("export", run, "--shrink", "--out", "narrow.safetensors")
    assert "\nshrunk   " in said


def test_export_rounds(run: Path) -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        said = facts(works("export", run, "--dtype", name))
        tensors = read(said["file"])
        weight = read(run / "model.safetensors")["6.weight"]
        assert said["file"] == f"digits-{name}.safetensors"
        assert torch.equal(tensors["6.weight"], weight.to(dtype))
        assert Path(said["file"]).stat().st_size < 0.7 * (run / "model.safetensors").stat().st_size


def test_plain_files_are_read_too(run: Path) -> None:
    plain = plain_copy(run, Path("plain.safetensors"))
    top1 = works("evaluate", run).splitlines()[0]
    assert works("evaluate", plain, "--recipe", "digits").splitlines()[0] == top1
    works("export", plain, "--recipe", "digits")
    assert Path("plain-packed.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    # A run of an older version.
    old = Path("old")
    shutil.copytree(run, old)
    plain.replace(old / "model.safetensors")
    assert works("evaluate", old).splitlines()[0] == top1
    assert "95.00% zeros" in works("bench", old, "--batch", 2)


def test_a_model_of_the_users_own_is_built_by_the_recipe_only() -> None:
    model = "--set=model=tests.app.train.small_models:dropout"
    works("train", "digits", "--set", "epochs=1", model, "--out", "own", "--quiet")
    said = facts(works("export", "own"))
    assert said["model"].startswith("tests.app.train.small_models:dropout, 95.0")
    assert "top-1" in works("bench", "own", "--batch", 1)
    result = invoke("bench", "own.safetensors")
    assert result.exit_code == 2
    assert "names a function, which is not called on a file's word; --recipe RECIPE names the model" in result.stderr
    with pytest.raises(ValueError, match="build the model and pass it"):
        spartan.load("own.safetensors")
    works("bench", "own.safetensors", "--recipe", "digits", model, "--batch", 1)


# ---------------------------------------------------------------------- inspect and bench


def test_inspect(run: Path) -> None:
    text = works("inspect", run)
    assert "checksum good" in text
    assert "3.weight   64×32×3×3  float32  gaps" in text
    assert "layer  kernel" not in text
    works("export", run)
    text = works("inspect", "digits.safetensors", "--kernels")
    layers = [line.split()[0] for line in text.split("layer  kernel")[1].splitlines()[1:]]
    assert layers == ["0", "3", "6", "11"]
    assert library() is None or "input 1×32×8×8" in text, "the layer's own shape"


@pytest.mark.parametrize("with_file", [False, True])
def test_bench(run: Path, with_file: bool) -> None:
    summary = json.loads((run / "summary.json").read_text())
    threads = torch.get_num_threads()
    if with_file:
        works("export", run, "--out", "m.safetensors")
        text = works("bench", "m.safetensors", "--recipe", "digits", "--batch", "2", "--onnx")
    else:
        text = works("bench", run, "--batch", "1,3", "--threads", 2)
        assert "2 threads" in text
    assert torch.get_num_threads() == threads
    table = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert f"{summary['dense_bytes']:,}" in table["dense, eager"]
    assert f"{summary['model_bytes']:,} (" in table["spartan"]
    assert table["spartan"].count(" ms (") == (1 if with_file else 2)
    for name in ("dense, eager", "spartan", *(["dense, ONNX Runtime"] if with_file else [])):
        assert table[name].endswith(f"{summary['top1']:.2%}")
    assert "the same answer on 360 of 360 test images" in text
    assert [line.split()[0] for line in text.splitlines()[-4:]] == ["0", "3", "6", "11"]


def test_bench_without_images(run: Path) -> None:
    works("export", run, "--out", "m.safetensors")
    assert "--recipe RECIPE says on which images" in works("bench", "m.safetensors", "--batch", 1)
    assert "100 test images (of 360)" in works("bench", run, "--batch", 1, "--images", 100)
    text = works("bench", run, "--batch", 1, "--images", 0, "--set", "data.source=npz")
    assert "top-1" not in text, "and the images need not be there"


def test_something_is_said_while_it_takes_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("spartan.app.terminal.time.monotonic", lambda: now[0])
    with status_line("reading") as tell:
        tell("at once")
        now[0] = 3.0
        tell("three seconds later")
    assert capsys.readouterr().err == "three seconds later ...\n"


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "nowhere"], "nowhere: there is no such run folder or file"),
        (["export", "RUN", "--dtype", "int8"], "--dtype: 'int8'; one of fp32, bf16, fp16 is needed"),
        (["export", "RUN", "--out", "no/x.safetensors"], "--out: no folder no"),
        (["export", "RUN", "--out", "."], "--out: . is a folder"),
        (["export", "RUN", "--onnx", "no/x.onnx"], "--onnx: no folder no"),
        (["export", "RUN", "--out", "RUN/model.safetensors"], "is the file to export; choose another name"),
        (["export", "RUN", "--recipe", "digits"], "--recipe: "),
        (["export", "plain.safetensors"], "a file needs --recipe RECIPE"),
        (["export", "plain.safetensors", "--recipe", "digits", "--set", "model=wrn-16-1"], "do not fit model wrn-16-1"),
        (
            ["export", "nameless.safetensors"],
            "does not say which model its weights belong to; --recipe RECIPE names the model",
        ),
        (["export", "broken.safetensors"], "cannot be read as safetensors"),
        (["export", "damaged.safetensors"], "damaged.safetensors: is damaged"),
        (["inspect", "nowhere"], "nowhere: there is no such file"),
        (["inspect", "."], ".: there is no finished run in this folder"),
        (["inspect", "plain.safetensors"], "was not written by spartan.save"),
        (["inspect", "damaged.safetensors"], "damaged.safetensors: is damaged"),
        (["bench", "nowhere"], "nowhere: there is no such run folder or file"),
        (["bench", "RUN", "--batch", "0"], "--batch: '0'; numbers from 1 on"),
        (["bench", "RUN", "--batch", "1,,8"], "--batch: '1,,8'"),
        (["bench", "RUN", "--batch", "8,8"], "--batch: '8,8'"),
        (["bench", "RUN", "--set", "data.source=npz"], "data.path: not set"),
        (["bench", "nameless.safetensors", "--set", "seed=1"], "--set changes keys of a recipe"),
    ],
)
def test_a_mistake_is_one_line(run: Path, arguments: list[str], words: str) -> None:
    plain_copy(run, Path("plain.safetensors"))
    spartan.save(digits_cnn(), "nameless.safetensors")
    whole = (run / "model.safetensors").read_bytes()
    Path("broken.safetensors").write_bytes(whole[:1000])
    Path("damaged.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    before = sorted(Path().iterdir())
    result = invoke(*(a.replace("RUN", str(run)) for a in arguments))
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert words in result.stderr
    assert sorted(Path().iterdir()) == before, "nothing is written"


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        (["export", "RUN", "--onnx", "net.onnx"], "onnxruntime", "onnx"),
        (["export", "RUN", "--onnx", "net.onnx"], "onnxscript", "onnx"),
        (["bench", "RUN", "--onnx"], "onnxruntime", "onnx"),
        (["bench", "RUN", "--openvino"], "openvino", "bench"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(
    run: Path, arguments: list[str], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else find_spec(name, *a))
    result = invoke(*(a.replace("RUN", str(run)) for a in arguments))
    assert result.exit_code == 2, result.output
    option = next(a for a in arguments if a.startswith("--"))
    assert result.stderr == f"error: {option} needs {package}: pip install 'spartan-sparsity[{extra}]'\n"
    assert not list(Path().iterdir())


def test_help_teaches() -> None:
    for command, words in {
        "export": "spartan export runs/imp --onnx imp.onnx",
        "inspect": "spartan inspect runs/imp --kernels",
        "bench": "spartan bench runs/imp --batch 1,8,64",
    }.items():
        assert command in invoke("--help").stdout
        assert words in works(command, "--help")
