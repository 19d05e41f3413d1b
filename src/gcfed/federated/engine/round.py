"""One communication round, from top to bottom."""

import time
from collections.abc import Sequence
from typing import Any

from gcfed.federated.engine.round_row import (
    columns_of_bytes,
    columns_of_clients,
    columns_of_training,
)
from gcfed.federated.engine.server import Server
from gcfed.federated.protocol.rounds import Received


def run_round(
    round_index: int, server: Server, columns: Sequence[str]
) -> tuple[dict[str, Any], Received]:
    """Draws a cohort, sends the model, adds up the uploads, makes the server's step and replies.

    Clients learn nothing that is not in a message. Their local training is
    :meth:`~gcfed.federated.engine.client.ClientRound.train`, which the transport calls.

    Args:
        columns: the columns of the run's rows, without columns of the test and of methods.

    Returns:
        The row of metrics, and what was received.
    """
    started = time.perf_counter()
    turn = server.schedule.turn(round_index)  # the cohort, and who was asked in vain
    begun = server.begin(round_index, turn)  # the cohort, the model and the learning rate
    download = server.broadcast(begun)
    round = begun.with_download(download)
    sums = server.empty_sums(round)
    # calls server.receive with the uploads of K clients at a time, in any order
    outcome = server.train_clients(download, round, sums)  # which clients did not answer
    received = server.reduce(sums, round, outcome)  # the mean update, over all processes
    # what later rounds depend on: states, losses, and the sizes of messages
    server.keep_states(received)
    server.schedule.learn(received.losses, received.index)
    server.schedule.expect_bytes(download.nbytes, sums.expected.nbytes)
    if received.usable:
        server.edit_update(received)
    is_step_finite = server.step(received)  # in every round: Lightning counts rounds by it
    server.reply(received)

    row = columns_of_training(received, is_step_finite)
    row |= columns_of_bytes(received, download, sums.expected, turn, outcome)
    row["time/train_s"] = time.perf_counter() - started
    row |= columns_of_clients(received, turn, columns, server.schedule)
    return row, received
