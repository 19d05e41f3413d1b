"""A callback that watches a column which no run has is refused before the first round."""

import pytest
from conftest import refuses
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from gcfed.assemble import columns_of_parts, refuse_unwritten
from gcfed.callbacks.after_round import SmoothedAccuracy
from gcfed.federated.parts import ServerPart
from gcfed.federated.protocol.rounds import Received
from gcfed.tasks import Classification, LanguageModel, SquaredError

TASKS = (Classification(), LanguageModel(), SquaredError())
ENDS = ("", "_smooth10", "_ema")


class Loop:
    columns = ("round",)


class Own(ServerPart):
    def on_round_end(self, row, round):
        row["test/f1"] = 0.5


def check(task, *callbacks, has_validation=True):
    written = columns_of_parts(
        Loop(), task, callbacks, has_validation=has_validation, has_client_tests=False
    )
    refuse_unwritten(callbacks, written)


def written_in_a_test(task):
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
            check(task, SmoothedAccuracy(), watch(monitor=column))
        except ValueError:
            continue
        accepted.add(column)
    assert accepted == written_in_a_test(task) & {*candidates}


def test_a_column_of_a_users_part_is_looked_for_after_the_first_test():
    check(TASKS[0], EarlyStopping(monitor="test/f1_ema"), Own(), has_validation=False)
    with refuses("^monitor=test/f1_ema: a run with these settings never writes test/f1_ema"):
        check(TASKS[0], EarlyStopping(monitor="test/f1_ema"))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("val/acc_ema", "did you mean val/acc"),
        ("test/loss_ema", "did you mean test/loss"),
        ("test/acc_ema", r"leave ~callbacks\.smoothing out"),
        ("test/rmse_ema", "There are test/acc, test/loss"),
    ],
)
def test_a_moving_mean_that_nothing_writes_is_refused(column, message):
    with refuses(f"^monitor={column}: .*{message}"):
        check(TASKS[0], EarlyStopping(monitor=column))
