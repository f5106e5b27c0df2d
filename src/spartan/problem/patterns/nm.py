"""N of every M consecutive weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spartan.distributed import held
from spartan.problem.patterns.base import Pattern, Place, check_axes, in_runs
from spartan.scalars import takes_numbers


@takes_numbers
@dataclass(frozen=True)
class NM(Pattern):
    """n of every m consecutive weights along the inputs are kept; `NM(2, 4)` is what sparse tensor cores run.

    Every weight is a unit, and every group of m has its own budget, so that the sparsity is 1 − n/m in each layer and
    no other. A convolution's groups run along its input channels, at one kernel position (out × kh·kw × in, the order
    of channels_last, as in SR-STE and NVIDIA's ASP); a Linear's along its inputs, as `to_sparse_semi_structured` asks.

    While the density falls over a warm-up, n does in steps: ⌈m · density⌉ of every m are kept.

    Example:
        >>> model = torch.nn.Linear(8, 2)
        >>> s = spartan.Sparsifier(model, sparsity=0.5, total_steps=10, pattern=NM(2, 4), warmup=0)
        >>> (model.weight.view(-1, 4) != 0).sum(1)
        tensor([2, 2, 2, 2])
    """

    n: int
    m: int

    name = "nm"
    spelling = "nm:N:M"
    tells_inputs_from_outputs = True
    budget = "global"  # any would do: no two groups of m compete

    def __repr__(self) -> str:
        return f"NM({self.n}, {self.m})"

    def __post_init__(self) -> None:
        whole = all(isinstance(x, int) and not isinstance(x, bool) for x in (self.n, self.m))
        if not whole or not 0 < self.n < self.m:
            raise ValueError(
                f"NM: n={self.n!r}, m={self.m!r}; whole numbers with 0 < n < m are needed, such as NM(2, 4)"
            )

    @property
    def rows(self) -> int:
        """m."""
        return self.m

    @property
    def sparsity(self) -> float:
        """1 − n/m: the only one that the pattern can have."""
        return 1.0 - self.n / self.m

    def density_at(self, density: float) -> float:
        """⌈m · density⌉ of every m, never fewer than n."""
        return min(self.m, max(self.n, math.ceil(self.m * density - 1e-9))) / self.m

    def check_budget(self, sparsity: float, budget: object, value_power: float, share: float) -> float:
        """1 − n/m; errors for what would ask another sparsity of some of the targets."""
        if budget not in ("global", "uniform"):
            raise ValueError(
                f"budget={budget!r} with pattern={self!r}: every {self.m} weights have a budget of their own, so no "
                'layer can be sparser than another; leave the budget out, or pass "uniform"'
            )
        if value_power != 1.0:
            raise ValueError(
                f"cost: value_power={value_power:g} with pattern={self!r}: weights compete only with others of the "
                "same cost, so that a value power has nothing to weigh; leave it out"
            )
        if abs(sparsity - self.sparsity) > 1e-6:
            asked = "" if share == 1.0 else f' of all parameters, {sparsity:.6g} of the targets (count="model"),'
            raise ValueError(
                f"sparsity={sparsity * share:.6g}{asked} with pattern={self!r}, which keeps {self.n} of every "
                f"{self.m}; pass sparsity={self.sparsity * share:.10g}"
                + ("" if share == 1.0 else ' or count="targets"')
            )
        return self.sparsity

    def check(self, shape: Sequence[int], owner: nn.Module) -> None:
        """A weight's axes must be outputs × inputs, and m must divide the inputs."""
        check_axes(self, owner)
        self.unit_size(shape)

    def unit_size(self, shape: Sequence[int]) -> int:
        """One."""
        if shape[1] % self.m:
            raise ValueError(f"{self!r} does not divide the {shape[1]} inputs (shape {tuple(shape)})")
        return 1

    def reduce(self, x: Tensor) -> Tensor:
        """The entries, inputs last."""
        return x.movedim(1, -1).reshape(-1)

    def expand(self, units: Tensor, shape: Sequence[int]) -> Tensor:
        """The entries back in their shape."""
        return units.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)

    def place(self, parameter: Tensor) -> Place | None:
        """Inputs last; shards may cut them between groups of m, and the outputs anywhere, but not the kernel."""
        outputs, inputs, *kernel = held(parameter)
        shape = tuple(parameter.shape)
        if not in_runs(inputs, self.m) or any(i.numel() != n for i, n in zip(kernel, shape[2:], strict=True)):
            return None
        positions = math.prod(shape[2:])
        columns = (torch.arange(positions)[:, None] * shape[1] + inputs).reshape(-1)
        return Place(outputs, columns, (shape[0], positions * shape[1]))
