"""The GPU part of bench_inference.py (`--device cuda`): bfloat16, one device.

First single layers at 12,608 tokens (64 images of ViT-B/16), then whole models, the quickest to measure first: every line is
printed as soon as it is known, so that a run that is cut off has said what it found. No new contender is begun after
`--seconds`. With `--append` layers are written at once, models at the end, when the best dense one is known.

Layers: times are of the device alone (calls replayed from a CUDA graph, four inputs taking turns so that none waits in the
L2 cache). The floor is the larger of two times: input and output moved once at the speed of a device copy, and the products
of the kept blocks at the rate of a dense product of 8192³.
Models: calls behind each other, launches included, unless the name says "graph" (a CUDA graph, dense as well as ours).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spartan import Block, prune
from spartan.inference.convert import accelerate, explain
from spartan.inference.cpu.ops import ACTIVATIONS
from spartan.inference.gpu import choice
from spartan.inference.gpu.linear import DeviceLinear, Launch
from spartan.inference.gpu.tiles import blocks_of
from spartan.inference.runtime import DenseLinear

TOKENS, DTYPE = 12608, torch.bfloat16
LAYERS = [(768, 3072, "gelu"), (3072, 768, "none"), (768, 2304, "none")]
Run = Callable[[], Tensor]
# case, batch or tokens, contender, least and median seconds, ratio to dense
Row = tuple[str, int, str, float, float, float]


@dataclass
class Report:
    """Where figures go, and how long there is to find them."""

    write: Callable[[Row], None]
    seconds: float
    begin: float = field(default_factory=time.perf_counter)

    def late(self, what: str) -> bool:
        """Whether there is no time left for `what`; if so, says it."""
        spent = time.perf_counter() - self.begin
        if spent > self.seconds:
            print(f"  {what}: left out, {spent:.0f} s are spent (--seconds {self.seconds:g})", flush=True)
        return spent > self.seconds


def seconds(run: Run, calls: int, rounds: int) -> list[float]:
    """Seconds a call, in order, of each round of `calls` calls behind each other."""
    run()
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / calls)
    return sorted(found)


def device_seconds(call: Callable[[Tensor], Tensor], inputs: list[Tensor]) -> list[float]:
    """Seconds of a call on the device alone."""

    def turns() -> Tensor:
        return [call(x) for x in inputs * 2][-1]

    return [t / (2 * len(inputs)) for t in seconds(choice.graph_of(turns), 1, 15)]


def limits() -> tuple[float, float]:
    """Bytes a second of a device copy, and multiplications a second of a large dense product."""
    a = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    copied = 2 * a.numel() / seconds(lambda: b.copy_(a), 3, 7)[0]
    x = torch.randn(8192, 8192, device="cuda", dtype=DTYPE)
    return copied, 8192**3 / seconds(lambda: x @ x, 3, 7)[0]


# ---------------------------------------------------------------------- single layers


def random_layers(block: int) -> Iterator[tuple[str, Tensor, str]]:
    for inputs, outputs, activation in LAYERS:
        torch.manual_seed(0)
        layer = prune(nn.Linear(inputs, outputs).cuda(), 0.9, pattern=Block(block, block))
        yield f"{inputs}→{outputs}, {block}×{block}", layer.weight.detach().to(DTYPE), activation


def learned_layers(model: nn.Module, name: str) -> Iterator[tuple[str, Tensor, str]]:
    """One layer of each size that has zeros, of middling density."""
    sizes: dict[tuple[int, ...], list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.dim() == 2 and float((parameter == 0).float().mean()) >= 0.3:
            sizes.setdefault(tuple(parameter.shape), []).append(parameter.detach())
    for (outputs, inputs), weights in sizes.items():
        weights.sort(key=lambda w: int((w != 0).sum()))
        yield f"{inputs}→{outputs}, {name}", weights[len(weights) // 2].to(DTYPE), "none"


def random_launches(count: int, seed: int = 0) -> list[Launch]:
    """Launches drawn at random from all that make sense: to find better ones for `choice.LAUNCHES`."""
    every = [
        Launch(tokens, warps, stages, span, loads)
        for tokens in (64, 128, 256)
        for warps in (4, 8)
        for stages in (2, 3, 4, 5)
        for span in (32, 64, 128, 256, 512, 1024, 4096)
        for loads in ("async", "tma", "tma in")
        if tokens >= 16 * warps
    ]
    every += [Launch(tokens, 4, 1, span, "l1") for tokens in (64, 128) for span in (512, 1024, 4096)]
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(seed)).tolist()
    return [every[i] for i in order[:count]]


def bench_layers(
    layers: Iterator[tuple[str, Tensor, str]], report: Report, peaks: tuple[float, float], wide: int
) -> None:
    copied, products = peaks
    for name, weight, activation in layers:
        if report.late(name):
            return
        outputs, inputs = weight.shape
        xs = [torch.randn(TOKENS, inputs, device="cuda").to(DTYPE) for _ in range(4)]
        bias = torch.randn(outputs, device="cuda").to(DTYPE)
        kept = TOKENS * int(blocks_of(weight != 0, 16, 16).sum()) * 256
        floor = max(TOKENS * (inputs + outputs) * 2 / copied, kept / products)
        plain = DenseLinear(weight, bias)
        options = [tiling for tiling, _ in choice.candidates(weight)]
        kernels: dict[str, choice.TileKernel | str | None] = {
            str(kernel): kernel for kernel in choice.tile_kernels(options, choice.LAUNCHES + random_launches(wide), 2)
        }
        times = choice.measure(plain, tuple(xs[0].shape), DTYPE, kernels)
        ranked = [key for key in sorted(times, key=lambda key: times[key]) if times[key] < float("inf")]
        print(f"\n{name}: floor {1e6 * floor:.1f} µs; {len(times) - len(ranked)} of {len(times)} kernels failed")
        dense = device_seconds(lambda x, w=weight: F.linear(x, w), xs)  # type: ignore[misc]
        _line(
            report, name, "F.linear", dense, dense[0], f"{outputs * inputs * TOKENS * 2 / dense[0] / 1e12:.0f} TFLOP/s"
        )
        for key in ranked[: 5 if wide else 2]:
            kernel = kernels[key]
            assert kernel is not None
            fast = device_seconds(choice.build(plain, kernel), xs)
            note = f"{2 * kept / fast[0] / 1e12:.0f} TFLOP/s of kept blocks, {fast[0] / floor:.2f}x the floor"
            _line(report, name, key, fast, dense[0], note)
        if activation != "none" and ranked:
            act = ACTIVATIONS[activation][1]
            dense = device_seconds(lambda x, w=weight, b=bias, f=act: f(F.linear(x, w, b)), xs)  # type: ignore[misc]
            best = kernels[ranked[0]]
            assert best is not None
            fast = device_seconds(choice.build(DenseLinear(weight, bias, activation), best), xs)
            _line(report, name, f"F.linear, bias, {activation}", dense, dense[0], "")
            _line(report, name, f"the first, bias, {activation}", fast, dense[0], "")


def _line(report: Report, case: str, contender: str, times: list[float], dense: float, note: str) -> None:
    least, median = times[0], times[len(times) // 2]
    print(
        f"  {contender:<62} {1e6 * least:7.1f} µs (median {1e6 * median:7.1f})  {dense / least:5.2f}x  {note}",
        flush=True,
    )
    report.write((case, TOKENS, contender, least, median, dense / least))


# ---------------------------------------------------------------------- whole models


@dataclass
class Contest:
    """The contenders on one batch; ratios are to the best dense one so far, and the last word is `summary`."""

    batch: int
    report: Report
    times: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)  # least and median seconds

    def add(self, case: str, contender: str, run: Run) -> None:
        """Time a contender; the case "dense" is what the others are compared with."""
        name = f"{case} {contender}, batch {self.batch}"
        if self.report.late(name):
            return
        begin = time.perf_counter()
        try:
            times = seconds(run, 3, 9)
        except Exception as error:  # one that cannot run leaves the others their turn
            torch.cuda.synchronize()  # unless the device is lost: then this fails, too
            print(f"  {name}: failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return
        least, median = times[0], times[len(times) // 2]
        self.times[case, contender] = least, median
        ratio = self.best()[1] / least
        spent = time.perf_counter() - begin
        print(
            f"  {name:<52} {1e3 * least:8.3f} ms (median {1e3 * median:8.3f})  {ratio:5.2f}x  [{spent:.0f} s]",
            flush=True,
        )

    def best(self) -> tuple[str, float]:
        """The best dense contender so far, and its time."""
        dense = {contender: least for (case, contender), (least, _) in self.times.items() if case == "dense"}
        name = min(dense, key=lambda contender: dense[contender], default="none")
        return name, dense.get(name, float("nan"))

    def summary(self) -> None:
        """Everything against the best dense of all; only now is it known what to write."""
        name, best = self.best()
        print(f"\nbatch {self.batch}: best dense is {name}, {1e3 * best:.3f} ms")
        for (case, contender), (least, median) in self.times.items():
            print(f"  {case:<12} {contender:<24} {1e3 * least:8.3f} ms  {best / least:5.2f}x")
            self.report.write((f"{case} bf16", self.batch, contender, least, median, best / least))


def parts(model: nn.Module, x: Tensor) -> str:
    """What the device spends its time on."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        model(x)
        torch.cuda.synchronize()
    total = ours = attention = 0.0
    for event in trace.key_averages():
        total += event.self_device_time_total
        ours += event.self_device_time_total * ("tile_linear" in event.key)
        attention += event.self_device_time_total * any(
            word in event.key.lower() for word in ("flash", "fmha", "attention")
        )
    rest = total - ours - attention
    return f"sparse layers {ours / 1e3:.2f} ms, attention {attention / 1e3:.2f} ms, the rest {rest / 1e3:.2f} ms"


