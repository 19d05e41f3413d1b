"""Bytes in words, and pictures for loggers."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def size(count: float) -> str:
    """Bytes with three digits: 3.45 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def show(loggers: Iterable[Any], name: str, path: Path, step: int) -> None:
    """Sends a PNG file to every logger that accepts pictures: TensorBoard's, W&B's. ``step`` is the round."""
    for logger in loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(name, [str(path)], step=step)
