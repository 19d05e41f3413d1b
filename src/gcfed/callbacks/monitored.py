"""Columns that callbacks of Lightning watch: best.ckpt and early stopping."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from gcfed.folders.measures import WINDOW
from gcfed.tasks import Classification, LanguageModel, SquaredError, Task
from gcfed.utils.refusal import Refusal

SMOOTHED = (f"_smooth{WINDOW}", "_ema")  # what SmoothedAccuracy adds to test/acc


def check_monitors(callbacks: Iterable[Callback], task: Task, has_validation: bool) -> None:
    """Raises Refusal if a callback watches a column that no test of this run can have.

    A part may add columns of any other name, so those are looked for after the first test.
    """
    for callback in callbacks:
        if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor is not None:
            _check_monitor(callback.monitor, task, has_validation)


def _check_monitor(column: str, task: Task, has_validation: bool) -> None:
    if column.startswith("val/") and not has_validation:
        raise Refusal(f"monitor={column} needs a validation split: set data.validation=0.1.")
    tested = column.replace("val/", "test/")
    for end in SMOOTHED:
        tested = tested.removesuffix(end)
    of_other_tasks = {*LanguageModel.columns, *SquaredError.columns, *Classification.columns}
    if tested in of_other_tasks - {*task.columns}:
        raise Refusal(
            f"monitor={column} is no column of this run: task={type(task).__name__} measures"
            f" {', '.join(task.columns)}. Set the callback's monitor, and mode=min where less is"
            " better."
        )
