"""`torchvision`, also beside a CPU build of torch.

PyPI's torchvision is built for CUDA. Beside a CPU build of torch its compiled operators cannot load, and the import
then fails only because two of them are not declared. The models need neither.
"""

import importlib

import torch

_declarations = torch.library.Library("torchvision", "FRAGMENT")  # lasts as long as this object

try:
    torchvision = importlib.import_module("torchvision")
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    for _operator in ("nms", "qnms"):
        _declarations.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torchvision = importlib.import_module("torchvision")
