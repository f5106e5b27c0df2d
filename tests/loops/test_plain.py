"""Loops without a framework: one in the manner of nanoGPT, one in the manner of timm's train.py."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spartan import Sparsifier, verify
from tests.loops.small import SPARSITY, STEPS, data, net, same_weights


def nanogpt(
    out: Path, method: str | None, stop: int = STEPS, resume: bool = False
) -> tuple[nn.Module, Any, list[float]]:
    """Two groups, micro-steps, a scaler that may be off, a cosine by hand; the checkpoint holds what nanoGPT's does."""
    model = net()
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    iter_num, losses = 0, []
    if resume:
        checkpoint = torch.load(out / "ckpt.pt", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iter_num = checkpoint["iter_num"]
    sparsifier = Sparsifier(model, SPARSITY, STEPS, method).attach(optimizer) if method else None
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    x, y = data().tensors
    while iter_num < stop:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * iter_num / STEPS))
        for micro in range(4):
            rows = torch.randint(256, (16,), generator=torch.Generator().manual_seed(4 * iter_num + micro))
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) / 4
            losses.append(loss.item())
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        iter_num += 1
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
    torch.save(state, out / "ckpt.pt")
    return model, sparsifier, losses


@pytest.mark.parametrize("method", ["spartan", "topkast", "rigl", "probmask"])
def test_nanogpt(method: str, tmp_path: Path) -> None:
    model, sparsifier, _ = nanogpt(tmp_path, method)
    nanogpt(tmp_path, method, stop=13)
    again, its_sparsifier, _ = nanogpt(tmp_path, method, resume=True)
    assert same_weights(model, again)
    assert sparsifier.stats == its_sparsifier.stats
    its_sparsifier.finalize()
    verify(again, SPARSITY)


def test_nanogpt_dense_is_as_without_us(tmp_path: Path) -> None:
    assert nanogpt(tmp_path, "dense")[2] == nanogpt(tmp_path, None)[2]


def timm(out: Path, method: str | None, epochs: int = 4, resume: bool = False) -> tuple[nn.Module, Any, Any]:
    """Loss scaling and clipping in one object, an average of our own, checkpoints by epoch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    sparsifier = Sparsifier(model, SPARSITY, STEPS, method).attach(optimizer) if method else None
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    ema = None if sparsifier is None else sparsifier.ema(0.9)
    start = 0
    if resume:
        checkpoint = torch.load(out / "last.pth.tar", weights_only=True)
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        if ema is not None:
            ema.load_state_dict(checkpoint["ema"])
        start = checkpoint["epoch"] + 1
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    x, y = data().tensors
    for epoch in range(start, epochs):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(epoch)).view(8, 2, 16)
        for micro_batches in order:
            for rows in micro_batches:
                scaler.scale(nn.functional.cross_entropy(model(x[rows]), y[rows]) / 2).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scheduler.step()
        state = {"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"scheduler": scheduler.state_dict()} | ({} if ema is None else {"ema": ema.state_dict()})
        torch.save(copy.deepcopy(state), out / "last.pth.tar")
    return model, sparsifier, ema


@pytest.mark.parametrize("method", ["spartan", "feather", "movement"])
def test_timm(method: str, tmp_path: Path) -> None:
    model, sparsifier, ema = timm(tmp_path, method)
    timm(tmp_path, method, epochs=2)
    again, its_sparsifier, its_ema = timm(tmp_path, method, resume=True)
    assert same_weights(model, again)
    assert same_weights(ema.model(), its_ema.model())
    verify(ema.model(), SPARSITY)
    for each in (sparsifier, its_sparsifier):
        each.finalize()
    verify(again, SPARSITY)


def test_timm_dense_is_as_without_us(tmp_path: Path) -> None:
    assert same_weights(timm(tmp_path, "dense")[0], timm(tmp_path, None)[0])
