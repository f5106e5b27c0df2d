"""`spartan train` with parallel=fsdp2 on real processes: the run of one process, in shards."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from spartan import Sparsifier
from spartan.app.train.checkpoint import CheckpointError, checkpoints
from spartan.app.train.config import from_dict
from spartan.app.train.parallel import blocks, on_meta, precision
from spartan.app.train.processes import Processes
from spartan.app.train.shards import ShardedCheckpoints
from spartan.app.train.small_images import _digits
from spartan.zoo import WideResNet, digits_cnn
from tests.app.train import samples
from tests.app.train.small_models import resnet, vit
from tests.distributed.launching import Launched, launch, wait_for, weights
from tests.distributed.test_application_torchrun import torchrun, worker
from tests.distributed.workers import on

array_file, image_folder = samples.npz, samples.folder  # fixtures
HERE = "tests.distributed.test_app_fsdp"
LEARNS: tuple[str, ...] = ("epochs=1", "batch_size=64", "sparsity=0.8", "optimizer.lr=0.3", "optimizer.warmup_epochs=0")
LEARNS += (f"model={HERE}:residual",)
FSDP = ("parallel=fsdp2",)


class Block(nn.Module):
    """A residual block whose norm does not ask how a batch is divided."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(torch.relu(self.norm(x)))


class Residual(nn.Module):
    """Float64, so that rounding decides nothing; of 15 and 10 rows, so that shards are uneven."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, 2, 1)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.neck, self.head = nn.Linear(256, 15), nn.Linear(15, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x.to(self.stem.weight.dtype))).flatten(1)
        return self.head(torch.relu(self.neck(x)))


def residual(classes: int) -> nn.Module:
    return Residual(classes).double()


class Scaled(Residual):
    """Has a buffer that no state dict holds."""

    scale: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("scale", torch.full((1,), 0.75), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


def noted(classes: int) -> nn.Module:
    """Leaves a note of where it was built."""
    model = Scaled(classes).double()
    device = next(model.parameters()).device.type
    Path(f"built-by-{os.environ.get('RANK', 0)}-on-{device}").touch()
    return model


def looking(classes: int) -> nn.Module:
    """Looks at its weights while it is built."""
    model = Residual(classes)
    assert float(model.head.weight.abs().sum()) > 0
    return model


def tied(classes: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(classes, classes), nn.Linear(classes, classes))
    model[1].weight = model[0].weight
    return model


def single(classes: int) -> nn.Module:
    return Residual(classes)


class Reaching(Residual):
    """Goes around its blocks to the layers inside, where FSDP2 does not notice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv in (module for module in self.blocks.modules() if isinstance(module, nn.Conv2d)):
            x = conv(x)
        return self.head(self.neck(x.flatten(1)))


def reaching(classes: int) -> nn.Module:
    return Reaching(classes)


def one_to_test() -> list[np.ndarray]:
    """Fewer test images than processes."""
    x_train, y_train, x_test, y_test = _digits(from_dict({}))
    return [x_train, y_train, x_test[:1], y_test[:1]]


def train(*sets: str, out: str = "run") -> list[object]:
    return ["train", "digits", "--out", out, *(x for s in sets for x in ("--set", s))]


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    return [x for x in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if x["kind"] == kind]


def same(run: Path, reference: Path, most: float = 0.0) -> None:
    """The same weights, of the same kind, with the same zeros."""
    a, b = weights(run), weights(reference)
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name] != 0, b[name] != 0), name
        assert (a[name] - b[name]).abs().max() <= most, name
    assert (run / "masks.npz").read_bytes() == (reference / "masks.npz").read_bytes()


def stopped(folder: Path, world: int, *sets: str) -> Path:
    """A run that was asked to stop on its way."""
    run = folder / "run"
    with Launched(folder, world, *train(*LEARNS, *sets, "checkpoint_steps=6")) as processes:
        wait_for(lambda: checkpoints(run))
        os.kill(processes.pids[world - 1], signal.SIGTERM)
        assert processes.wait() == [128 + signal.SIGTERM] * world, processes.err(0)
    assert not (run / "summary.json").exists()
    return run


def resume(run: Path, world: int, *sets: str) -> None:
    launch(run.parent, world, "train", "--resume", run.name, *(x for s in sets for x in ("--set", s)))


# ---------------------------------------------------------------------- the same run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    launch(folder, 1, *train(*LEARNS))
    return folder / "run"


