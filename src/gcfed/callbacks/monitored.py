"""Columns that callbacks of Lightning watch: best.ckpt and early stopping."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from gcfed.folders.written import Written


def check_monitors(callbacks: Iterable[Callback], written: Written) -> None:
    """Raises Refusal if a callback watches a column that the run never writes.

    If a part may write any column, those are looked for after the first test, too.
    """
    for callback in callbacks:
        if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor is not None:
            written.require(callback.monitor, f"monitor={callback.monitor}")
