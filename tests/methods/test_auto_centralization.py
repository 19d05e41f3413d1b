"""gc=auto against a plain loop that follows its rule in float64, and its estimate against what it estimates."""

import numpy as np
import pytest
import torch
from harness import make_setup, sgd, train_rounds
from plain_clients import Net, federation, layers

from gcfed.federated.batches import plan_batches
from gcfed.federated.round import Round
from gcfed.methods.auto_centralization import SENT, SQUARES, AutoCentralization
from gcfed.methods.centralization import GradientCentralization

ROUNDS, COHORT, MEMORY, THRESHOLD = 6, 3, 0.6, 0.3
WEIGHTS = ("fc1.weight", "fc2.weight", "fc3.weight")


def plain(data, threshold, first):
    """The final weights, and q and where Local GC was on, in each round; ``first`` has Local GC in the first one."""
    w0 = [p.detach().clone() for p in Net().parameters()]
    names = [name for name, _ in Net().named_parameters()]
    above, signal, power = {name: name not in first for name in WEIGHTS}, {}, {}
    seen = []
    for t in range(ROUNDS):
        local = {name: not any(above[before] for before in WEIGHTS[: i + 1]) for i, name in enumerate(WEIGHTS)}
        ids = np.sort(np.random.default_rng(t).choice(len(data.clients), COHORT, replace=False)).tolist()
        deltas, removed = [], {name: [] for name in WEIGHTS}
        for k in ids:
            plan = plan_batches(
                data, np.array([k]), seed=5, round_index=t, batch_size=4, epochs=2, steps=None, last_batch="keep",
                to_device=torch.from_numpy,
            )  # fmt: skip
            w, r = [p.clone() for p in w0], dict.fromkeys(WEIGHTS, 0.0)
            for step, count in enumerate(plan.counts[0]):
                idx = plan.index[0, step, :count]
                leaves = [p.requires_grad_() for p in w]
                loss = torch.nn.functional.cross_entropy(layers(leaves, data.x[idx])[-1], data.y[idx])
                grads = list(torch.autograd.grad(loss, leaves))
                for i, name in enumerate(names):
                    if name in WEIGHTS:
                        mean = grads[i].mean(1, keepdim=True)
                        r[name] = r[name] + mean[:, 0]
                        grads[i] = grads[i] - mean if local[name] else grads[i]
                w = [(p - 0.1 * g).detach() for p, g in zip(leaves, grads, strict=True)]
            deltas.append([p - q for p, q in zip(w, w0, strict=True)])
            for name in WEIGHTS:
                removed[name].append(r[name].numpy())
        update = [sum(parts) / COHORT for parts in zip(*deltas, strict=True)]
        update = [u - u.mean(1, keepdim=True) if u.dim() == 2 else u for u in update]  # Global GC
        w0 = [p + u for p, u in zip(w0, update, strict=True)]
        row = {}
        for name, parts in removed.items():
            row[f"gc/local/{name}"] = float(local[name])
            squares = np.mean([part @ part for part in parts])
            mean = np.mean(parts, 0)
            common = (COHORT * mean @ mean - squares) / (COHORT - 1)
            past = MEMORY if t else 0
            signal[name] = past * signal.get(name, 0) + (1 - past) * common
            power[name] = past * power.get(name, 0) + (1 - past) * squares
            q = row[f"gc/signal/{name}"] = min(1, max(0, signal[name]) / power[name])
            above[name] = q > (threshold / 2 if above[name] else threshold)
        seen.append(row)
    return torch.cat([p.flatten() for p in w0]), seen


@pytest.mark.parametrize(("k", "world"), [(1, 1), (3, 1), (2, 2)])
def test_it_is_its_rule_however_the_cohort_is_spread(k, world):
    data, rows = federation(), []
    method = AutoCentralization(threshold=THRESHOLD, memory=MEMORY, boundary="fc3")
    found = train_rounds(
        Net(), data, sgd(), rounds=ROUNDS, methods=[method], k=k, world=world, cohort_of=COHORT,
        on_round=lambda _, row: rows.append({key: value for key, value in row.items() if key.startswith("gc/")}),
    )  # fmt: skip
    expected, wanted = plain(data, THRESHOLD, WEIGHTS[:2])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert rows == [pytest.approx(row, abs=1e-9) for row in wanted]
    switches = {key: {row[key] for row in wanted} for key in wanted[0] if key.startswith("gc/local/")}
    assert {0.0, 1.0} in switches.values()  # the rule did something here


def test_where_nothing_is_switched_it_is_gc_fed():
    args = {"data": federation(), "solver": sgd(), "rounds": 1, "cohort_of": COHORT}
    found = train_rounds(Net(), methods=[AutoCentralization(boundary="fc2")], **args)
    expected = train_rounds(Net(), methods=[GradientCentralization(boundary="fc2")], **args)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_the_signals_share_is_estimated_without_bias(share):
    """Clients r_k = a + noise of a known share, many cohorts of five."""
    method, g, size, m = AutoCentralization(memory=0.999), torch.Generator().manual_seed(1), 40, 5
    net = torch.nn.Sequential(torch.nn.Linear(3, size)).double()
    method.validate(make_setup(net, cohort_of=m))
    a = torch.randn(size, generator=g).double()
    a *= (share * size) ** 0.5 / a.norm()
    start = {name: p.detach() for name, p in net.named_parameters()}
    for t in range(2000):
        round = Round(t, 1, np.arange(m), 9, start, lr=0.1, num_finite=m)
        method.on_broadcast(round)
        r = a + (1 - share) ** 0.5 * torch.randn(m, size, generator=g).double()
        squares = r.square().sum(1).mean()[None]
        round.received = {SENT: {"0.weight": r.mean(0)}, SQUARES: {"all": squares}}
        method.on_aggregate_end({}, round)
    row = {}
    method.on_round_end(row, round)
    assert row["gc/signal/0.weight"] == pytest.approx(share, abs=0.02)


def test_a_client_alone_and_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"participation\.per_round"):
        AutoCentralization().validate(make_setup(Net(), cohort_of=1))
    for settings, key in (
        ({"threshold": 2}, "gc.threshold"),
        ({"memory": 1}, "gc.memory"),
    ):
        with pytest.raises(ValueError, match=key):
            AutoCentralization(**settings)
