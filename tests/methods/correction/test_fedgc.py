"""FedGC equals Algorithm 1 in NumPy.

Its two programs agree with quadprog and satisfy their KKT conditions.
"""

from functools import partial

import numpy as np
import pytest
import quadprog
import torch
from harness import (
    ArrayData,
    Sizes,
    assert_near,
    join_run,
    make_download,
    make_net,
    make_received,
    make_setup,
    make_upload,
    server_of,
    sgd,
    train_rounds,
    weights,
)
from plain_reference import batches, broken, cohort, local_sgd
from torch import nn

from gcfed.aggregators.mean import MeanAggregator
from gcfed.methods.correction.fedgc import FedGC, add_weighted_, constrain_, layer_of, multipliers
from gcfed.models.resnet import ResNet9

C = 1e-3
samples = partial(MeanAggregator, "samples")


def opposed_federation(sizes=(20, 4, 3, 5)):
    """Each client has one class, and all have similar inputs.

    Each client's training increases the others' losses.
    """
    g = torch.Generator().manual_seed(2)
    x = 1.0 + 0.5 * torch.randn(sum(sizes), 6, generator=g, dtype=torch.float64)
    return ArrayData(
        x,
        torch.arange(4).repeat_interleave(torch.tensor(sizes)),
        np.split(np.arange(len(x)), np.cumsum(sizes)[:-1]),
    )


def fedgc(net, data, solver, rounds, *, cgc=True, sgc=True, margin=C, layerwise="tensor", size=3):
    """Algorithm 1 with gradients. quadprog solves both programs, for SGC the primal over all
    weights.

    Returns the weights and the numbers of projections by CGC and SGC.
    """
    theta = weights(net)
    counts = [p.numel() for p in net.parameters()]
    ends = np.cumsum(counts)[:-1]
    # a weight and a bias in each layer
    ends = {"tensor": ends, "layer": ends[1::2], "model": []}[layerwise]
    last = None
    projected = 0
    active = 0
    for t in range(rounds):
        lr = solver.lr(t)
        gradients = []
        sizes = []
        for k in cohort(data, t, size):
            theta_B, _ = local_sgd(net, theta, batches(data, solver, k, t), lr=lr)
            pseudo = ((theta_B - theta) / lr).numpy()
            if not np.isfinite(pseudo).all():
                continue
            layers = np.split(pseudo, ends)
            if cgc and last is not None:
                for h, z in zip(layers, np.split(last, ends), strict=True):
                    if z.any():
                        v = max((margin - h @ z) / (z @ z), 0.0)
                        h += v * z
                        projected += v > 1e-9
            gradients.append(np.concatenate(layers))
            sizes.append(len(data.clients[k]))
        g = np.average(gradients, axis=0, weights=sizes)
        G = np.stack(gradients)
        if sgc:
            solution = quadprog.solve_qp(np.eye(len(g)), g, G.T.copy(), np.full(len(G), margin))
            g = solution[0]
            active = active + (solution[4] > 0).sum()
        theta = theta + lr * torch.from_numpy(g)
        last = g
    return theta, projected, active


FEDGC = {"lr": 0.3, "lr_decay": 0.9, "steps": 3}


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"layerwise": "layer"},
        {"layerwise": "model"},
        {"cgc": False},
        {"sgc": False},
    ],
)
def test_it_equals_algorithm_1(switches, monkeypatch):
    monkeypatch.setattr(
        "gcfed.methods.correction.fedgc.COLUMNS", 8
    )  # in parts of 8 of 30 and 20 weights
    data = opposed_federation()
    solver = sgd(**FEDGC)
    rows = []
    expected, projected, active = fedgc(make_net(), data, solver, 4, **switches)
    # at most 3 rounds · 3 clients · 4 tensors
    assert projected > 3 or not switches.get("cgc", True)
    assert active > 3 or not switches.get("sgc", True)
    found = train_rounds(
        make_net(),
        data,
        solver,
        rounds=4,
        methods=[FedGC(**switches)],
        aggregator=samples(),
        k=2,
        on_round=lambda round, row: rows.append(row),
    )
    assert_near(found, expected, 1e-9)
    tensors = {"tensor": 4, "layer": 2, "model": 1}[switches.get("layerwise", "tensor")]
    assert projected == pytest.approx(
        sum(row.get("fedgc/cgc_layers", 0) for row in rows) * 3 * tensors
    )
    assert active == sum(row.get("fedgc/sgc_active", 0) for row in rows)


