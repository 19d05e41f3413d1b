"""One communication round, from top to bottom."""

import time
from typing import Any

from gcfed.federated.messages import Download, nbytes
from gcfed.federated.received import Received
from gcfed.federated.server import Server


def run_round(t: int, server: Server) -> tuple[dict[str, Any], Received]:
    """Draws a cohort, sends the model, receives the uploads, makes the server's step and replies.

    Returns:
        The row of metrics, and what was received. Clients learn nothing that is not in a message.
    """
    started, transport = time.perf_counter(), server.setup.transport
    round = server.draw(t)
    download = server.broadcast(round)
    sums = server.begin(round)
    # K clients at a time, in any order
    for upload in transport.fit(download, round.cohort, sums.expected):
        server.receive(upload, sums, round)
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
    answered, sent = len(round.cohort), round.drawn - server.setup.transport.unasked
    return {
        "round": round.index + 1,
        **({"train/loss": round.loss} if answered else {}),
        "train/clients": answered,
        "train/nonfinite_clients": answered - round.num_finite,
        "train/refused_steps": int(round.overflowed) + int(refused),
        "train/samples": round.samples,
        "train/steps": round.steps,
        "comm/down_bytes": (
            sent * download.nbytes + answered * sum(map(nbytes, round.reply.values()))
        ),
        "comm/up_bytes": round.up_bytes,
        "time/train_s": time.perf_counter() - started,
        **server.row(round),
    }
