"""Numbers of the host on a device, without a wait for it."""

from typing import Any

import torch
from torch import Tensor


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A NumPy array or numbers as a tensor; to a GPU from pinned memory, so that the host goes on at once."""
    tensor = torch.as_tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
