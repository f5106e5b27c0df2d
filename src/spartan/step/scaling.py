"""Learns from a loss scaler whether a fused optimizer leaves its update out, while the device stays busy."""

from collections.abc import Callable

import torch
from torch.optim import Optimizer


def ask_scaler(optimizer: Optimizer) -> Callable[[], bool]:
    """Before an optimizer's step: what tells, after it, whether the update was left out.

    From an accelerator the answer sets out at once, ahead of what the step launches. Who waits for it when that is in the
    queue leaves no gap on the device, as asking only then would: all of the update would be waited for.
    """
    found = getattr(optimizer, "found_inf", None)  # a GradScaler puts it there, and takes it away after the step
    if found is None:
        return lambda: False
    if found.device.type != "cuda":
        return lambda: bool(found.item())
    answer, arrived = torch.empty_like(found, device="cpu", pin_memory=True), torch.cuda.Event()
    answer.copy_(found, non_blocking=True)
    arrived.record(torch.cuda.current_stream(found.device))

    def skipped() -> bool:
        arrived.synchronize()
        return bool(answer.item())

    return skipped
