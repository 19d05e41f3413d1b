"""Which columns the parts of a run write."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch import Callback

from gcfed.callbacks.after_round import SmoothedAccuracy
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.parts import ServerPart
from gcfed.folders.written import Written
from gcfed.tasks import Task


def written_by(
    loop: FederatedLoop,
    task: Task,
    callbacks: Iterable[Callback],
    *,
    has_validation: bool,
    has_client_tests: bool,
) -> Written:
    """What a run of these parts writes.

    Args:
        has_validation: whether the data have a validation split.
        has_client_tests: whether clients have test splits of their own.
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
    return Written(tuple(dict.fromkeys(columns)), is_open)
