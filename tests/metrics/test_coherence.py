"""gc/rho/*: whether the clients agree in what P takes out."""

import numpy as np
import pytest
from conftest import TWO, random_federation, read_rows
from harness import make_net
from recording import EXACT, NAN_CLIENT, measured

from gcfed.metrics.cohort import Coherence
from gcfed.run import train


def expected(start, locals_):
    """The definition, client by client, with P as a projection of whole tensors."""
    found = {}
    for name in (name for name, t in start.items() if t.ndim > 1):
        removed = []
        for w in locals_.values():
            delta = w[name] - start[name]
            mean = delta.mean(axis=tuple(range(1, delta.ndim)), keepdims=True)
            removed.append(np.broadcast_to(mean, delta.shape))
        squares = [np.sum(r**2) for r in removed]
        found[f"gc/rho/{name}"] = np.sum(np.mean(removed, 0) ** 2) / np.mean(squares)
    return found


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("poisoned", [False, True])
def test_it_is_its_definition(k, poisoned):
    rows, rounds, _ = measured(Coherence(), make_net(), random_federation(), k=k, cohort_of=4, poisoned=poisoned)
    for row, (start, locals_) in zip(rows, rounds, strict=True):
        finite = {client: w for client, w in locals_.items() if not (poisoned and client == NAN_CLIENT)}
        wanted = expected(start, finite)
        assert row == pytest.approx(wanted, **EXACT)
        assert all(0 <= rho <= 1 + 1e-9 for rho in row.values())


def test_a_client_agrees_with_itself_and_two_processes_measure_what_one_does(config, tmp_path):
    small = ("model.hidden=[8]", "rounds=2", "data.limit_train=100", "data.limit_test=20", "precision=64-true",
             "metrics=coherence", "gc=none", "participation.num_clients=4")  # fmt: skip
    train(config(*small, "participation.per_round=1", folder=tmp_path / "alone"))
    for row in read_rows(tmp_path / "alone" / "metrics.csv"):
        assert [row[f"gc/rho/{name}.weight"] for name in ("fc1", "fc2")] == pytest.approx([1, 1])
    runs = {"one": (), "two": TWO}
    for name, more in runs.items():
        train(config(*small, "participation.per_round=3", *more, folder=tmp_path / name))
    one, two = (read_rows(tmp_path / name / "metrics.csv") for name in runs)
    for a, b in zip(one, two, strict=True):
        rho = {key: value for key, value in a.items() if key.startswith("gc/")}
        assert len(rho) == 2
        assert {key: b[key] for key in rho} == pytest.approx(rho, rel=1e-9)
