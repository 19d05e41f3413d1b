"""The angles of uploads equal NumPy's."""

import numpy as np
import pytest
import recording
from harness import Spy, make_net, random_federation

from gcfed.federated.parts import Order
from gcfed.methods.subspace.ssf import SSF
from gcfed.metrics.updates import Angle

EXACT = {"rel": 1e-9, "abs": 1e-9}
NAN_CLIENT = 3


class Edits(Spy):
    """Changes the uploads, the aggregated update and the server's step.

    With ``poisoned``, one client diverges.
    """

    def __init__(self, poisoned=False):
        self.poisoned = poisoned

    def send(self, upload, own, download):
        for row, client in enumerate(upload.clients.tolist()):
            # client 1 sends zeros, later clients reverse the sign
            upload.delta["0.weight"][row] *= 1 - client
            if self.poisoned and client == NAN_CLIENT:
                upload.delta["2.bias"][row, 0] = float("nan")

    def on_receive(self, upload, round):
        upload.delta["2.weight"] -= 1.0  # after the metrics, which must not see it

    def on_aggregate_end(self, update, round):
        update["2.weight"].mul_(-3)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.net[0].bias.grad += 0.01


class Recorder(Spy):
    """Records each round's broadcast, uploads and aggregated update as vectors.

    With ``full``, uploads are w_k − w.
    """

    def __init__(self, names, full=False):
        self.names = names
        self.full = full
        self.starts = []
        self.sent = []
        self.updates = []
        self.order = Order.PROJECTS if full else Order.CORRECTS  # after SSF has lifted the update

    def flat(self, tensors, k=1):
        return np.concatenate([tensors[n].numpy().reshape(k, -1) for n in self.names], 1).copy()

    def on_broadcast(self, download, round):
        self.starts.append(self.flat(round.broadcast_model)[0])
        self.sent.append([])

    def on_clients_end(self, stack, download):
        if self.full:
            self.sent[-1] += list(
                self.flat(stack.full, len(stack)) - self.flat(download.broadcast_model)
            )

    def send(self, upload, own, download):
        if not self.full:
            self.sent[-1] += list(self.flat(upload.delta, len(upload.clients)))

    def on_aggregate_end(self, update, round):
        self.updates.append(self.flat(update)[0])


def measured(metric, *, methods=(), full=False, **run):
    """Runs a metric. Returns its rows and the recorder."""
    net = make_net()
    recorder = Recorder([name for name, _ in net.named_parameters()], full)
    methods = [*methods, recorder]
    rows, *_ = recording.measured(metric, net, random_federation(), methods=methods, **run)
    return rows, recorder


def angles(vectors, other):
    cosines = vectors @ other / np.linalg.norm(vectors, axis=1) / np.linalg.norm(other)
    return np.degrees(np.arccos(cosines)), cosines


@pytest.mark.parametrize(("k", "poisoned"), [(1, False), (3, True)])
def test_angles_of_the_uploads_equal_numpy(k, poisoned):
    """Other methods' changes of the uploads, the aggregated update and the server's step count."""
    rows, seen = measured(Angle(), k=k, rounds=5, methods=[Edits(poisoned)], cohort_of=4)
    assert rows[0].keys() == {"angle/update"}
    above = []
    for t, row in enumerate(rows):
        uploads = np.array([u for u in seen.sent[t] if np.isfinite(u).all()])
        mean_cosine = angles(uploads, seen.updates[t])[1].mean()
        assert row.pop("angle/update") == pytest.approx(np.degrees(np.arccos(mean_cosine)), **EXACT)
        if t:
            to_server, _ = angles(uploads, seen.starts[t] - seen.starts[t - 1])
            above.append((to_server > 90).mean())
            assert row == {
                "angle/server": pytest.approx(to_server.mean(), **EXACT),
                "angle/above_90": pytest.approx(above[-1]),
            }
    assert 0 < np.mean(above) < 1


def test_every_second_round_and_the_last_are_measured():
    """The server's last step is known although its round was not measured."""
    all_rows, *_ = measured(Angle(), rounds=5)
    rows, *_ = measured(Angle(every=2), rounds=5)
    assert [bool(row) for row in rows] == [False, True, False, True, True]
    assert [rows[t] for t in (1, 3, 4)] == [all_rows[t] for t in (1, 3, 4)]


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_coordinates_of_a_subspace_count_as_full_updates(ratio):
    """The subspace has half the dimensions, or all of them in a rotated basis."""
    rows, seen = measured(Angle(), methods=[SSF(ratio=ratio)], full=True, k=2)
    for t, row in enumerate(rows):
        cosine = angles(np.array(seen.sent[t]), seen.updates[t])[1].mean()
        assert row["angle/update"] == pytest.approx(np.degrees(np.arccos(cosine)), **EXACT)
        if t:
            to_server, _ = angles(np.array(seen.sent[t]), seen.starts[t] - seen.starts[t - 1])
            assert row["angle/server"] == pytest.approx(to_server.mean(), **EXACT)
