"""FedGC against Algorithm 1 in NumPy, its two programs against quadprog and their KKT conditions."""

import logging
import threading
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import quadprog
import torch
from harness import (
    ArrayData,
    Sizes,
    client_of,
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

from gcfed.federated.aggregate import MeanAggregator
from gcfed.federated.received import Received
from gcfed.methods.fedgc import FedGC, add_weighted_, constrain_, layer_of, multipliers, products
from gcfed.models.resnet9 import ResNet9
from gcfed.run import train

C = 1e-3
samples = partial(MeanAggregator, "samples")


def opposed_federation(sizes=(20, 4, 3, 5)):
    """Each client has one class, on much the same inputs: what one learns, the others forget."""
    g = torch.Generator().manual_seed(2)
    x = 1.0 + 0.5 * torch.randn(sum(sizes), 6, generator=g, dtype=torch.float64)
    return ArrayData(
        x, torch.arange(4).repeat_interleave(torch.tensor(sizes)), np.split(np.arange(len(x)), np.cumsum(sizes)[:-1])
    )


# --------------------------------------------------------------------------------------------------------- Algorithm 1
def fedgc(net, data, solver, rounds, *, cgc=True, sgc=True, margin=C, ridge=0.0, layerwise="tensor", size=3):
    """Algorithm 1 in its own words, in gradients; both programs go to quadprog, SGC as the primal over all weights.

    Returns the weights and how often CGC, SGC projected.
    """
    theta, counts = weights(net), [p.numel() for p in net.parameters()]
    ends = np.cumsum(counts)[:-1]
    ends = {"tensor": ends, "layer": ends[1::2], "model": []}[layerwise]  # a weight and a bias in each layer
    last, projected, active = None, 0, 0
    for t in range(rounds):
        lr, gradients, sizes = solver.lr(t), [], []
        for k in cohort(data, t, size):
            theta_B, _ = local_sgd(net, theta, batches(data, solver, k, t), lr=lr)
            pseudo = ((theta_B - theta) / lr).numpy()
            if not np.isfinite(pseudo).all():
                continue
            layers = np.split(pseudo, ends)
            if cgc and last is not None:
                for h, z in zip(layers, np.split(last, ends), strict=True):
                    if z.any():
                        v = quadprog.solve_qp(
                            np.array([[z @ z + ridge]]), np.array([margin - h @ z]), np.eye(1), np.zeros(1)
                        )[0]
                        v = max(float(v[0]), 0.0)
                        h += v * z
                        projected += v > 0
            gradients.append(np.concatenate(layers))
            sizes.append(len(data.clients[k]))
        g, G = np.average(gradients, axis=0, weights=sizes), np.stack(gradients)
        if sgc:
            solution = quadprog.solve_qp(np.eye(len(g)), g, G.T.copy(), np.full(len(G), margin))
            g, active = solution[0], active + (solution[4] > 0).sum()
        theta, last = theta + lr * torch.from_numpy(g), g
    return theta, projected, active


FEDGC = {"lr": 0.3, "lr_decay": 0.9, "steps": 3}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("switches", [{}, {"ridge": 0.1}, {"layerwise": "layer"}, {"layerwise": "model"}])
def test_it_equals_algorithm_1(k, switches, monkeypatch):
    monkeypatch.setattr("gcfed.methods.fedgc.COLUMNS", 8)  # of the 30 and 20 weights
    data, solver = opposed_federation(), sgd(**FEDGC)
    expected, projected, active = fedgc(make_net(), data, solver, 6, **switches)
    assert projected > 3  # of 5 rounds and 3 clients, by 4 tensors or not
    assert active > 3
    method = FedGC(**switches)
    found = train_rounds(make_net(), data, solver, rounds=6, methods=[method], aggregator=samples(), k=k)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("cgc", "sgc"), [(True, False), (False, True)])