def test_a_client_that_is_not_finite_constrains_no_other():
    data = broken(opposed_federation(), 1)
    solver = sgd(**FEDGC)
    expected, *_ = fedgc(make_net(), data, solver, 3)
    found = train_rounds(
        make_net(), data, solver, rounds=3, methods=[FedGC()], aggregator=samples(), k=2
    )
    assert_near(found, expected, 1e-9)


def test_a_layer_is_a_module_with_parameters_such_as_a_fixup_block():
    net = ResNet9(input_shape=(1, 8, 8), num_classes=3)
    layers = {}
    for name, _ in net.named_parameters():
        layers.setdefault(layer_of(net, name), []).append(name)
    assert list(layers) == ["conv1", "layer1.0", "layer1.1", "layer2", "layer3.0", "layer3.1", "fc"]
    assert sorted(layers["layer2"]) == [
        "layer2.bias_in",
        "layer2.bias_out",
        "layer2.conv.weight",
        "layer2.scale",
    ]
    assert sorted(layers["fc"]) == ["fc.bias", "fc.bias_in", "fc.weight"]


# ---------------------------------------------------------------------------------------------- CGC
def test_the_closed_form_of_cgc_equals_quadprog():
    rng = np.random.default_rng(0)
    for _ in range(50):
        h = rng.normal(size=(4, 2, 3))
        z = rng.normal(size=(2, 3))
        margin = rng.exponential()
        u = torch.from_numpy(h.copy())
        v = constrain_([(u, torch.from_numpy(z))], margin).numpy()
        for k in range(4):
            primal = quadprog.solve_qp(np.eye(6), h[k].ravel(), z.reshape(6, 1), np.array([margin]))
            np.testing.assert_allclose(u[k].numpy().ravel(), primal[0], rtol=0, atol=1e-12)
            np.testing.assert_allclose(v[k], primal[4], rtol=0, atol=1e-12)


def test_cgc_does_not_change_satisfied_or_unconstrained_gradients():
    h = torch.randn(3, 4, 5)
    for move in (torch.zeros(4, 5), h[0].clone()):
        u = h.clone()
        v = constrain_([(u[:1], move)], 0.0)
        assert torch.equal(u, h)
        assert v.tolist() == [0.0]


# ---------------------------------------------------------------------------------------------- SGC
def solution(G, mean, margin):
    """z and λ, or None."""
    lam = multipliers(G @ G.T, G @ mean, margin)
    return None if lam is None else (mean + G.T @ lam, lam)


def assert_kkt(G, mean, margin, z, lam, atol=1e-8):
    slack = G @ z - margin
    np.testing.assert_allclose(z, mean + G.T @ lam, rtol=0, atol=atol)
    assert (lam >= 0).all()
    assert (slack > -atol).all()
    np.testing.assert_allclose(lam * slack, 0, rtol=0, atol=atol * max(1, lam.max()))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_sgc_satisfies_its_kkt_conditions_and_is_the_nearest_at_all_scales(scale):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        G = rng.normal(size=(4, 6)) * rng.exponential(size=(4, 1))
        mean = rng.dirichlet(np.ones(4)) @ G
        z, lam = solution(scale * G, scale * mean, scale**2 * 0.1)
        assert_kkt(G, mean, 0.1, z / scale, lam)
        nearest = quadprog.solve_qp(np.eye(6), mean, G.T.copy(), np.full(4, 0.1))[0]
        np.testing.assert_allclose(z / scale, nearest, rtol=0, atol=1e-7)


