"""Columns that callbacks of Lightning watch: best.ckpt and early stopping."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from gcfed.callbacks.after_round import SmoothedAccuracy
from gcfed.folders.measures import WINDOW
from gcfed.tasks import Classification, LanguageModel, SquaredError, Task
from gcfed.utils.refusal import Refusal

ENDS = (f"_smooth{WINDOW}", "_ema")
SMOOTHED = tuple(f"test/acc{end}" for end in ENDS)  # the columns of SmoothedAccuracy


def check_monitors(callbacks: Sequence[Callback], task: Task, has_validation: bool) -> None:
    """Raises Refusal if a callback watches a column that no test of this run can have.

    A part may add columns of any other name, so those are looked for after the first test.
    """
    has_smoothing = any(isinstance(callback, SmoothedAccuracy) for callback in callbacks)
    for callback in callbacks:
        if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor is not None:
            _check_monitor(callback.monitor, task, has_validation)
            _check_smoothed(callback.monitor, task, has_smoothing)


def _check_monitor(column: str, task: Task, has_validation: bool) -> None:
    if column.startswith("val/") and not has_validation:
        raise Refusal(f"monitor={column} needs a validation split: set data.validation=0.1.")
    tested = _without_end(_of_test(column))
    if tested in _of_all_tasks() - {*task.columns}:
        raise Refusal(
            f"monitor={column} is no column of this run: task={type(task).__name__} measures"
            f" {', '.join(task.columns)}. Set the callback's monitor, and mode=min where less is"
            " better."
        )


def _check_smoothed(column: str, task: Task, has_smoothing: bool) -> None:
    """Raises Refusal for a moving mean of a task's column that nothing writes."""
    if _of_test(column) in task.columns or not column.endswith(ENDS):
        return
    tested = _without_end(_of_test(column))
    if tested not in {*task.columns, *_of_all_tasks()}:
        return
    if column not in SMOOTHED:
        raise Refusal(
            f"monitor={column} is no column of this run: only test/acc has moving means,"
            f" {' and '.join(SMOOTHED)}. Set monitor={_without_end(column)}."
        )
    if not has_smoothing:
        raise Refusal(
            f"monitor={column} needs the callback SmoothedAccuracy: leave ~callbacks.smoothing out."
        )


def _of_all_tasks() -> set[str]:
    return {*LanguageModel.columns, *SquaredError.columns, *Classification.columns}


def _of_test(column: str) -> str:
    """The column of the test split that ``val/…`` corresponds to."""
    return f"test/{column.removeprefix('val/')}" if column.startswith("val/") else column


def _without_end(column: str) -> str:
    for end in ENDS:
        column = column.removesuffix(end)
    return column
