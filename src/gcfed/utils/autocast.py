"""Leaves the contexts of autocast around a block."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Turns autocast off in the block, where a new context of autocast is an outermost one.

    Torch keeps the weights that it has cast until the outermost context ends. Within a context
    around a round, a network that enters autocast in its ``forward`` would read the weights of the
    round's first step in all others.
    """
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    caches = torch.is_autocast_cache_enabled()
    depth = 0
    while torch.autocast_decrement_nesting() >= 0:
        depth += 1
    torch.autocast_increment_nesting()  # from −1 to 0
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(caches)
        for device in enabled:
            torch.set_autocast_enabled(device, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()