def bench_models(models: dict[str, nn.Module], shape: tuple[int, ...], batches: list[int], report: Report) -> None:
    """Models with the same layers and other zeros: the dense ones take equally long, so one of them stands for all."""
    contests = [Contest(batch, report) for batch in batches]
    inputs = {batch: torch.randn(batch, *shape, device="cuda").to(DTYPE) for batch in batches}
    try:
        _run_contests(contests, models, inputs)
    finally:
        for contest in contests:
            contest.summary()


def _run_contests(
    contests: list[Contest],
    models: dict[str, nn.Module],
    inputs: dict[int, Tensor],
) -> None:
    first, report = next(iter(models)), contests[0].report
    fast: dict[tuple[str, int], nn.Module] = {}
    for contest in contests:
        batch, dense = contest.batch, models[first]
        x = inputs[batch]
        contest.add("dense", "eager", lambda m=dense, x=x: m(x))  # type: ignore[misc]
        contest.add("dense", "eager, graph", _lazy(lambda m=dense, x=x: choice.graph_of(lambda: m(x))))  # type: ignore[misc]
        for name, model in models.items():
            if report.late(f"{name} ours, batch {batch}"):
                continue
            begin = time.perf_counter()
            quick = fast[name, batch] = accelerate(model, example_inputs=x)
            sparse = sum(isinstance(m, DeviceLinear) for m in quick.modules())
            out, expected = quick(x).float(), model(x).float()
            gap = float((out - expected).abs().max() / expected.abs().max())
            same = float((out.argmax(-1) == expected.argmax(-1)).float().mean())
            print(
                f"  {name}: {sparse} sparse layers, error {gap:.0e}, top-1 equal {same:.1%}, chosen in "
                f"{time.perf_counter() - begin:.0f} s; {parts(quick, x)}"
            )
            print(f"    {next((line for line in explain(quick) if line.kernel != 'dense'), 'every layer is dense')}")
            contest.add(name, "ours", lambda m=quick, x=x: m(x))  # type: ignore[misc]
            if not sparse:  # called as it is, the dense model is faster; a graph launches both at once
                quick = fast[name, batch] = accelerate(model, "sparse", example_inputs=x)
            contest.add(name, "ours, graph", _lazy(lambda m=quick, x=x: choice.graph_of(lambda: m(x))))  # type: ignore[misc]
    # Compilation takes longest: the default one of every model, then the search for dense kernels.
    for contest in contests:
        x = inputs[contest.batch]
        _add_compiled(contest, "dense", "compiled", models[first], x, None)
        for name in models:
            if (name, contest.batch) in fast:
                _add_compiled(contest, name, "ours, compiled", fast[name, contest.batch], x, None)
    for contest in contests:
        x = inputs[contest.batch]
        _add_compiled(contest, "dense", "max-autotune", models[first], x, "max-autotune-no-cudagraphs")


