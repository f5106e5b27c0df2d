"""How far the scores of one model are from those of another."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from spartan.scalars import as_plain


def distillation_loss(scores: Tensor, teacher: Tensor, temperature: float = 2.0) -> Tensor:
    """T² · KL(softmax(teacher/T) ‖ softmax(scores/T)), the mean over all but the last dimension.

    Hinton et al., Distilling the knowledge in a neural network, 2015. For a sparse model that learns from the dense one
    it was pruned from, beside the labels:

        loss = 0.5 * cross_entropy(scores, y) + 0.5 * distillation_loss(scores, dense(x))

    Args:
        scores: of the model that is trained, before softmax; classes are the last dimension.
        teacher: of the other, in the same shape; no gradient goes there.
        temperature: T; a larger one tells more of the classes that are not the likeliest.

    Example:
        >>> scores = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
        >>> distillation_loss(scores, scores).item()
        0.0
        >>> round(distillation_loss(scores, torch.tensor([[2.0, 1.0], [0.0, 0.0]]), temperature=1.0).item(), 4)
        0.2311
    """
    temperature = as_plain(temperature)
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature!r}; a positive number is needed, such as 2.0")
    if scores.shape != teacher.shape:
        raise ValueError(
            f"scores are {tuple(scores.shape)} and the teacher's {tuple(teacher.shape)}; they must have the same shape"
        )
    wide = torch.promote_types(scores.dtype, torch.float32)
    flat = (x.to(wide).reshape(-1, x.shape[-1]) / temperature for x in (scores, teacher.detach()))
    mine, its = (F.log_softmax(x, -1) for x in flat)
    return F.kl_div(mine, its, reduction="batchmean", log_target=True) * temperature**2
