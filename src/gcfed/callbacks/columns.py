"""Which columns the parts of a run write, and whether callbacks watch one of them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from gcfed.callbacks.after_round import SmoothedAccuracy
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.parts import ServerPart
from gcfed.folders.run_columns import RunColumns
from gcfed.tasks import Task


def columns_of_parts(
    loop: FederatedLoop,
    task: Task,
    callbacks: Sequence[Callback],
    *,
    has_validation: bool,
    has_client_tests: bool,
) -> RunColumns:
    """What a run of these parts writes.

    Args:
        callbacks: all parts, and the callbacks of the config.
        has_validation: whether the data have a validation split.
        has_client_tests: whether clients have test splits of their own.

    Raises Refusal if best.ckpt or early stopping watches a column that the run never writes. If a
    part may write any column, it is looked for after the first test instead.
    """
    columns = [*task.columns]
    if has_validation:
        columns += [f"val/{column.removeprefix('test/')}" for column in task.columns]
    columns += loop.columns
    is_open = False
    for part in callbacks:
        if not isinstance(part, ServerPart):
            continue
        if isinstance(part, SmoothedAccuracy) and "test/acc" not in task.columns:
            continue
        known = part.known_columns
        if known is None:
            is_open = True
        else:
            columns += known
    if not has_client_tests:
        columns = [column for column in columns if not column.startswith("personal/")]
    written = RunColumns(tuple(dict.fromkeys(columns)), is_open)
    for callback in callbacks:
        if isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.monitor is not None:
            written.require(callback.monitor, f"monitor={callback.monitor}")
    return written