def _lazy(make: Callable[[], Run]) -> Run:
    """A run that is made when it is first called: what fails in the making fails in its turn."""
    made: list[Run] = []

    def run() -> Tensor:
        if not made:
            made.append(make())
        return made[0]()

    return run


def _add_compiled(contest: Contest, case: str, name: str, model: nn.Module, x: Tensor, mode: str | None) -> None:
    """A compiled model, as it is and, if that ran, as a CUDA graph."""

    def make() -> Run:
        torch.compiler.reset()
        compiled = torch.compile(copy.deepcopy(model), mode=mode, dynamic=False)
        return lambda: compiled(x)

    run = _lazy(make)
    contest.add(case, name, run)
    if (case, name) in contest.times:
        contest.add(case, f"{name}, graph", _lazy(lambda: choice.graph_of(run)))


def bench(
    models: dict[str, Callable[[], nn.Module]],
    shape: tuple[int, ...],
    batches: list[int],
    learned: bool,
    write: Callable[[Row], None],
    limit: float,
    wide: int,
) -> None:
    """Everything, in the order in which it is worth most.

    Args:
        models: by name, as they are made.
        shape: of one image.
        batches: numbers of images.
        learned: whether the models' own layers are to be timed, not random ones.
        write: takes each figure as soon as it is there.
        limit: seconds after which nothing new is begun.
        wide: so many more launches, drawn at random, are timed for each layer.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda: there is no CUDA device here")
    report = Report(write, limit)
    with torch.inference_mode():
        peaks = limits()
        print(f"copy {peaks[0] / 1e12:.2f} TB/s, dense product {2 * peaks[1] / 1e12:.0f} TFLOP/s")
        made = {}
        if learned:
            made = {name: make().to("cuda", DTYPE).eval() for name, make in models.items()}
            for name, model in made.items():
                bench_layers(learned_layers(model, name), report, peaks, wide)
        else:
            for block in (64, 32, 16):
                bench_layers(random_layers(block), report, peaks, wide)
        print(f"\nmodels ({time.perf_counter() - report.begin:.0f} s so far)", flush=True)
        made = made or {name: make().to("cuda", DTYPE).eval() for name, make in models.items()}
        bench_models(made, shape, batches, report)
    print(f"\n{time.perf_counter() - report.begin:.0f} s in all")
