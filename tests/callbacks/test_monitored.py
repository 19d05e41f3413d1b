"""A callback that watches a column which no run has is refused before the first round."""

import pytest
from conftest import refuses
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from gcfed.callbacks.after_round import SmoothedAccuracy
from gcfed.callbacks.monitored import check_monitors
from gcfed.federated.protocol.rounds import Received
from gcfed.tasks import Classification, LanguageModel, SquaredError

TASKS = (Classification(), LanguageModel(), SquaredError())
ENDS = ("", "_smooth10", "_ema")


def written_by(task):
    """The columns of the first test, with a validation split."""
    row = {"round": 1}
    for column in task.columns:
        row[column] = 0.5
        row[column.replace("test/", "val/")] = 0.5
    SmoothedAccuracy().on_round_end(row, Received)
    return row.keys()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: type(task).__name__)
@pytest.mark.parametrize("watch", [EarlyStopping, ModelCheckpoint])
def test_exactly_the_columns_of_a_test_can_be_watched(task, watch):
    names = {column.partition("/")[2] for one in TASKS for column in one.columns}
    candidates = [
        f"{kind}/{name}{end}" for kind in ("test", "val") for name in names for end in ENDS
    ]
    accepted = set()
    for column in candidates:
        try:
            check_monitors([SmoothedAccuracy(), watch(monitor=column)], task, True)
        except ValueError:
            continue
        accepted.add(column)
    assert accepted == written_by(task) & {*candidates}


def test_a_column_of_another_part_is_looked_for_after_the_first_test():
    check_monitors([EarlyStopping(monitor="test/f1_ema")], TASKS[0], False)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("val/acc_ema", "only test/acc has moving means, .*test/acc_ema. Set monitor=val/acc"),
        ("test/loss_ema", "only test/acc has moving means"),
        ("test/acc_ema", "needs the callback SmoothedAccuracy"),
        ("test/rmse_ema", "task=Classification measures test/acc, test/loss"),
    ],
)
def test_a_moving_mean_that_nothing_writes_is_refused(column, message):
    with refuses(f"^monitor={column} .*{message}"):
        check_monitors([EarlyStopping(monitor=column)], TASKS[0], True)
