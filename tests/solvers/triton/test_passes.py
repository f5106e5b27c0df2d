"""ProbMask's passes with kernels: a sample each, gradients that add up, and a run that resumes to the bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spartan
from spartan import Sparsifier
from spartan.methods.probmask import ProbMask
from tests.contract.cases import Net, batch
from tests.solvers.triton import DEVICE

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:divide by zero:RuntimeWarning"
)
STEPS, SAVED_AT, CLIP = 8, 3, 0.2


def build() -> tuple[nn.Module, Any, Sparsifier]:
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    method = ProbMask(samples=3, clip=CLIP)
    return model, optimizer, Sparsifier(model, 0.7, STEPS, method, warmup=0.0, kernels="triton").attach(optimizer)


def one_pass(model: nn.Module, step: int, share: float) -> None:
    x, y = (t.to(DEVICE) for t in batch(step))
    (share * nn.functional.cross_entropy(model(x.float()), y)).backward()


def train(model: nn.Module, optimizer: Any, sparsifier: Sparsifier, steps: range) -> None:
    for step in steps:
        for share in spartan.passes(sparsifier):
            one_pass(model, step, share)
        optimizer.step()
        optimizer.zero_grad()


def test_the_gradient_of_the_probabilities_is_the_mean_over_the_samples_within_the_joint_norm() -> None:
    model, optimizer, sparsifier = build()
    train(model, optimizer, sparsifier, range(2))
    (solver,) = sparsifier._run.weights.solving
    beta = sparsifier.method.beta_at(solver.problem, sparsifier._run.at)[0]  # type: ignore[index]
    state, samples = solver.state.per_unit, []
    want = torch.zeros(solver.count, device=DEVICE)
    plain = [torch.zeros_like(p) for p in model.parameters()]
    for share in spartan.passes(sparsifier):
        m, s = state["m"].clone(), state["s"]
        samples.append(m)
        leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        x, y = (t.to(DEVICE) for t in batch(2))
        out = torch.func.functional_call(model, leaves, (x.float(),))
        grads = torch.autograd.grad(nn.functional.cross_entropy(out, y) * share, list(leaves.values()))
        one_pass(model, 2, share)
        by_name: dict[str, Tensor] = dict(zip(leaves, grads, strict=True))
        turned = [by_name[t.name] for t in solver.problem.targets]
        pull = torch.cat([(g * theta).flatten() for g, theta in zip(turned, solver.theta.views, strict=True)])
        spread = s * (1 - s)
        want += torch.where(spread > 0, beta * m * (1 - m) / torch.where(spread > 0, spread, 1.0), 0.0) * pull
        masks = dict(zip([t.name for t in solver.problem.targets], m.split(solver.problem.units), strict=True))
        for total, (name, g) in zip(plain, by_name.items(), strict=True):
            total += g * masks[name].view_as(g) if name in masks else g
    assert not torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[1], samples[2])
    torch.testing.assert_close(state["grad"], want, rtol=1e-4, atol=1e-6)
    norm = torch.cat([want, *(g.flatten() for g in plain)]).norm()
    assert norm > CLIP
    sparsifier._run.turn(optimizer, range(3))
    torch.testing.assert_close(state["grad"], want * CLIP / norm, rtol=1e-4, atol=1e-6)
    for p, g in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, g * CLIP / norm, rtol=1e-4, atol=1e-6)


def test_resume_is_bit_identical() -> None:
    model, optimizer, sparsifier = build()
    train(model, optimizer, sparsifier, range(SAVED_AT))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), sparsifier.state_dict()], file)
    train(model, optimizer, sparsifier, range(SAVED_AT, STEPS))
    file.seek(0)
    again = build()
    for part, state in zip(again, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(*again, range(SAVED_AT, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again[0].parameters(), strict=True))
    sparsifier.finalize()
