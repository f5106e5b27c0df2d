"""Section 2: Spartan lies between Top-KAST (β = 0) and iterative magnitude pruning (β → ∞)."""

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spartan import IMP, Sparsifier, Spartan, TopKAST, constant
from spartan.app.paper.exhibit import Claim, Exhibit, Shown, register
from spartan.app.paper.figures import new_figure
from spartan.app.paper.results import Results
from spartan.app.paper.tables import Table
from spartan.methods import Method

SPARSITY, STEPS, RATE = 0.75, 20, 0.3
BETAS = (*(10.0**power for power in (-2, -1, 0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 5.5, 6, 6.5, 7, 8)),)


@dataclass(frozen=True)
class Distance:
    """How two runs from the same weights compare: the largest |Δw| at any step, and how often their masks differ."""

    most: float
    different_masks: int
    mask_changes: int


def net() -> nn.Sequential:
    """A small net in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False)).double()


def loss_of(model: nn.Module, step: int) -> Tensor:
    """A loss on random data, the same at the same step."""
    rng = torch.Generator().manual_seed(step)
    x, y = (torch.randn(32, n, generator=rng, dtype=torch.float64) for n in (12, 8))
    return (model(x) - y).square().mean()


def distance(first: Method, second: Method, scale: float, rate: float) -> Distance:
    """Twenty steps of plain SGD at constant density, the second's dense weights and learning rate scaled as given."""
    one = net()
    two = copy.deepcopy(one)
    with torch.no_grad():
        for p in two.parameters():
            p.mul_(scale)
    runs = []
    for model, method, lr in ((one, first, RATE), (two, second, RATE * rate)):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        sparsifier = Sparsifier(model, SPARSITY, 100, method, warmup=0.0, finetune=0.0).attach(optimizer)
        runs.append((model, sparsifier, optimizer))
    most, different, changes = 0.0, 0, 0
    before = _kept(runs[0][1])
    for step in range(STEPS):
        for model, _, optimizer in runs:
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(one.parameters(), two.parameters(), strict=True)
        most = max(most, *(float((p - q).detach().abs().max()) for p, q in pairs))
        now, other = (_kept(sparsifier) for _, sparsifier, _ in runs)
        different += not torch.equal(now, other)
        changes += not torch.equal(now, before)
        before = now
    return Distance(most, different, changes)


def _kept(sparsifier: Sparsifier) -> Tensor:
    return torch.cat([mask.flatten() for mask in sparsifier.masks().values()])


def update(method: Method) -> Tensor:
    """The gradient for θ that a method makes of one and the same random gradient for w."""
    torch.manual_seed(1)
    layer = nn.Linear(64, 64, bias=False).double()
    gradient = torch.randn(64, 64, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    sparsifier = Sparsifier(layer, SPARSITY, 100, method, warmup=0.0, finetune=0.0).attach(optimizer)
    (layer.weight * gradient).sum().backward()
    sparsifier.backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.flatten()


def cosines(beta: float) -> tuple[float, float]:
    """Cosine of Spartan's update at β with Top-KAST's, and with IMP's."""
    ours = update(Spartan(beta=constant(beta)))
    top, imp = (torch.cosine_similarity(ours, update(other), 0) for other in (TopKAST(), IMP()))
    return float(top), float(imp)


def limits() -> dict[str, Distance]:
    """Both ends of β beside the methods they are."""
    times = 1.0 / (1.0 - SPARSITY)  # C/k
    return {
        "β = 0 and Top-KAST": distance(TopKAST(), Spartan(beta=constant(0.0)), times, times**2),
        "β = ∞ and IMP": distance(IMP(), Spartan(beta=float("inf")), 1.0, 1.0),
    }


@register
class Interpolation(Exhibit):
    """The two limits over twenty steps, and the direction of an update over β."""

    order = 3
    name = "interpolation"
    title = "Spartan between Top-KAST and IMP: the limits of β, and updates between them"
    where = "Section 2"
    kind = "exact"

    def show(self, results: Results) -> Shown:
        """Equal weights and masks at the ends; directions that go from one to the other between them."""
        ends = limits()
        between = {beta: cosines(beta) for beta in BETAS}
        first = Table(
            f"{STEPS} steps of SGD at a constant {100 * SPARSITY:g}%, float64, side by side",
            ["limit", "largest |Δw| at any step", "steps with different masks", "steps at which the mask changed"],
            [
                [name, "< 1e-12" if d.most < 1e-12 else f"{d.most:.1e}", str(d.different_masks), str(d.mask_changes)]
                for name, d in ends.items()
            ],
        )
        second = Table(
            "Cosine of Spartan's update for θ with the others', from one and the same gradient for w",
            ["β", "with Top-KAST", "with IMP"],
            [[f"{beta:.3g}", f"{top:.4f}", f"{imp:.4f}"] for beta, (top, imp) in between.items()],
        )
        equal = all(d.most < 1e-12 and d.different_masks == 0 and d.mask_changes > 0 for d in ends.values())
        (near, _), (_, sharp) = between[BETAS[0]], between[BETAS[-1]]
        figures = (
            f"cosine {near:.4f} with Top-KAST's update at β = {BETAS[0]:g}, {sharp:.4f} with IMP's at β = {BETAS[-1]:g}"
        )
        claim = Claim(
            "Spartan reduces to Top-KAST at β = 0 and is equivalent to IMP as β → ∞",
            self.where,
            "confirmed" if equal and min(near, sharp) > 0.999 else "not confirmed",
            f"weights equal within 1e-12 and masks equal at all of {STEPS} steps, at both ends; {figures}. At "
            "β = 0 equality "
            "holds once θ starts from θ·C/k with learning rate η·(C/k)²: the mask is k/C, not 1",
        )
        most, least = (
            max(between, key=lambda b: between[b][1] if b < 1e3 else 0),
            min(between, key=lambda b: between[b][1]),
        )
        smooth = between[least][1] >= between[BETAS[0]][1]
        middle = Claim(
            "Spartan smoothly interpolates between this pair of algorithms",
            self.where,
            "confirmed" if smooth else "not confirmed",
            f"in the direction of one update: the cosine with IMP's grows to {between[most][1]:.2f} at β = "
            f"{most:.3g} (weights up "
            f"to {1 / 8:g}), falls to {between[least][1]:.2f} at β = {least:.3g}, and is 1 again once β "
            "exceeds one over the "
            "gap of the weights at the threshold. Between, the slope β·m(1−m) of the few weights within 1/β of the "
            "threshold outweighs the rest. The paper trains below that range",
        )
        line = (
            f"both limits hold ({figures}), at β = 0 up to the factor k/C, which the paper leaves unsaid; "
            "between them the "
            "way is not monotone"
        )
        return Shown(line, [first, second], lambda: draw(between), [claim, middle])


def draw(between: dict[float, tuple[float, float]]) -> Any:
    """The two cosines over β."""
    figure = new_figure(2.8, 5.6)
    axes = figure.subplots()
    for name, index, marker in (("with Top-KAST's (β → 0)", 0, "o"), ("with IMP's (β → ∞)", 1, "s")):
        axes.plot(BETAS, [between[beta][index] for beta in BETAS], marker=marker, label=name)
    axes.set(xscale="log", xlabel="β", ylabel="cosine", title="Direction of Spartan's update for θ")
    axes.legend(frameon=False)
    assert all(a < b for a, b in itertools.pairwise(BETAS))
    return figure
