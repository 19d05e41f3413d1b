"""FedSub equals a plain loop in full coordinates."""

import numpy as np
import pytest
import torch
from harness import assert_near, server_of, sgd, train_rounds
from plain_reference import batches, cohort, flat
from test_ssf import COORDINATES, Coordinates, combine, local_iteration, sent, server, wide_and_tall

from gcfed.federated.state.store import ClientStores
from gcfed.methods.subspace.fedsub import FedSub
from gcfed.methods.upload.quantization import Quantization
from gcfed.participation.faults import Faults

NONE = Faults()


def reference(
    net, data, solver, *, rounds, ratio, refresh, weight_decay=0.0, gamma=1.0, size=3, faults=NONE
):
    """The authors' rule. Each dual is kept with the subspace in which it was computed."""
    w = {n: p.detach().clone() for n, p in net.named_parameters()}
    duals = {}
    for t in range(rounds):
        space = Coordinates(w, t, ratio, refresh)
        lr = solver.lr(t)
        z0 = space.down(w)
        moves = {}
        mine = {}
        for k in cohort(data, t, size):
            if k in duals:
                old, dual = duals[k]
                mine[k] = space.down(old.up(dual, w))
            else:
                mine[k] = {n: torch.zeros_like(v) for n, v in z0.items()}
            steps = list(batches(data, solver, k, t))
            correction = {n: v / (lr * len(steps)) for n, v in mine[k].items()}
            (done,) = faults.steps(np.array([len(steps)]), np.array([k]), t, 5)
            z, _ = local_iteration(net, space, w, steps[:done], correction, lr, weight_decay)
            moves[k] = combine(torch.sub, z, z0)
        mean = {n: sum(m[n] for m in moves.values()) / len(moves) for n in z0}
        for k, move in moves.items():
            duals[k] = space, {n: mine[k][n] + move[n] - mean[n] for n in mean}
        rest = combine(torch.sub, w, space.up(z0, w))
        w = combine(torch.add, space.up({n: z0[n] + gamma * mean[n] for n in z0}, w), rest)
    return flat(w), {k: flat(dual) for k, (_, dual) in duals.items()}


@pytest.mark.parametrize(
    ("ratio", "refresh", "weight_decay", "gamma"), [(0.3, 1, 0.0, 1.0), (0.5, 3, 0.05, 0.7)]
)
def test_it_equals_the_plain_loop(federation, ratio, refresh, weight_decay, gamma):
    run = {"ratio": ratio, "refresh": refresh}
    stores = ClientStores()
    solver = sgd(weight_decay=weight_decay, lr_decay=0.8)
    method = FedSub(**run)
    ours = train_rounds(
        wide_and_tall(),
        federation,
        solver,
        rounds=4,
        methods=[method],
        k=2,
        server=server(gamma),
        stores=stores,
    )
    theirs, duals = reference(
        wide_and_tall(), federation, solver, rounds=4, weight_decay=weight_decay, gamma=gamma, **run
    )
    assert_near(ours, theirs, 1e-10)
    for client, dual in duals.items():
        kept = stores.read("fedsub", np.array([client]), server_of(method).coordinates)
        assert_near(flat(kept), dual, 1e-10)


def test_a_straggler_applies_its_dual_only_in_the_steps_that_it_makes(federation):
    solver = sgd(epochs=4)
    run = {"rounds": 3, "faults": Faults(stragglers=0.7)}
    ours = train_rounds(
        wide_and_tall(), federation, solver, methods=[FedSub(ratio=0.5, refresh=99)], k=2, **run
    )
    theirs, _ = reference(wide_and_tall(), federation, solver, ratio=0.5, refresh=99, **run)
    assert_near(ours, theirs, 1e-10)


@pytest.mark.parametrize("others", [[], [Quantization(bits=4)]])
def test_with_all_clients_in_one_subspace_the_duals_sum_to_zero(others):
    """Duals use the update that the server received, not the one before quantization."""
    method = FedSub(ratio=0.5, refresh=99)
    stores = ClientStores()
    train_rounds(
        wide_and_tall(),
        rounds=2,
        methods=[method, *others],
        stores=stores,
        cohort_of=5,
    )
    for dual in stores.read("fedsub", np.arange(5), server_of(method).coordinates).values():
        assert_near(dual.sum(0), torch.zeros_like(dual[0]), 1e-7)
        assert dual.abs().sum() > 0


def test_fedsub_sends_the_bytes_of_the_coordinates(federation):
    assert sent(FedSub(ratio=0.25), data=federation) == ([COORDINATES] * 2, COORDINATES)
    rows = []
    method = FedSub(ratio=0.25)
    run = {"rounds": 1, "methods": [method], "on_round": lambda _, row: rows.append(row)}
    train_rounds(wide_and_tall(), **run)
    assert rows[0]["comm/down_bytes"] == 3 * 2 * COORDINATES  # the reply has the same size
