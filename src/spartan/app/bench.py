"""Measures a model with dense layers beside the same model on sparse kernels, on this CPU: the work of `spartan bench`."""

import copy
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import spartan
from spartan.app.train.data import Data, build_data
from spartan.app.trained import CPU, Trained
from spartan.wording import one_line

if TYPE_CHECKING:
    from spartan.inference.convert import Explanation

Call = Callable[[Tensor], Any]
Tell = Callable[[str], None]
EAGER, COMPILED, OURS = "dense, eager", "dense, torch.compile", "spartan"
ONNX, OPENVINO = "dense, ONNX Runtime", "dense, OpenVINO"
# Which extra of the package brings what an option needs.
NEEDS = {
    "--onnx": {"onnx": "onnx", "onnxscript": "onnx", "onnxruntime": "onnx"},
    "--openvino": {"onnx": "onnx", "onnxscript": "onnx", "openvino": "bench"},
}


@dataclass(frozen=True)
class Answers:
    """What both models say about the same test images, or after the same bytes."""

    images: int
    of: int
    before: float
    after: float
    same: int
    gap: float
    task: str = "images"


@dataclass
class Result:
    """Sizes in bytes, seconds by batch and contender, layers' kernels by batch, and the answers."""

    dense_bytes: int
    packed_bytes: int
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    kernels: dict[int, "list[Explanation]"] = field(default_factory=dict)
    answers: Answers | None = None


def check_installed(option: str) -> None:
    """ValueError that names the extra where an option's packages are missing."""
    missing = {name: extra for name, extra in NEEDS[option].items() if importlib.util.find_spec(name) is None}
    if missing:
        extras = ",".join(sorted(set(missing.values())))
        raise ValueError(f"{option} needs {' and '.join(missing)}: pip install 'spartan-sparsity[{extras}]'")


@torch.inference_mode()
def bench(trained: Trained, batches: Sequence[int], rivals: Sequence[str], images: int, tell: Tell) -> Result:
    """Measure everything: a table's worth.

    Args:
        trained: the model.
        batches: how many images at once, one after the other.
        rivals: of COMPILED, ONNX and OPENVINO, those to measure besides.
        images: compare the answers on so many test images at most; 0 for none.
        tell: is given a line about what is being done.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = trained.path
        if not trained.packed:
            path = Path(folder) / "packed.safetensors"
            spartan.save(trained.model, path)
        result = Result(trained.dense_bytes, path.stat().st_size)
        # What a user gets: the file's tensors in the model's layers.
        model = spartan.load(path, copy.deepcopy(trained.model), kernels="dense")
        data = build_data(trained.config, CPU) if images and trained.config is not None else None
        fast = model
        for batch in batches:
            tell(f"batch {batch}: choosing kernels")
            x = trained.noise(batch)
            fast = spartan.accelerate(model, example_inputs=x)
            result.kernels[batch] = spartan.explain(fast)
            runs = _rivals(trained.model, x, rivals, Path(folder), tell)
            tell(f"batch {batch}: timing")
            result.seconds[batch] = measure(runs | {OURS: fast}, x)
            if COMPILED in runs:
                torch.compiler.reset()
        if data is not None:
            result.answers = compare(trained.model, fast, data, images, tell)
    return result


def measure(runs: Mapping[str, Call], x: Tensor, seconds: float = 1.0, rounds: int = 3) -> dict[str, float]:
    """The least time of a call by contender, who take turns so that a busy moment hits them all.

    Args:
        runs: what to time, by name.
        x: its input.
        seconds: go on for about so long a contender.
        rounds: and for so many turns at least, of three timed calls each.

    Example:
        >>> times = measure({"sum": torch.sum, "sort": torch.sort}, torch.rand(100_000), seconds=0.05)
        >>> times["sum"] < times["sort"]
        True
    """
    least = dict.fromkeys(runs, float("inf"))
    begin, turn = time.perf_counter(), 0
    while turn < rounds or time.perf_counter() - begin < seconds * len(runs):
        for name, run in runs.items():
            time.sleep(0.02)  # for another library's threads to stop spinning
            run(x)
            for _ in range(3):
                start = time.perf_counter()
                run(x)
                least[name] = min(least[name], time.perf_counter() - start)
        turn += 1
    return least


@torch.inference_mode()
def compare(model: nn.Module, fast: nn.Module, data: Data, images: int, tell: Tell) -> Answers:
    """Both models' answers on a data set's first test images."""
    seen = answers = before = after = same = 0
    gap, total = 0.0, min(images, data.test_size)
    for x, y in data.test():
        x, y = x[: total - seen], y[: total - seen]
        if not len(y):
            break
        dense, ours = model(x), fast(x)
        a, b = dense.argmax(-1), ours.argmax(-1)  # of text, at every position
        before, after, same = before + int((a == y).sum()), after + int((b == y).sum()), same + int((a == b).sum())
        gap, seen = max(gap, float((dense - ours).abs().max())), seen + len(y)
        answers += y.numel()
        tell(f"comparing answers: {seen:,} of {total:,} {data.unit}")
    each = answers // seen
    return Answers(answers, data.test_size * each, before / answers, after / answers, same, gap, data.task)


def _rivals(model: nn.Module, x: Tensor, names: Sequence[str], folder: Path, tell: Tell) -> dict[str, Call]:
    runs: dict[str, Call] = {EAGER: model}
    if COMPILED in names:
        tell(f"batch {len(x)}: torch.compile")
        runs[COMPILED] = torch.compile(model)
        try:
            runs[COMPILED](x)
        except Exception as error:  # no compiler, for one
            raise ValueError(f"--compile: torch.compile fails here: {one_line(error)[:300]}") from None
    if ONNX in names or OPENVINO in names:
        tell(f"batch {len(x)}: writing ONNX")
        with torch.inference_mode(False):
            file = write_onnx(model, folder / "model.onnx", x, dynamic_batch=False)
        if ONNX in names:
            runs[ONNX] = onnx_runtime(file)
        if OPENVINO in names:
            runs[OPENVINO] = _openvino(file)
    return runs


def write_onnx(model: nn.Module, path: Path, x: Tensor, dynamic_batch: bool = True) -> Path:
    """`export_onnx` without the exporter's warnings about torch itself, which a user can do nothing about."""
    with warnings.catch_warnings(action="ignore"):
        return spartan.export_onnx(model, path, x, dynamic_batch=dynamic_batch)


def onnx_runtime(path: Path) -> Callable[[Tensor], Tensor]:
    """A file in ONNX Runtime, as a function."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def _openvino(path: Path) -> Callable[[Tensor], Tensor]:
    import openvino

    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    settings["INFERENCE_NUM_THREADS"] = torch.get_num_threads()
    request = openvino.Core().compile_model(str(path), "CPU", settings).create_infer_request()
    return lambda x: torch.from_numpy(request.infer([x.numpy()])[0])