@pytest.mark.parametrize(
    ("world", "more"),
    [(2, ()), (4, ("micro_batch=8", "checkpoint_async=true", "checkpoint_steps=5"))],
    ids=["2", "4 accumulating, saving on the side"],
)
def test_shards_change_nothing_but_rounding(alone: Path, tmp_path: Path, world: int, more: tuple[str, ...]) -> None:
    processes = launch(tmp_path, world, *train(*LEARNS, *FSDP, *more))
    run = tmp_path / "run"
    same(run, alone, 1e-12)
    for mine, theirs in zip(lines(run, "step"), lines(alone, "step"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert mine["density"] == theirs["density"]
    for mine, theirs in zip(lines(run, "epoch"), lines(alone, "epoch"), strict=True):
        assert (mine["top1"], mine["top5"]) == (theirs["top1"], theirs["top5"]), "every test image counts once"
        assert mine["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-6)
        assert mine["mask_histogram"] == theirs["mask_histogram"]
    assert lines(run, "epoch")[-1]["top1"] > 0.3, "it learns something"
    summaries = [json.loads((r / "summary.json").read_text()) for r in (run, alone)]
    for key in ("nonzero", "parameters", "layers", "flops_sparse", "dense_bytes", "model_bytes"):
        assert summaries[0][key] == summaries[1][key], key
    kept = sum(int((w != 0).sum()) for name, w in weights(run).items() if w.ndim > 1)
    counted = sum(w.numel() for name, w in weights(run).items() if w.ndim > 1)
    assert kept == int(0.2 * counted + 1e-9)
    assert [processes.out(r) + processes.err(r) for r in range(1, world)] == [""] * (world - 1), "only one speaks"
    assert {p.suffix for p in checkpoints(run)} == {".shards"}
    assert not list((run / "checkpoints").glob("*.tmp"))


def test_no_process_but_the_first_builds_the_model_with_its_weights(tmp_path: Path) -> None:
    """The others have it on the meta device until it is sharded; then each gets its part, and buffers."""
    sets = (*LEARNS[:-1], f"model={HERE}:noted")
    launch(tmp_path / "one", 1, *train(*sets))
    launch(tmp_path / "two", 2, *train(*sets, *FSDP))
    assert sorted(p.name for p in (tmp_path / "one").glob("built-*")) == ["built-by-0-on-cpu"]
    built = ["built-by-0-on-cpu", "built-by-0-on-meta", "built-by-1-on-meta"]
    assert sorted(p.name for p in (tmp_path / "two").glob("built-*")) == built
    same(tmp_path / "two" / "run", tmp_path / "one" / "run", 1e-12)


def test_models_that_need_their_weights_are_built_with_them() -> None:
    before = torch.get_rng_state()
    found = on_meta(lambda: residual(4))
    assert found is not None
    assert all(p.is_meta for p in found.parameters())
    assert on_meta(lambda: looking(4)) is None
    assert on_meta(lambda: tied(4)) is None
    assert torch.equal(before, torch.get_rng_state())


def test_fewer_test_images_than_processes(tmp_path: Path) -> None:
    """Every forward pass is work of all, so who has nothing to test runs along."""
    sets = (*LEARNS, f"data.source={HERE}:one_to_test", "clip=null", "optimizer.lr=0.1")
    launch(tmp_path / "one", 1, *train(*sets))
    launch(tmp_path / "two", 2, *train(*sets, *FSDP))
    one, two = (lines(tmp_path / name / "run", "epoch")[-1] for name in ("one", "two"))
    assert (one["top1"], one["top5"]) == (two["top1"], two["top5"])
    assert one["test_loss"] == pytest.approx(two["test_loss"], rel=1e-6)


# ---------------------------------------------------------------------- stopping and going on


def test_a_run_in_shards_goes_on_with_another_number_of_processes(alone: Path, tmp_path: Path) -> None:
    run = stopped(tmp_path, 2, *FSDP)
    for world in (1, 4):
        copy = Path(shutil.copytree(run, tmp_path / f"on {world}" / "run"))
        resume(copy, world)
        same(copy, alone, 1e-12)
        losses = [[x["loss"] for x in lines(r, "step")] for r in (copy, alone)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("method=movement",), ("method=rigl",), ("pattern=nm:2:4", "sparsity=0.5")])
@pytest.mark.parametrize(
    ("before", "after"), [((2, "ddp"), (4, "fsdp2")), ((2, "fsdp2"), (2, "ddp")), ((1, "ddp"), (2, "fsdp2"))]
)
def test_shards_and_copies_go_on_from_each_other(
    tmp_path: Path, before: tuple[int, str], after: tuple[int, str], more: tuple[str, ...]
) -> None:
    if more and more[0].startswith("pattern"):
        more = (*more, "exclude=[stem.weight,neck.weight,head.weight]")
    launch(tmp_path / "alone", 1, *train(*LEARNS, *more))
    run = stopped(tmp_path, before[0], f"parallel={before[1]}", *more)
    resume(run, after[0], f"parallel={after[1]}")
    same(run, tmp_path / "alone" / "run", 1e-12)


# Batch norm's statistics are each process's own.
NORMED = ("epochs=2", "batch_size=128", "sparsity=0.8", "checkpoint_steps=4", "checkpoint_async=true", *FSDP)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    launch(folder, 2, *train(*NORMED))
    return folder / "run"


def test_killed_at_any_moment_a_run_ends_the_same(undisturbed: Path, tmp_path: Path) -> None:
    """Also while a checkpoint is being written on the side."""
    run = tmp_path / "run"
    with Launched(tmp_path, 2, *train(*NORMED)) as both:
        wait_for(lambda: checkpoints(run))
        for pid in both.pids.values():
            os.kill(pid, signal.SIGKILL)
        assert both.wait() == [-signal.SIGKILL] * 2
    assert not (run / "summary.json").exists()
    resume(run, 2)
    same(run, undisturbed)
    assert not list((run / "checkpoints").glob("*.tmp"))


@pytest.mark.slow
def test_torchrun_replaces_a_killed_worker(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with torchrun(tmp_path, *train(*NORMED, out=str(run)), restarts=1) as process:
        wait_for(lambda: checkpoints(run))
        os.kill(worker(process.pid, 1), signal.SIGKILL)
        assert process.wait(120) == 0, (tmp_path / "err").read_text()
    said = (tmp_path / "out").read_text()
    assert f"continuing {run} on 2 processes" in said
    assert said.count("epoch 2/2") == 1
    same(run, undisturbed)


def test_a_damaged_part_is_found_and_the_checkpoint_before_it_taken(alone: Path, tmp_path: Path) -> None:
    run = stopped(tmp_path, 2, *FSDP, "checkpoint_steps=3")
    newest, _ = checkpoints(run)
    part = newest / "__1_0.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 0xFF
    part.write_bytes(bytes(data))
    with Launched(tmp_path, 2, "train", "--resume", "run") as both:
        assert both.wait() == [0, 0], both.err(0)
    words = f"warning: {newest.name} is damaged: the checksum of __1_0.distcp does not match; continuing from the one before"
    assert words in both.err(0)
    assert both.err(1) == ""
    same(run, alone, 1e-12)


def full_disk(rank: int, folder: str) -> list[str]:
    """What two checkpoints that do not fit say, written at once and on the side, after one that does."""
    us, model = Processes(rank, 2, rank), nn.Linear(400, 400)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = Sparsifier(model, sparsity=0.5, total_steps=4).attach(optimizer)
    ShardedCheckpoints(us, background=False).save(Path(folder), 1, {"step": 1}, model, optimizer, sparsifier)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    found = []
    for background in (False, True):
        parts = ShardedCheckpoints(us, background)
        try:
            parts.save(Path(folder), 2, {"step": 2}, model, optimizer, sparsifier)
            parts.wait()
        except CheckpointError as error:
            found.append(str(error))
    return found


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_ones(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for found in on(2, full_disk, str(tmp_path)):
        assert len(found) == 2
        for words in found:
            assert re.search(
                "could not write checkpoint .*step-00000002.shards: .*; the last good one is step-00000001", words
            )
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001.shards"]


# ---------------------------------------------------------------------- failing together


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("nan_gradients", 1, "error: the gradient of 1.weight holds NaN or infinite values at step 2"),
        ("fails", 2, "error: process 1 has had enough"),
    ],
)
def test_what_fails_one_fails_all_with_the_same_words(tmp_path: Path, model: str, code: int, words: str) -> None:
    sets = (f"model=tests.app.train.small_models:{model}", "model_args={rank: 1}", "clip=null", *FSDP)
    with Launched(tmp_path, 2, *train(*sets)) as both:
        assert both.wait(30) == [code] * 2
    assert all(both.err(rank).splitlines()[-1].startswith(words) for rank in range(2)), both.err(0) + both.err(1)


def test_a_block_that_is_not_called_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with Launched(tmp_path, 2, *train(f"model={HERE}:reaching", *FSDP)) as both:
        assert both.wait(30) == [2, 2]
    assert f"error: model: {HERE}:reaching cannot take (1, 8, 8) images with parallel: fsdp2: " in both.err(0)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------- in one process


@pytest.mark.parametrize("source", ["npz", "imagefolder"])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_everyone_knows_how_many_batches_there_are_to_test(
    source: str, world: int, array_file: Path, image_folder: Path
) -> None:
    path = array_file if source == "npz" else image_folder
    all_of = [samples.build(source, path, batch=8, image_size=8, us=Processes(r, world)) for r in range(world)]
    assert {data.test_batches for data in all_of} == {max(len(list(data.test())) for data in all_of)}


def test_blocks_are_residual_blocks_and_transformer_layers() -> None:
    assert [type(b).__name__ for b in blocks(WideResNet(10, 1, 10))] == ["WideBlock"] * 3
    assert [type(b).__name__ for b in blocks(resnet(10))] == ["Bottleneck"] * 4
    assert [type(b).__name__ for b in blocks(vit(10))] == ["EncoderBlock"] * 4
    assert blocks(digits_cnn()) == []


def test_blocks_that_share_weights_stay_together() -> None:
    model: Any = Residual(10)
    assert len(blocks(model)) == 2
    model.blocks[1].conv.weight = model.blocks[0].conv.weight
    assert blocks(model) == []
    model = Residual(10)
    model.stem.bias = model.blocks[0].norm.bias
    assert blocks(model) == []


def test_what_is_sent_in_half_precision() -> None:
    half = from_dict({"amp": "bf16"})
    assert precision(half, Residual(10)).param_dtype == torch.bfloat16
    assert precision(half, Residual(10)).reduce_dtype == torch.float32
    assert precision(half, digits_cnn()).param_dtype is None, "batch norm keeps its own in 32 bits"
    assert precision(from_dict({"amp": "fp16"}), Residual(10)).param_dtype is None
