"""Has a run learn from the scores of another model, such as the dense one that it was pruned from."""

import torch
from torch import Tensor, nn

from spartan import distillation_loss
from spartan.app.train.config import Config
from spartan.app.train.setup import load_weights


class Teacher:
    """The other model, which is not trained.

    Args:
        config: the recipe, with a `distill` section.
        model: a model of the recipe's kind, to be filled.
        device: where the run is.
    """

    def __init__(self, config: Config, model: nn.Module, device: torch.device) -> None:
        assert config.distill is not None
        self._weight, self._temperature = config.distill.weight, config.distill.temperature
        key, file = ("distill.teacher", config.distill.teacher) if config.distill.teacher else ("start", config.start)
        assert file is not None, "the recipe's schema asks for one of them"
        self._model = load_weights(key, file, config, model).to(device).eval().requires_grad_(False)

    def blend(self, loss: Tensor, logits: Tensor, x: Tensor) -> Tensor:
        """A loss on labels, and how far scores (flat, samples × classes) are from the teacher's for the same inputs."""
        with torch.no_grad():
            its = self._model(x).flatten(0, -2)
        return (1.0 - self._weight) * loss + self._weight * distillation_loss(logits, its, self._temperature)