def test_each_half_alone_equals_its_half_of_algorithm_1(cgc, sgc):
    data, solver = opposed_federation(), sgd(**FEDGC)
    expected, projected, active = fedgc(make_net(), data, solver, 5, cgc=cgc, sgc=sgc)
    assert (projected > 0, active > 0) == (cgc, sgc)
    method = FedGC(cgc=cgc, sgc=sgc)
    found = train_rounds(make_net(), data, solver, rounds=5, methods=[method], aggregator=samples(), k=3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_a_layer_of_fixup_is_a_block_with_its_scalars():
    net = ResNet9(input_shape=(1, 8, 8), num_classes=3)
    layers = {}
    for name, _ in net.named_parameters():
        layers.setdefault(layer_of(net, name), []).append(name)
    assert list(layers) == ["conv1", "layer1.0", "layer1.1", "layer2", "layer3.0", "layer3.1", "fc"]
    assert sorted(layers["layer2"]) == ["layer2.bias_in", "layer2.bias_out", "layer2.conv.weight", "layer2.scale"]
    assert sorted(layers["fc"]) == ["fc.bias", "fc.bias_in", "fc.weight"]


def test_a_scalar_of_the_network_itself_is_a_layer_of_its_own():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.scale = nn.Parameter(torch.ones(()))
    assert [layer_of(net, name) for name, _ in net.named_parameters()] == ["", "0", "0", "1", "1"]


def test_without_both_halves_it_is_fedavg_bit_for_bit(federation):
    method = FedGC(cgc=False, sgc=False)
    found = train_rounds(make_net(), federation, sgd(), rounds=4, methods=[method], aggregator=samples(), k=3)
    plain = train_rounds(make_net(), federation, sgd(), rounds=4, aggregator=samples(), k=3)
    assert torch.equal(found, plain)


def test_one_client_and_one_step_of_the_first_round_are_plain_sgd(federation):
    solver = sgd(steps=1)
    found = train_rounds(make_net(), federation, solver, rounds=1, methods=[FedGC()], cohort_of=1)
    plain = train_rounds(make_net(), federation, solver, rounds=1, cohort_of=1)
    assert torch.equal(found, plain)


@pytest.mark.parametrize("k", [1, 3])
def test_a_client_without_finite_numbers_constrains_nobody(k):
    data, solver = broken(opposed_federation(), 1), sgd(**FEDGC)
    expected, *_ = fedgc(make_net(), data, solver, 5)
    found = train_rounds(make_net(), data, solver, rounds=5, methods=[FedGC()], aggregator=samples(), k=k)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_a_round_without_any_finite_client_changes_and_constrains_nothing(federation):
    """Round 1 is that of client 2 alone, so round 2 meets a model that did not move."""
    assert [cohort(federation, t, 1) for t in range(3)] == [[4], [2], [4]]
    models, data = [], broken(federation, 2)
    train_rounds(
        make_net(), data, sgd(), rounds=4, methods=[FedGC()], cohort_of=1, on_round=lambda r, _: models.append(r.start)
    )
    assert all(torch.equal(models[2][name], t) for name, t in models[1].items())
    assert all(
        not torch.equal(models[3][name], t) and models[3][name].isfinite().all() for name, t in models[2].items()
    )


# ---------------------------------------------------------------------------------------------------------------- CGC
@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_cgc_in_closed_form_is_what_quadprog_finds(ridge):
    rng = np.random.default_rng(0)
    for _ in range(50):
        h, z, margin = rng.normal(size=(4, 2, 3)), rng.normal(size=(2, 3)), rng.exponential()
        u = torch.from_numpy(h.copy())
        v = constrain_([u], [torch.from_numpy(z)], margin, ridge).numpy()
        for k in range(4):
            square, inner = (z * z).sum(), (z * h[k]).sum()
            dual = quadprog.solve_qp(np.array([[square + ridge]]), np.array([margin - inner]), np.eye(1), np.zeros(1))
            np.testing.assert_allclose(v[k], dual[0][0], rtol=0, atol=1e-12)
            if ridge == 0:
                primal = quadprog.solve_qp(np.eye(6), h[k].ravel(), z.reshape(6, 1), np.array([margin]))
                np.testing.assert_allclose(u[k].numpy().ravel(), primal[0], rtol=0, atol=1e-12)


def test_cgc_satisfies_its_kkt_conditions():
    g = torch.Generator().manual_seed(1)
    h, z = torch.randn(200, 7, generator=g).double(), torch.randn(7, generator=g).double()
    u = h.clone()
    v, slack = constrain_([u], [z], 0.5), u @ z - 0.5
    torch.testing.assert_close(u, h + v[:, None] * z)  # stationarity
    assert (slack > -1e-12).all()
    assert (v >= 0).all()
    assert (v * slack).abs().max() < 1e-12
    assert torch.equal(v > 0, h @ z < 0.5)
    assert torch.equal(u[v == 0], h[v == 0])
    assert 0 < (v > 0).sum() < 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cgc_leaves_what_satisfies_it_and_what_nothing_constrains(dtype):
    h = torch.randn(3, 4, 5, dtype=dtype)
    for move in (torch.zeros(4, 5, dtype=dtype), h[0].clone()):
        u = h.clone()
        v = constrain_([u[:1]], [move], 0.0)
        assert torch.equal(u, h)
        assert v.tolist() == [0.0]


@pytest.mark.parametrize("length", [1e-6, 1e-3, 1e-1, 10.0])
def test_a_ridge_bounds_what_the_margin_adds(length):
    """Without one a client is pushed C / ‖g'‖ far, here along a g' that its own gradient is orthogonal to."""
    move, pushed = torch.tensor([length, 0.0]).double(), {}
    for ridge in (0.0, 1e-3):
        u = torch.tensor([[0.0, 1.0]]).double()
        constrain_([u], [move], C, ridge)
        pushed[ridge] = u[0, 0].item()
    assert pushed[0.0] == pytest.approx(C / length)
    assert pushed[1e-3] <= C / (2 * 1e-3**0.5)


# ---------------------------------------------------------------------------------------------------------------- SGC
def solution(G, mean, margin):
    """z and λ, or None."""
    lam = multipliers(G @ G.T, G @ mean, margin)
    return None if lam is None else (mean + G.T @ lam, lam)


def by_active_sets(G, mean, margin):
    """The nearest of all points that some set of constraints, held with equality, allows and all others do too."""
    best = None
    for size in range(len(G) + 1):
        for active in combinations(range(len(G)), size):
            A = G[list(active)]
            z = mean + A.T @ np.linalg.lstsq(A @ A.T, margin - A @ mean, rcond=None)[0] if size else mean
            nearer = best is None or ((z - mean) ** 2).sum() < ((best - mean) ** 2).sum()
            if (G @ z >= margin - 1e-9).all() and nearer:
                best = z
    return best


def assert_kkt(G, mean, margin, z, lam, atol=1e-8):
    slack = G @ z - margin
    np.testing.assert_allclose(z, mean + G.T @ lam, rtol=0, atol=atol)
    assert (lam >= 0).all()
    assert (slack > -atol).all()
    np.testing.assert_allclose(lam * slack, 0, rtol=0, atol=atol * max(1, lam.max()))


@pytest.mark.parametrize("seed", range(5))
def test_sgc_satisfies_its_kkt_conditions_and_is_the_nearest(seed):
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(4, 6)) * rng.exponential(size=(4, 1))
    mean = rng.dirichlet(np.ones(4)) @ G
    z, lam = solution(G, mean, 0.1)
    assert_kkt(G, mean, 0.1, z, lam)
    np.testing.assert_allclose(z, by_active_sets(G, mean, 0.1), rtol=0, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_sgc_does_not_depend_on_units(scale):
    rng = np.random.default_rng(3)
    G = rng.normal(size=(4, 6))
    mean = -G[0]
    z, lam = solution(G, mean, 0.1)
    scaled, same = solution(scale * G, scale * mean, scale**2 * 0.1)
    assert lam.max() > 0
    np.testing.assert_allclose(scaled / scale, z, rtol=1e-7)
    np.testing.assert_allclose(same, lam, rtol=1e-7)


def test_sgc_with_more_clients_than_weights_and_with_equal_clients():
    """GGᵀ is singular there."""
    many = np.random.default_rng(0).normal(size=(9, 3))
    many[:, 0] = abs(many[:, 0]) + 0.5  # in one half space, or nothing would satisfy all
    twins = np.array([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [-0.9, 0.5, 0.0, 0.0], [-0.9, 0.5, 0.0, 0.0]])
    for G, mean in ((many, -many.mean(0)), (twins, twins.mean(0) + twins[2])):
        z, lam = solution(G, mean, 0.1)
        assert lam.max() > 0
        assert_kkt(G, mean, 0.1, z, lam, atol=1e-6)  # of λ around 30


@pytest.mark.parametrize(
    "G",
    [
        np.array([[1.0, 2.0, 0.0], [-1.0, -2.0, 0.0]]),  # opposite
        np.array([[1.0, 2.0, 0.0], [-3.0, -6.0, 0.0], [0.0, 0.0, 1.0]]),
        np.array([[1.0, 0.0, 0.3], [-0.5, 0.8, 0.3], [-0.5, -0.8, -0.6]]),  # they add up to nothing
        np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),  # one did not move
    ],
)
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e3])
def test_sgc_without_a_solution_says_so(G, scale):
    assert by_active_sets(G, G.mean(0), C) is None
    G = scale * G
    assert solution(G, np.array([0.7] + [0.3] * (len(G) - 1)) @ G, scale**2 * C) is None


