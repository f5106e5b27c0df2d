"""Checks what `shrink` is given, and compares a narrower model with the one it was cut from."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from spartan.distributed import is_dtensor
from spartan.following import owner
from spartan.problem.layers import bare_name
from spartan.shrink.trace import tensors_of
from spartan.wording import first_line

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# Inputs, and what the model makes of them.
Case = tuple[Arguments, list[Tensor]]
# The largest difference, as a share of the largest output: that of sums in another order, and no more.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
ON_A_GPU = 1e-2  # where products in float32 may be rounded to ten bits


def check_model(model: nn.Module) -> None:
    """Refuse models that cannot be shrunk, with the remedy."""
    if any(type(module).__module__.startswith("spartan.inference.") for module in model.modules()):
        raise ValueError(
            "model runs sparse kernels: it is a copy made by load or accelerate; shrink the one it is from"
        )
    training = [name for name, module in model.named_modules() if module.training]
    if training:
        which = f"{training[0]} of the model" if training[0] else "model"
        raise ValueError(
            f"{which} is in training mode, where dropout and batch norm compute something else; shrink keeps what the "
            "model computes in eval mode: call model.eval() first"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        path, _, attribute = name.rpartition(".")
        bare = bare_name(attribute)
        if is_dtensor(tensor):
            raise ValueError(
                f"{name} is sharded over several processes; shrink needs it whole (full_tensor() gives it)"
            )
        if owner(tensor) is not None:
            raise RuntimeError(f"{name} belongs to a sparsifier that is at work; call its finalize() first")
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.is_quantized:
            kind = tensor.dtype if tensor.is_quantized else type(tensor).__name__
            raise ValueError(f"{name} is quantised or another special tensor ({kind}); shrink the model before that")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values to look at; load the model first")
        if bare != attribute and hasattr(modules[path], bare) and bare not in modules[path]._parameters:
            raise ValueError(f"{name} is rewritten by a hook (nn.utils.prune or weight_norm); remove that first")


def arguments_of(model: nn.Module, example_inputs: Any) -> Arguments:
    """What to call the model with, on its device."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs = dict(example_inputs) if isinstance(example_inputs, Mapping) else example_inputs
    inputs = tree_map_only(Tensor, lambda x: x.detach().to(device), inputs)
    if not any(isinstance(x, Tensor) for x in tree_leaves(inputs)):
        raise ValueError(
            f"example_inputs={example_inputs!r:.80}; a tensor, a tuple of arguments or a dict of keyword arguments, as the "
            "model takes them, is needed"
        )
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), {}


def cases_of(model: nn.Module, inputs: Arguments) -> list[Case]:
    """The inputs given and fresh ones, with what the model makes of them."""
    try:
        found = [(inputs, run(model, inputs))]
    except Exception as error:  # the model's own code
        raise ValueError(f"example_inputs: the model cannot be run on them: {first_line(error)}") from error
    if not found[0][1]:
        raise ValueError("the model returns no tensor for example_inputs, so that there is nothing to keep as it is")
    other = fresh(inputs, torch.Generator().manual_seed(0))
    try:
        found.append((other, run(model, other)))
    except Exception:  # a model that takes only some numbers is compared on those it was given
        return found
    return found


@torch.no_grad()
def run(model: nn.Module, inputs: Arguments) -> list[Tensor]:
    """The tensors that a model gives; the inputs stay as they are."""
    args, kwargs = copy.deepcopy(inputs)
    return list(tensors_of(model(*args, **kwargs)))


def fresh(inputs: Arguments, generator: torch.Generator) -> Arguments:
    """Other inputs of the same shapes and range: new random numbers for floats, whole numbers in another order."""

    def other(x: Tensor) -> Tensor:
        if x.dtype == torch.bool:  # a mask
            return x
        if x.is_floating_point() and x.numel() > 1 and bool(torch.isfinite(x).all()):
            spread, mean = (s.cpu() for s in torch.std_mean(x.double()))
            noise = torch.randn(x.shape, generator=generator, dtype=torch.double, device="cpu")
            return (noise * spread + mean).to(x)
        order = torch.randperm(x.numel(), generator=generator, device="cpu").to(x.device)
        return x.reshape(-1)[order].reshape(x.shape)

    found: Arguments = tree_map_only(Tensor, other, inputs)
    return found


def why_wrong(model: nn.Module, cases: Sequence[Case]) -> str:
    """Why a model does not do what it should in these cases, in words; empty if it does."""
    for inputs, expected in cases:
        try:
            got = run(model, inputs)
        except Exception as error:  # the model's own code, with sizes that it does not expect
            return f"the model's code would fail ({first_line(error)[:120]})"
        if told := _difference(expected, got):
            return told
    return ""


def _difference(expected: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    """How outputs differ, in words; empty if they do not."""
    if [tuple(x.shape) for x in expected] != [tuple(x.shape) for x in got]:
        return "the outputs would have other shapes"
    for a, b in zip(expected, got, strict=True):
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return "the outputs would be other ones"
            continue
        finite = torch.isfinite(a)
        if not torch.equal(finite, torch.isfinite(b)):
            return "the outputs would not be finite where they are now"
        gap = (a.double() - b.double())[finite].abs()
        if not gap.numel():
            continue
        scale = float(a.double()[finite].abs().max())
        tolerance = TOLERANCES.get(a.dtype, 1e-5)
        if a.is_cuda and a.dtype == torch.float32:
            tolerance = ON_A_GPU
        if not float(gap.max()) <= tolerance * scale:
            return f"the outputs would differ by {float(gap.max()):.2g} (the largest is {scale:.2g})"
    return ""
