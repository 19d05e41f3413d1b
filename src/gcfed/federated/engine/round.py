"""One communication round, from top to bottom."""

import time
from typing import Any

from gcfed.federated.engine.server import Server
from gcfed.federated.protocol.messages import Download, nbytes
from gcfed.federated.protocol.rounds import Received


def run_round(t: int, server: Server) -> tuple[dict[str, Any], Received]:
    """Draws a cohort, sends the model, receives the uploads, makes the server's step and replies.

    Returns:
        The row of metrics, and what was received. Clients learn nothing that is not in a message.
    """
    started = time.perf_counter()
    transport = server.setup.transport
    round = server.draw(t)
    download = server.broadcast(round)
    sums = server.begin(round)
    # K clients at a time, in any order
    for upload, answered in server.fit(download, round, sums):
        server.receive(upload, sums, answered)
        del upload  # nothing holds it while the next clients train
    received = server.reduce(sums, round)
    if received.usable:
        server.finish(received)
    refused = not server.step(received)  # in every round: Lightning counts rounds by it
    if received.reply:
        transport.reply(received.reply)
        # before any process reads a state that another writes
        server.setup.module.trainer.strategy.barrier()
    return row_of(received, download, server, refused, started), received


def row_of(
    round: Received, download: Download, server: Server, refused: bool, started: float
) -> dict[str, Any]:
    """The round's row of metrics, as far as it is known before the test."""
    row: dict[str, Any] = {"round": round.index + 1}
    answered = len(round.cohort)
    if answered:
        row["train/loss"] = round.loss
    row["train/clients"] = answered
    row["train/nonfinite_clients"] = answered - round.num_finite
    row["train/refused_steps"] = int(round.overflowed) + int(refused)
    row["train/samples"] = round.samples
    row["train/steps"] = round.steps
    sent = round.turn.asked - server.setup.transport.unasked
    replies = sum(nbytes(tensors) for tensors in round.reply.values())
    row["comm/down_bytes"] = sent * download.nbytes + answered * replies
    row["comm/up_bytes"] = round.up_bytes
    row["time/train_s"] = time.perf_counter() - started
    return row | server.row(round)
