"""What a metric should have seen: every round's broadcast and local models, recorded in the plain loop."""

import subprocess
import sys

from harness import plain_loop, sgd

from gcfed.federated.method import FederatedMethod
from gcfed.utils.resolvers import ROOT

EXACT = {"rel": 1e-9, "abs": 1e-12}
NAN_CLIENT = 3


class Recorder(FederatedMethod):
    """Keeps, for each round, every client's own weights and the broadcast, as NumPy arrays by name."""

    def __init__(self, poisoned=False):
        self.rounds, self.poisoned = [], poisoned

    def on_broadcast(self, round):
        self.rounds.append(({name: t.numpy().copy() for name, t in round.start.items()}, {}))

    def on_clients_start(self, stack, round):
        if self.poisoned and NAN_CLIENT in stack.clients:
            stack.full["0.weight"][stack.clients.tolist().index(NAN_CLIENT)] = float("nan")

    def on_clients_end(self, stack, round):
        for row, client in enumerate(stack.clients.tolist()):
            self.rounds[-1][1][client] = {name: t[row].numpy().copy() for name, t in stack.full.items()}


def measured(metric, net, data, *, k=1, rounds=3, poisoned=False, solver=None, cohort_of=3, world=1):
    """The metric's rows of a run, what it should have seen, and the weights in the end."""
    recorder, rows = Recorder(poisoned), []

    def finish(round, update):
        rows.append({})
        metric.on_round_end(rows[-1], round)

    trained, _ = plain_loop(
        net, data, solver or sgd(), rounds=rounds, methods=[recorder, metric], k=k, cohort_of=cohort_of,
        on_round=finish, world=world,
    )  # fmt: skip
    return rows, recorder.rounds, trained


def train_in_two_processes(folder, *overrides):
    """``src/train.py`` as a user types it, over two processes; the run lies in ``folder``."""
    layout = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "extras.figures=false")
    place = (f"paths.output_dir={folder}", f"hydra.run.dir={folder}")
    command = [sys.executable, str(ROOT / "src/train.py"), *overrides, *layout, *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
