"""Memory of devices."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A NumPy array or numbers as a tensor.

    Pinned memory lets the host continue during the copy to a GPU.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """Where the first of these tensors is, as all of them are."""
    return next(iter(tensors.values())).device


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU, including those that torch's allocator has reserved and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