def test_opposite_gradients_are_reconcilable_without_a_margin():
    G = np.array([[1.0, 2.0], [-1.0, -2.0]])
    z, _ = solution(G, 0.5 * G[0], 0.0)
    np.testing.assert_allclose(z, 0, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------- SGC in the method
def server_side(deltas, *, finite=None, method=None, buffers=None):
    """One round of a method's server side alone, of clients 1 and 4 with 1 and 3 samples; lr is 0.1."""
    method = server_of(method or FedGC(cgc=False))
    net = nn.Linear(3, 1, bias=False).double()
    method.meet(make_setup(net))
    start = {"weight": torch.zeros(1, 3).double()} | (buffers or {})
    delta = {"weight": torch.tensor(deltas, dtype=torch.float64).view(-1, 1, 3)}
    delta |= {name: torch.ones(2, *t.shape).double() for name, t in (buffers or {}).items()}
    upload = make_upload(delta, np.array([1, 3]), finite)
    upload.clients, round = np.array([4, 1]), make_received(start)  # not in the cohort's order
    method.on_broadcast(make_download(start), round)
    aggregator = samples()
    method.on_receive(upload, round)
    aggregator.add(upload, round)
    mean = aggregator.reduce(round)
    update = {name: t.clone() for name, t in mean.items()}
    method.on_aggregate_end(update, round)
    row = {}
    method.on_round_end(row, round)
    return mean, update, row


def test_a_mean_that_satisfies_all_stays_bit_for_bit():
    mean, update, row = server_side([[0.1, 0.3, 0.0], [0.2, -0.1, 0.7]])
    assert torch.equal(update["weight"], mean["weight"])
    assert row == {"fedgc/sgc_active": 0, "fedgc/sgc_failed": 0}


def test_a_mean_that_turns_against_a_client_is_projected():
    mean, update, row = server_side([[0.5, 0.3, 0.0], [-1.0, 0.5, 0.0]], buffers={"mean": torch.zeros(2).double()})
    G, short = np.array([[0.5, 0.3, 0], [-1, 0.5, 0]]), 0.1**2 * C
    assert G[0] @ mean["weight"].numpy()[0] < 0
    expected = quadprog.solve_qp(np.eye(3), mean["weight"].numpy()[0], G.T.copy(), np.full(2, short))[0]
    np.testing.assert_allclose(update["weight"].numpy()[0], expected, rtol=0, atol=1e-10)
    assert torch.equal(update["mean"], mean["mean"])  # running statistics are no gradient
    assert row == {"fedgc/sgc_active": 1, "fedgc/sgc_failed": 0}


def test_where_no_update_satisfies_all_the_mean_is_applied_counted_and_warned_of_once(caplog):
    method = FedGC(cgc=False)
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            mean, update, row = server_side([[0.5, 0.3, 0.0], [-0.5, -0.3, 0.0]], method=method)
        assert torch.equal(update["weight"], mean["weight"])
        assert row == {"fedgc/sgc_active": 0, "fedgc/sgc_failed": 1}
    assert [r.message for r in caplog.records if "SGC" in r.message] == [caplog.records[0].message]


def test_several_processes_find_the_same_update():
    """Three threads stand for processes whose sums meet; the last has trained nobody."""
    clients, weights_K = np.array([2, 5, 6, 9, 11]), torch.tensor([0.1, 0.0, 0.7, 0.2, 0.4]).double()
    g = torch.Generator().manual_seed(0)
    delta = {name: torch.randn(5, *shape, generator=g) for name, shape in (("a", (3, 2)), ("b", ()), ("c", (4,)))}
    mean = {name: t.mean(0) for name, t in delta.items()}

    def part(*rows):
        rows = torch.tensor(rows)
        rest = {n: t[rows].where((rows != 2).view(-1, *[1] * (t.dim() - 1)), 0.0) for n, t in delta.items()}
        upload = make_upload(rest, np.ones(len(rows)), rows != 2)
        upload.clients = clients[rows.numpy()]
        return upload

    def run(parts, round):
        update = {name: t.clone() for name, t in mean.items()}
        table = products(parts, update, round)
        add_weighted_(update, parts, weights_K, round)
        return table, update

    def on(parts, rank, reduce):
        found[rank] = run(parts, Received(0, 1, clients, 20, {}, lr=0.1, reduce=reduce, asked=clients))

    share, found, barrier, posted = [[part(4, 0), part(3)], [part(2, 1)], []], {}, threading.Barrier(3, timeout=60), {}

    def reduce(rank, tensors):
        posted[rank] = [t.clone() for t in tensors]
        barrier.wait()
        total = [sum(parts) for parts in zip(*(posted[r] for r in range(3)), strict=True)]
        barrier.wait()
        return total

    threads = [threading.Thread(target=on, args=(share[r], r, partial(reduce, r)), daemon=True) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    alone = run([part(0, 1, 2, 3, 4)], Received(0, 1, clients, 20, {}, lr=0.1, reduce=list, asked=clients))
    for rank in range(3):
        assert torch.equal(found[rank][0], alone[0])
        assert all(torch.equal(found[rank][1][name], found[0][1][name]) for name in mean)
        for name in mean:
            torch.testing.assert_close(found[rank][1][name], alone[1][name], rtol=0, atol=1e-6)
    G = torch.cat([t.reshape(5, -1) for t in delta.values()], dim=1).double()
    G[2] = 0
    expected = torch.cat([G @ G.T, (G @ torch.cat([t.flatten() for t in mean.values()]).double())[:, None]], dim=1)
    torch.testing.assert_close(alone[0][:, :-1], expected, rtol=0, atol=1e-12)
    assert alone[0][:, -1].tolist() == [1, 1, 0, 1, 1]


# ------------------------------------------------------------------------------------------------ bytes, rows, refusals
@pytest.mark.parametrize(
    ("cohort_of", "cgc", "factors"),
    [(3, True, [1, 2, 2]), (5, True, [1, 1, 1]), (3, False, [1, 1, 1])],
)
def test_the_servers_gradient_goes_down_where_not_all_clients_know_it(federation, cohort_of, cgc, factors):
    net, sizes = make_net(), Sizes()
    train_rounds(net, federation, sgd(), rounds=3, methods=[FedGC(cgc=cgc), sizes], cohort_of=cohort_of)
    size = 8 * weights(net).numel()
    assert sizes.down == [factor * size for factor in factors]
    assert set(sizes.up) == {size}


def test_the_row_says_how_much_was_projected(config, tmp_path):
    tiny = (
        "algorithm=fedgc", "gc=none", "model.hidden=[8]", "rounds=3", "client.steps=3", "client.batch_size=8",
        "participation.num_clients=4", "participation.per_round=4", "partition=classes",
    )  # fmt: skip
    tiny += ("data.limit_train=100", "data.limit_test=40", "eval_every=3", "client.optimizer.lr=0.1")
    row = train(config(*tiny, folder=tmp_path / "both")).metrics
    assert 0 < row["fedgc/cgc_layers"] <= 1
    assert row["fedgc/sgc_active"] in range(5)
    assert row["fedgc/sgc_failed"] == 0
    row = train(config(*tiny, "methods.fedgc.cgc=false", "methods.fedgc.sgc=false", folder=tmp_path / "none")).metrics
    assert not [key for key in row if key.startswith("fedgc/")]


def test_clients_that_all_take_part_know_the_last_broadcast_also_after_a_kill():
    first, second = ({"weight": torch.randn(1, 3).double()} for _ in range(2))
    before, after = client_of(FedGC()), client_of(FedGC())
    for part in (before, after):
        part.meet(make_setup(nn.Linear(3, 1, bias=False).double()))
    before.on_download(make_download(first, 0))
    assert before._moves(make_download(first, 0))["weight"].eq(0).all()
    after.load_state_dict(before.state_dict())
    for part in (before, after):
        for download in [make_download(second, 1)] * 2:  # the second time as it comes in a rehearsal
            part.on_download(download)
        assert torch.equal(part._moves(download)["weight"], second["weight"] - first["weight"])


def test_a_frozen_parameter_is_left_alone(federation):
    net = make_net()
    net[0].weight.requires_grad_(False)
    before = net[0].weight.clone()
    train_rounds(net, federation, sgd(), rounds=3, methods=[FedGC()], k=3)
    assert torch.equal(net[0].weight, before)


def test_of_a_lone_client_the_share_that_was_projected_is_all_or_nothing():
    shares = []
    train_rounds(
        make_net(), opposed_federation(), sgd(**FEDGC), rounds=8, methods=[FedGC(layerwise="model")], cohort_of=1,
        on_round=lambda round, row: shares.append(row["fedgc/cgc_layers"]),
    )  # fmt: skip
    assert set(shares) == {0.0, 1.0}


def test_a_multiplier_that_fits_no_sum_breaks_the_step_instead_of_hiding():
    """The server then refuses the step; the sum of what does not fit would be any number."""
    round = make_received({"w": torch.zeros(2)})
    upload = make_upload({"w": torch.ones(2, 2)}, np.ones(2))
    upload.clients = np.array([1, 4])
    for weighting, expected in (([0.5, 1.5], 2.0), ([0.5, 1e30], float("nan"))):
        update = {"w": torch.zeros(2)}
        add_weighted_(update, [upload], torch.tensor(weighting, dtype=torch.float64), round)
        torch.testing.assert_close(update["w"], torch.full((2,), expected), equal_nan=True)
