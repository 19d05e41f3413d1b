"""Drift and the metrics of local models equal NumPy."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import ArrayData, make_net, random_federation
from recording import EXACT, NAN_CLIENT, measured
from torch import nn

from gcfed.federated.parts import ClientPart, per_client
from gcfed.metrics.local_models import CKA, Clients, Forgetting, Personal, linear_cka
from gcfed.metrics.updates import Drift
from gcfed.models.mlp import MLP
from gcfed.utils.rng import generator


def flat(state):
    return np.concatenate([t.ravel() for t in state.values()])


def logits_of(state, x, head="2"):
    """The outputs of ``make_net()`` in NumPy. ``head`` is the name of its last layer."""
    hidden = np.tanh(x @ state["0.weight"].T + state["0.bias"])
    return hidden @ state[f"{head}.weight"].T + state[f"{head}.bias"]


@pytest.mark.parametrize(("k", "poisoned"), [(1, False), (3, True)])
def test_drift(k, poisoned):
    rows, seen, _ = measured(
        Drift(), make_net(), random_federation(), k=k, poisoned=poisoned, cohort_of=4
    )
    assert any(NAN_CLIENT in clients for _, clients in seen)
    for row, (start, clients) in zip(rows, seen, strict=True):
        w = flat(start)
        deltas = np.array([flat(w_k) - w for w_k in clients.values()])
        deltas = deltas[np.isfinite(deltas).all(1)]
        mean = deltas.mean(0)
        norms = np.linalg.norm(deltas, axis=1)
        expected = {
            "drift/client_norm": norms.mean(),
            "drift/relative": (norms / np.linalg.norm(w)).mean(),
            "drift/update_norm": np.linalg.norm(mean),
            "drift/divergence": np.sqrt(((deltas - mean) ** 2).sum(1).mean()),
            "drift/cosine": (deltas @ mean / norms).mean() / np.linalg.norm(mean),
        }
        assert row == pytest.approx(expected, **EXACT)


class Moves(ClientPart):
    """Moves each client's weights by about 0.5. They stay close to each other."""

    def __init__(self, apart):
        self.apart = apart

    def prepare(self, stack, own, download):
        for t in stack.full.values():
            t += 0.5 + self.apart * per_client(torch.from_numpy(stack.clients), t)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("apart", "most"), [(2**-10, 1e-9), (2**-22, 1e-3)])
def test_divergence_of_clients_that_nearly_agree(k, apart, most):
    data = random_federation(dtype=torch.float32)
    data.clients = [np.array([0])] * 5
    net = make_net(dtype=torch.float32)
    rows, seen, _ = measured(Drift(), net, data, k=k, methods=[Moves(apart)])
    for row, (start, clients) in zip(rows, seen, strict=True):
        deltas = np.array([flat(w_k).astype(float) - flat(start) for w_k in clients.values()])
        mean = deltas.mean(0)
        expected = np.sqrt(((deltas - mean) ** 2).sum(1).mean())
        assert 0 < expected < 20 * apart
        assert row["drift/divergence"] == pytest.approx(expected, rel=most)
        assert row["drift/update_norm"] == pytest.approx(np.linalg.norm(mean), rel=1e-13)


# ---------------------------------------------------------------------------------------------- CKA
def cka_by_hsic(x, y):
    """Kornblith et al., eq. 1 to 3: the Hilbert-Schmidt independence criterion of two kernels."""
    n = len(x)
    h = np.eye(n) - np.ones((n, n)) / n

    def hsic(k, m):
        return np.trace(k @ h @ m @ h) / (n - 1) ** 2

    k, m = (np.reshape(t, (n, -1)) @ np.reshape(t, (n, -1)).T for t in (x, y))
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


@pytest.mark.parametrize("shape", [(4,), (3, 4, 5)])  # narrower and wider than the 12 samples
def test_linear_cka(shape):
    x, y = np.random.default_rng(0).normal(size=(2, 12, *shape)) + 3
    ours = linear_cka(torch.tensor(x), torch.tensor(y)).item()
    assert ours == pytest.approx(cka_by_hsic(x, y), **EXACT)
    assert 0 < ours < 1
    assert linear_cka(torch.tensor(x), torch.ones(12, 2).double()).isnan()


