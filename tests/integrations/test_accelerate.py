"""`attach(accelerator, model, optimizer, …)`, in a loop around accelerate; and the frameworks on two processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from spartan import Sparsifier, verify
from tests.distributed.workers import on
from tests.foreign import library
from tests.loops.small import SPARSITY, STEPS, data, loader, net, same_weights

pytestmark = pytest.mark.filterwarnings("ignore")
CLIP, SAVED = 0.3, 16


def loop(
    order: str,
    *,
    save: Path | None = None,
    resume: Path | None = None,
    seed: int = 0,
    registered: bool = False,
    shards: str = "",
) -> tuple[nn.Module, Sparsifier, list[float]]:
    """An ordinary loop around accelerate, with two lines of ours; the norms that clipping has seen."""
    accelerate = library("accelerate")
    from spartan.integrations.accelerate import attach

    if shards:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    if shards:
        with_shards(accelerator, shards)
    model: Any = net()
    if seed:
        torch.manual_seed(seed)
        model.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    if order == "before":
        sparsifier = attach(accelerator, model, optimizer, SPARSITY, STEPS)
    model, optimizer, batches = accelerator.prepare(
        model, optimizer, DataLoader(data(), 16 // accelerator.num_processes)
    )
    if order == "after":
        sparsifier = attach(accelerator, model, optimizer, SPARSITY, STEPS)
    if registered:
        accelerator.register_for_checkpointing(sparsifier)
    step, norms = 0, []
    if resume:
        accelerator.load_state(str(resume))
        step = SAVED
    while step < STEPS:
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
        if save and step == SAVED:
            accelerator.save_state(str(save))
    return accelerator.unwrap_model(model), sparsifier, norms


def plain_loop() -> tuple[nn.Module, list[float]]:
    model, norms = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    Sparsifier(model, SPARSITY, STEPS).attach(optimizer)
    for _ in range(STEPS // 8):
        for i, (x, y) in enumerate(loader()):
            (nn.functional.cross_entropy(model(x), y) / 2).backward()
            if i % 2:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
                optimizer.step()
                optimizer.zero_grad()
    return model, norms


@pytest.mark.parametrize("order", ["before", "after"])
def test_to_the_bit_and_resumed(order: str, tmp_path: Path) -> None:
    model, sparsifier, norms = loop(order, save=tmp_path)
    expected, theirs = plain_loop()
    assert same_weights(model, expected)
    assert norms == theirs
    again, its, _ = loop(order, resume=tmp_path, seed=5)
    assert same_weights(model, again)
    for each in (sparsifier, its):
        assert each.stats.step == STEPS
        each.finalize()
    verify(model, SPARSITY)


def test_registered_for_checkpointing(tmp_path: Path) -> None:
    """Saved twice then, which does no harm."""
    model, _, _ = loop("after", save=tmp_path, registered=True)
    assert (tmp_path / "custom_checkpoint_0.pkl").exists()
    assert same_weights(model, loop("after", resume=tmp_path, registered=True)[0])


def as_launched(rank: int) -> None:
    """What `accelerate launch --cpu` and torchrun tell a process."""
    os.environ.update(ACCELERATE_USE_CPU="true", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    library("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)


def on_two(rank: int, folder: str) -> dict[str, Any]:
    as_launched(rank)
    found: dict[str, Any] = {}
    for order in ("before", "after"):
        place = Path(folder) / order
        model, sparsifier, norms = loop(order, save=place)
        again, _, _ = loop(order, resume=place)
        sparsifier.finalize()
        found[order] = {n: p.detach() for n, p in model.named_parameters()}, norms, same_weights(model, again)
    model, _, _ = loop("after", seed=1 + rank)  # DDP gives every process the weights of the first
    found["kept"] = sum(int((p != 0).sum()) for p in model.parameters() if p.ndim == 2)
    try:
        loop("before", seed=1 + rank)
    except RuntimeError as error:
        found["other weights"] = str(error)
    return found


def test_two_processes(tmp_path: Path) -> None:
    """DDP by accelerate: the masks and the weights of one process, clipped by the same norm, whatever the order."""
    first, second = on(2, on_two, str(tmp_path))
    expected, norms = plain_loop()
    for order in ("before", "after"):
        weights, seen, resumed = first[order]
        assert resumed
        assert seen == pytest.approx(norms, rel=1e-3)
        for name, p in expected.named_parameters():
            assert torch.equal(weights[name], second[order][0][name])
            assert torch.equal(weights[name] != 0, p != 0)
            assert torch.allclose(weights[name], p, atol=1e-4)
    assert first["kept"] == second["kept"] == 230
    for each in (first, second):
        assert "the processes had begun with other weights" in each["other weights"]


def with_shards(accelerator: Any, kind: str) -> Any:
    """The accelerator, with FSDP2. Its own choice of a strategy asks for GPUs; FSDP2 itself does not."""
    accelerate = library("accelerate")
    for state in (accelerate.state.AcceleratorState, accelerate.state.PartialState):
        state._shared_state["distributed_type"] = accelerate.utils.DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate.utils.FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=kind, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
    )
    return accelerator


def in_shards(rank: int, folder: str, kind: str) -> tuple[list[Tensor], list[float], bool]:
    """The loop, with FSDP2 by accelerate: its hooks save and load the state of weights in shards."""
    as_launched(rank)
    place = Path(folder)
    model, sparsifier, norms = loop("after", save=place, shards=kind)
    again, its, _ = loop("after", resume=place, seed=3, shards=kind)
    assert (place / "spartan").is_dir()
    assert type(next(model.parameters()).data).__name__ == "DTensor"
    for each in (sparsifier, its):
        each.finalize()
    models: list[Any] = [model, again]
    whole, resumed = ([p.full_tensor().detach() for p in each.parameters()] for each in models)
    same = all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    return whole, norms, same and verify(again, SPARSITY).density <= 1 - SPARSITY


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.slow)])
def test_shards_on_two_processes(kind: str, tmp_path: Path) -> None:
    """FSDP2 by accelerate: the masks and the weights of one process, clipped by the same norm, saved and resumed."""
    expected, norms = plain_loop()
    weights, seen, resumed = on(2, in_shards, str(tmp_path), kind)[0]
    assert resumed
    assert seen == pytest.approx(norms, rel=1e-3)
    for mine, theirs in zip(weights, expected.parameters(), strict=True):
        assert torch.equal(mine != 0, theirs != 0)
        assert torch.allclose(mine, theirs, atol=1e-4)


def the_trainer(rank: int, folder: str, kind: str) -> tuple[dict[str, Tensor], list[float], str, bool]:
    """The Trainer of transformers on two processes, with DDP, or with FSDP2 and that kind of checkpoints."""
    from tests.integrations.language import SPARSITY as ASKED
    from tests.integrations.language import gpt2, trainer

    as_launched(rank)
    library("transformers")
    from spartan.integrations.transformers import SpartanCallback

    def run(resume: str | None = None, seed: int = 0) -> Any:
        library("accelerate").state.AcceleratorState._reset_state(reset_partial_state=True)
        found = trainer(
            Path(folder), model=gpt2(seed=seed), per_device_train_batch_size=1, ordered=False, logging_strategy="steps",
            logging_steps=1, save_strategy="steps", save_steps=10,
        )  # fmt: skip
        if kind != "DDP":
            with_shards(found.accelerator, kind)
            found.is_fsdp_enabled = True
        found.add_callback(SpartanCallback(ASKED))
        found.train(resume_from_checkpoint=resume)
        return found

    whole = run()
    norms = [row["grad_norm"] for row in whole.state.log_history if "grad_norm" in row]
    wrapped = type(whole.model_wrapped).__name__
    found = []
    for each in (whole, run(f"{folder}/checkpoint-10", seed=1)):
        named = each.model.named_parameters()
        found.append({n: (p if kind == "DDP" else p.full_tensor()).detach().clone() for n, p in named})
    return found[0], norms, wrapped, all(torch.equal(found[0][n], found[1][n]) for n in found[0])


@pytest.mark.parametrize(
    "kind",
    [
        "DDP",
        pytest.param("FULL_STATE_DICT", marks=pytest.mark.slow),
        pytest.param("SHARDED_STATE_DICT", marks=pytest.mark.slow),
    ],
)
def test_the_trainer_on_two_processes(kind: str, tmp_path: Path) -> None:
    """As on one process: clipped by the same norm, exactly sparse, resumed to the bit."""
    from tests.integrations.language import KEPT, trainer

    library("transformers")
    from spartan.integrations.transformers import SpartanCallback

    (first, seen, wrapped, resumed), (second, *_) = on(2, the_trainer, str(tmp_path / "two"), kind)
    alone = trainer(tmp_path / "alone", ordered=False, logging_strategy="steps", logging_steps=1)
    alone.add_callback(SpartanCallback(0.8))
    alone.train()
    norms = [row["grad_norm"] for row in alone.state.log_history if "grad_norm" in row]
    assert resumed
    assert wrapped == ("DistributedDataParallel" if kind == "DDP" else "FSDPGPT2LMHeadModel")
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert sum(int((p != 0).sum()) for n, p in first.items() if ".h." in n and p.ndim == 2) == KEPT
    assert seen == pytest.approx(norms, rel=1e-2)


def lightnings(rank: int, folder: str) -> tuple[dict[str, Tensor], str, bool]:
    """Lightning's Trainer on two processes, as torchrun starts it."""
    from tests.integrations.test_lightning import callback, module, package, saves, trainer

    as_launched(rank)
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0"}

    def run(place: Path, *callbacks: Any, resume: Path | None = None) -> Any:
        strategy = package().strategies.DDPStrategy(process_group_backend="gloo")
        found = trainer(
            place, [callback(), *callbacks], devices=2, strategy=strategy, use_distributed_sampler=False
        )  # which would shuffle
        mine = module()()
        every_other: Any = DistributedSampler(data(), 2, rank, shuffle=False)
        more = {} if resume is None else {"ckpt_path": str(resume), "weights_only": False}
        found.fit(mine, DataLoader(data(), 8, sampler=every_other), **more)
        return found, mine

    found, mine = run(Path(folder), saves(Path(folder)))
    _, again = run(Path(folder) / "b", resume=Path(folder) / "epoch=1.ckpt")
    weights = {n: p.detach().clone() for n, p in mine.net.named_parameters()}
    return weights, type(found.strategy).__name__, same_weights(mine, again)


@pytest.mark.slow
def test_lightning_on_two_processes(tmp_path: Path) -> None:
    """DDP by Lightning, whose steps have closures: as on one process, clipped by the same norm."""
    library("lightning")
    from tests.integrations.test_lightning import plain_loop as one_process

    (first, strategy, resumed), (second, _, _) = on(2, lightnings, str(tmp_path))
    assert strategy == "DDPStrategy"
    assert resumed
    assert all(torch.equal(first[n], second[n]) for n in first)
    # Each of two processes takes every other example, in batches of half the size.
    for name, p in one_process().named_parameters():
        assert torch.equal(first[name] != 0, p != 0)
        assert torch.allclose(first[name], p, atol=1e-4)