def test_sgc_with_more_clients_than_weights_and_with_equal_clients():
    """In these cases GGᵀ is singular."""
    many = np.random.default_rng(0).normal(size=(9, 3))
    many[:, 0] = abs(many[:, 0]) + 0.5  # otherwise no update satisfies all
    twins = np.array(
        [[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [-0.9, 0.5, 0.0, 0.0], [-0.9, 0.5, 0.0, 0.0]]
    )
    for G, mean in ((many, -many.mean(0)), (twins, twins.mean(0) + twins[2])):
        z, lam = solution(G, mean, 0.1)
        assert lam.max() > 0
        assert_kkt(G, mean, 0.1, z, lam, atol=1e-6)  # λ is about 30


@pytest.mark.parametrize(
    "G",
    [
        np.array([[1.0, 2.0, 0.0], [-1.0, -2.0, 0.0]]),  # opposite
        np.array([[1.0, 2.0, 0.0], [-3.0, -6.0, 0.0], [0.0, 0.0, 1.0]]),
        np.array([[1.0, 0.0, 0.3], [-0.5, 0.8, 0.3], [-0.5, -0.8, -0.6]]),  # they sum to zero
        np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),  # one is zero
    ],
)
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e3])
def test_sgc_without_a_solution_returns_none(G, scale):
    with pytest.raises(ValueError, match="inconsistent"):
        quadprog.solve_qp(np.eye(3), G.mean(0), G.T.copy(), np.full(len(G), C))
    G = scale * G
    assert solution(G, np.array([0.7] + [0.3] * (len(G) - 1)) @ G, scale**2 * C) is None


def test_opposite_gradients_have_a_solution_without_a_margin():
    G = np.array([[1.0, 2.0], [-1.0, -2.0]])
    z, _ = solution(G, 0.5 * G[0], 0.0)
    np.testing.assert_allclose(z, 0, rtol=0, atol=1e-6)


def test_if_no_update_satisfies_all_the_mean_is_applied_and_counted():
    part = server_of(FedGC(cgc=False))
    net = nn.Linear(3, 1, bias=False).double()
    join_run(part, make_setup(net))
    start = {"weight": torch.zeros(1, 3).double()}
    delta = {"weight": torch.tensor([[[0.5, 0.3, 0.0]], [[-0.5, -0.3, 0.0]]]).double()}
    upload = make_upload(delta, np.array([1, 3]))
    round = make_received(start)
    row = {}
    upload.clients = np.array([4, 1])
    update = {"weight": torch.tensor([[0.1, 0.2, 0.0]]).double()}
    part.on_broadcast(make_download(start), round)
    part.on_receive(upload, round)
    part.on_aggregate_end(update, round)
    part.on_round_end(row, round)
    assert torch.equal(update["weight"], torch.tensor([[0.1, 0.2, 0.0]]).double())
    assert row == {"fedgc/sgc_active": 0, "fedgc/sgc_failed": 1}


@pytest.mark.parametrize(
    ("cohort_of", "cgc", "factors"),
    [(3, True, [1, 2, 2]), (5, True, [1, 1, 1]), (3, False, [1, 1, 1])],
)
def test_the_bytes_of_the_servers_gradient_count_unless_all_clients_know_it(
    cohort_of, cgc, factors
):
    net = make_net()
    sizes = Sizes()
    train_rounds(net, rounds=3, methods=[FedGC(cgc=cgc), sizes], cohort_of=cohort_of)
    size = 8 * weights(net).numel()
    assert sizes.down == [factor * size for factor in factors]
    assert set(sizes.up) == {size}


def test_a_multiplier_outside_the_grid_makes_the_step_nan():
    """The sum of a number outside the grid would be arbitrary.

    It is NaN, so the server refuses the step.
    """
    round = make_received({"w": torch.zeros(2)})
    upload = make_upload({"w": torch.ones(2, 2)}, np.ones(2))
    upload.clients = np.array([1, 4])
    for weighting, expected in (([0.5, 1.5], 2.0), ([0.5, 1e30], float("nan"))):
        update = {"w": torch.zeros(2)}
        add_weighted_(update, [upload], torch.tensor(weighting, dtype=torch.float64), round)
        torch.testing.assert_close(update["w"], torch.full((2,), expected), equal_nan=True)