class WithTest(ArrayData):
    """Data with a test split."""

    num_test = 9
    test = torch.randn(9, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def fetch_test(self, bounds):
        return self.test[slice(*bounds)], torch.zeros(self.num_test)[slice(*bounds)]


def mlp(hidden=(5,)):
    torch.manual_seed(0)
    return MLP(input_shape=(6,), num_classes=4, hidden=hidden).double()


def forward(state, x):
    """The MLP in NumPy. Returns the outputs of both layers."""
    hidden = np.maximum(x @ state["fc1.weight"].T + state["fc1.bias"], 0)
    return hidden, hidden @ state["fc2.weight"].T + state["fc2.bias"]


def test_cka_of_each_layer():
    """It uses all test samples, so their order does not matter, in every second
    round and the last.
    """
    data = random_federation()
    data = WithTest(data.x, data.y, data.clients)
    rows, seen, _ = measured(CKA(every=2, samples=100), mlp(), data, k=3)
    assert rows[0] == {}
    for row, (start, clients) in list(zip(rows, seen, strict=True))[1:]:
        theirs = forward(start, data.test.numpy())
        own = [forward(w_k, data.test.numpy()) for w_k in clients.values()]
        for stage, name in enumerate(("cka/fc1", "cka/fc2")):
            expected = np.mean([cka_by_hsic(theirs[stage], o[stage]) for o in own])
            assert row.pop(name) == pytest.approx(expected, **EXACT)
        assert row == {}


# ------------------------------------------------------------------------------------------- the
# clients' own data
def scores(logits, y):
    """Accuracy and mean cross-entropy over the labels that are not padding."""
    logits = logits.reshape(-1, logits.shape[-1])[y.ravel() >= 0]
    y = y.ravel()[y.ravel() >= 0]
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return (logits.argmax(1) == y).mean(), -log_p[np.arange(len(y)), y].mean()


@pytest.mark.parametrize(("k", "poisoned"), [(1, False), (3, True)])
def test_clients_are_measured_before_and_after_training(k, poisoned):
    """Training uses dropout, the measurement does not."""
    data = random_federation()
    net = make_net()
    net.insert(2, nn.Dropout(0.5))
    rows, seen, _ = measured(Clients(every=1), net, data, k=k, poisoned=poisoned, cohort_of=4)
    for row, (start, clients) in zip(rows, seen, strict=True):
        expected = []
        for client, w_k in clients.items():
            if poisoned and client == NAN_CLIENT:
                continue
            x = data.x[data.client(client)].numpy()
            y = data.y[data.client(client)].numpy()
            before, after = (scores(logits_of(state, x, "3"), y) for state in (start, w_k))
            expected.append([*before, *after])
        names = [
            f"clients/{name}_{when}" for when in ("before", "after") for name in ("acc", "loss")
        ]
        means = dict(zip(names, np.mean(expected, axis=0), strict=True))
        assert row == pytest.approx(means, **EXACT)
    assert net.training


def test_sequences(monkeypatch):
    """Each position has a label or −100. Parts of two samples have different numbers of labels."""
    monkeypatch.setattr("gcfed.metrics.local_models.AT_ONCE", 2)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(10, 5, 6, generator=g, dtype=torch.float64)
    y = torch.randint(4, (10, 5), generator=g)
    y[torch.rand(10, 5, generator=g) < 0.4] = -100
    data = ArrayData(x, y, [np.arange(3), np.arange(3, 10)])
    runs = (
        measured(m, nn.Linear(6, 4).double(), data, rounds=1, cohort_of=2)
        for m in (Clients(1), Forgetting(1))
    )
    for (row,), ((start, clients),), _ in runs:
        own = [
            (np.arange(10), start),
            *((data.clients[k], w) for k, state in clients.items() for w in (start, state)),
        ]
        outputs = [(x[i].numpy() @ s["weight"].T + s["bias"], y[i].numpy()) for i, s in own]
        everyone, *each = (scores(*of) for of in outputs)
        if "forgetting/before" in row:
            assert row["forgetting/before"] == pytest.approx(everyone[1], **EXACT)
        else:
            assert list(row.values()) == pytest.approx(
                np.mean(np.array(each).reshape(2, 4), axis=0), **EXACT
            )


# -------------------------------------------------------------------------------- the clients' own
# test splits
def with_own_tests(sizes):
    """Clients whose last third of samples is a test split.

    It is empty for fewer than three samples.
    """
    data = random_federation(sizes)
    ends = np.cumsum(sizes)
    cuts = [end - size // 3 for end, size in zip(ends, sizes, strict=True)]
    data.clients = [
        np.arange(end - size, cut) for end, size, cut in zip(ends, sizes, cuts, strict=True)
    ]
    tests = [np.arange(cut, end) for end, cut in zip(ends, cuts, strict=True)]
    data.client_test = 0.33
    data.tests_of_clients = SimpleNamespace(client=tests.__getitem__)
    return data, tests


@pytest.mark.parametrize(
    ("k", "poisoned", "sizes"), [(1, False, (30,) * 11), (3, True, (7, 12, 5, 9, 1))]
)
def test_personal_models_on_their_own_tests(k, poisoned, sizes):
    """The worst tenth of eleven clients is two clients."""
    data, tests = with_own_tests(sizes)
    cohort_of = 4 if poisoned else len(sizes)
    rows, seen, _ = measured(
        Personal(every=1), make_net(), data, k=k, poisoned=poisoned, cohort_of=cohort_of
    )
    assert any(NAN_CLIENT in clients for _, clients in seen)
    for row, (start, clients) in zip(rows, seen, strict=True):
        found = {"global": [], "local": []}
        for client, w_k in clients.items():
            if not len(tests[client]) or (poisoned and client == NAN_CLIENT):
                continue
            x, y = (t[tests[client]].numpy() for t in (data.x, data.y))
            for model, state in (("global", start), ("local", w_k)):
                found[model].append((logits_of(state, x).argmax(1) == y).mean())
        expected = {}
        for model, acc in found.items():
            expected[f"personal/{model}_acc"] = np.mean(acc)
            expected[f"personal/{model}_worst10"] = np.mean(sorted(acc)[: math.ceil(len(acc) / 10)])
            expected[f"personal/{model}_std"] = np.std(acc)
        assert row == pytest.approx(expected, **EXACT)


def test_clients_without_a_test_sample_are_refused():
    data, _ = with_own_tests((2, 1, 2))
    with pytest.raises(ValueError, match=r"data\.client_test=0\.33 leaves no client a test sample"):
        measured(Personal(every=1), make_net(), data, cohort_of=2)


# -------------------------------------------------------------------------------------- data of the
# cohort
def loss_of(state, x, y):
    return scores(logits_of(state, x), y)[1]


@pytest.mark.parametrize(("k", "poisoned", "samples"), [(1, False, None), (3, True, 6)])
def test_each_local_model_on_all_data_of_the_cohort(k, poisoned, samples, monkeypatch):
    """Parts of five samples mix the samples of several clients."""
    monkeypatch.setattr("gcfed.metrics.local_models.AT_ONCE", 5)
    data = random_federation()
    net = make_net()
    rows, seen, _ = measured(Forgetting(1, samples), net, data, k=k, poisoned=poisoned, cohort_of=4)
    assert net.training
    for t, (row, (start, clients)) in enumerate(zip(rows, seen, strict=True)):
        drawn = {}
        cohort = sorted(clients)
        for i in cohort:
            own = data.client(i)
            if samples is not None and len(own) > samples:
                own = generator(5, "forgetting", t, i).choice(own, samples, replace=False)
            drawn[i] = data.x[own].numpy(), data.y[own].numpy()
        after = {
            k: {i: loss_of(w_k, *drawn[i]) for i in cohort}
            for k, w_k in clients.items()
            if not (poisoned and k == NAN_CLIENT)
        }
        others = [
            np.mean([loss for i, loss in losses.items() if i != k]) for k, losses in after.items()
        ]
        before = [loss_of(start, *drawn[i]) for i in cohort]
        expected = {
            "forgetting/before": np.average(before, weights=data.sizes(cohort)),
            "forgetting/after": np.mean([[*losses.values()] for losses in after.values()]),
            "forgetting/own": np.mean([losses[k] for k, losses in after.items()]),
            "forgetting/others": np.mean(others),
        }
        assert row == pytest.approx(expected, **EXACT)


def test_a_single_client_has_no_other_clients_to_forget():
    (row,), _, _ = measured(Forgetting(1), make_net(), random_federation(), rounds=1, cohort_of=1)
    assert row.keys() == {"forgetting/before", "forgetting/after", "forgetting/own"}
    assert row["forgetting/after"] == row["forgetting/own"]
