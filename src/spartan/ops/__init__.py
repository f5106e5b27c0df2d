"""The operators: plain torch, and the reference for every faster version."""

from spartan.ops.distillation import distillation_loss
from spartan.ops.select import hard_topk
from spartan.ops.soft_topk import SoftTopKInfo, soft_topk

__all__ = ["SoftTopKInfo", "distillation_loss", "hard_topk", "soft_topk"]
