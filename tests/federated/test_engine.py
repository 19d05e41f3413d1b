"""The engine without Lightning: rounds equal independent loops, however many clients and processes run them."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import (
    CPU,
    Spy,
    make_download,
    make_net,
    make_round,
    make_upload,
    random_federation,
    sgd,
    train_rounds,
    weights,
)
from torch import nn

from gcfed.federated.aggregate import MeanAggregator
from gcfed.federated.batches import plan_batches
from gcfed.federated.messages import finite_clients
from gcfed.federated.method import Order
from gcfed.federated.received import Counts
from gcfed.federated.server import Tally
from gcfed.federated.solver import LocalSolver, clip_client_grads_
from gcfed.federated.stack import ClientStack, broadcast_state, uses_batch_statistics
from gcfed.federated.stacks import assign, layout
from gcfed.federated.steps import Steps
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.proximal import Proximal
from gcfed.methods.scaffold import Scaffold
from gcfed.models.cnn import CNN
from gcfed.models.mlp import MLP
from gcfed.models.resnet_cifar import ResNetCIFAR
from gcfed.utils.rng import generator


def solver(**kwargs):
    return sgd(momentum=0.9, weight_decay=1e-3, **kwargs)


def test_a_batch_larger_than_all_clients_is_as_large_as_they_are(federation):
    one, other = (train_rounds(make_net(), federation, sgd(batch_size=b), rounds=2, k=2) for b in (12, 10**9))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("optimizer", "last_batch"),
    [
        (torch.optim.SGD, "keep"),
        (torch.optim.Adam, "drop"),
        (torch.optim.RMSprop, "wrap"),
    ],
)
def test_stacks_of_1_2_and_all_clients_and_two_processes_agree(federation, optimizer, last_batch):
    results = []
    for k, world, order in [(1, 1, 1), (2, 1, 1), (5, 1, 1), (1, 2, 1), (3, 2, 1), (1, 1, -1)]:
        s = LocalSolver(partial(optimizer, lr=0.05), epochs=2, batch_size=4, last_batch=last_batch, clip_norm=0.5)
        net = make_net()
        methods = [Proximal(0.1), GradientCentralization(lam=0.5)]
        w = train_rounds(net, federation, s, rounds=6, methods=methods, k=k, cohort_of=4, world=world, order=order)
        results.append(w)
    for w in results[1:]:
        torch.testing.assert_close(w, results[0], rtol=0, atol=1e-9)


def test_a_finished_client_stays_exactly_where_it_is(federation):
    """The short client of a stack ends with the bits that it has alone, though its neighbours go on."""
    s, net = solver(epochs=3), make_net()
    download = make_download(broadcast_state(net))

    def run(clients):
        plan = s.plan(federation, clients, download, CPU)
        stack = ClientStack(net, download.model, clients, federation.sizes(clients), plan.steps)
        snapshots = []

        def after_backward():
            snapshots.append({n: t.clone() for n, t in stack.full.items()})

        s.train(Steps(stack, plan, s.optimizer(stack.leaves.values())), federation, 0.1, [], after_backward)
        return stack, snapshots

    stack, snapshots = run(np.array([1, 4]))  # 9 steps beside 3
    for name, tensor in stack.full.items():
        assert torch.equal(tensor[1], snapshots[3][name][1])
        assert not torch.equal(tensor[0], snapshots[3][name][0])


def test_augmentation_is_drawn_from_the_client_and_the_round(federation):
    """Two clients, of six steps and of two: each its own draws; who has ended draws none, and has its first sample."""
    federation.draw = lambda rng, shape: rng.integers(1, 9, size=(*shape, 2))
    plan = plan_batches(
        federation, np.array([1, 4]), seed=1, round_index=3, batch_size=4, epochs=2, steps=None, last_batch="keep",
        to_device=torch.from_numpy,
    )  # fmt: skip
    for row, client, steps in ((0, 1, 6), (1, 4, 2)):
        drawn = generator(1, "augment", 3, client).integers(1, 9, size=(steps, 4, 2))
        assert np.array_equal(plan.augment[row, :steps], drawn)
    assert plan.augment[1, 2:].eq(0).all()
    assert plan.index[1].eq(federation.client(4)[0]).all()
    assert plan.cut(np.array([3, 2])).augment.shape == (2, 3, 4, 2)


class Masked(nn.Module):
    """Has a buffer that is infinite, as a causal mask."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, 0.0, -torch.inf]))
        self.double()

    def forward(self, x):
        return self.fc(x) + self.mask.clamp(min=-5)


@pytest.mark.parametrize("k", [1, 3])
def test_a_constant_that_is_infinite_does_not_travel(federation, k):
    net, rounds = Masked(), []
    before = weights(net)
    train_rounds(net, federation, sgd(), rounds=2, k=k, on_round=lambda r, _: rounds.append(r))
    assert [r.num_finite for r in rounds] == [3, 3]
    assert not torch.equal(weights(net), before)
    assert net.mask[-1] == -torch.inf


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_clients_that_are_not_finite_are_left_out(bad):
    delta = {"w": torch.randn(3, 2, 2), "b": torch.randn(3)}
    delta["w"][1, 0, 1] = bad
    finite = finite_clients(delta)
    assert finite.tolist() == [True, False, True]
    expected = delta["w"][[0, 2]].mean(0)
    a = MeanAggregator()
    round = make_round({"w": torch.zeros(2, 2), "b": torch.zeros(())})
    a.add(make_upload({k: v.clone() for k, v in delta.items()}, np.ones(3)), round)
    update = a.reduce(round)
    torch.testing.assert_close(update["w"], expected)
    a.add(make_upload({"w": delta["w"][1:2]}, np.ones(1)), round)
    assert a.reduce(round)["w"].eq(0).all()


class OwnSGD(torch.optim.Optimizer):
    """A user's own optimizer, whose step has a wrapper of its own."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


def test_a_users_own_optimizer_steps_as_torchs_does(federation):
    nets = make_net(), make_net()
    for net, optimizer in zip(nets, (OwnSGD, torch.optim.SGD), strict=True):
        train_rounds(net, federation, LocalSolver(partial(optimizer, lr=0.1), epochs=2, batch_size=4), rounds=2)
    torch.testing.assert_close(weights(nets[0]), weights(nets[1]), rtol=0, atol=1e-14)
    assert not torch.equal(weights(nets[0]), weights(make_net()))


def test_clipping_bounds_each_client_alone():
    torch.manual_seed(0)
    grads = [torch.randn(3, 4, 2, dtype=torch.float64) * 10, torch.randn(3, 5, dtype=torch.float64)]
    grads = [g * torch.tensor([1.0, 1e-3, 1.0]).view(-1, *[1] * (g.dim() - 1)) for g in grads]
    before = [g.clone() for g in grads]
    clip_client_grads_(grads, 1.0)
    for k in range(3):
        ours = torch.cat([g[k].flatten() for g in grads])
        parameters = [nn.Parameter(b[k].clone()) for b in before]
        for p, b in zip(parameters, before, strict=True):
            p.grad = b[k].clone()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        torch.testing.assert_close(ours, torch.cat([p.grad.flatten() for p in parameters]))
    assert torch.equal(grads[0][1], before[0][1])


@pytest.mark.parametrize(("last_batch", "counts"), [("keep", [4, 4, 1]), ("drop", [4, 4]), ("wrap", [4, 4, 4])])
def test_an_epoch_is_cut_as_configured(last_batch, counts):
    data = random_federation(sizes=(9, 3))
    args = {"seed": 1, "round_index": 0, "batch_size": 4, "last_batch": last_batch, "to_device": torch.from_numpy}
    plan = plan_batches(data, np.array([0]), epochs=2, steps=None, **args)
    assert plan.counts.tolist() == [counts * 2]
    epochs = plan.index[0].view(2, -1)
    for epoch in epochs:
        used = epoch[: sum(counts)].tolist()
        assert set(used) <= set(range(9))
        assert len(set(used)) == min(9, sum(counts))  # each sample once, but for those that wrap
    assert not torch.equal(epochs[0], epochs[1])
    few = plan_batches(data, np.array([1]), epochs=1, steps=None, **args)
    assert few.counts.tolist() == [[4 if last_batch == "wrap" else 3]]  # a small client keeps its only batch
    steps = plan_batches(data, np.array([0, 1]), epochs=1, steps=5, **args)
    assert (steps.counts > 0).sum(1).tolist() == [5, 5]


def test_a_client_draws_the_same_whoever_trains_beside_it(federation):
    args = {"seed": 1, "round_index": 3, "batch_size": 4, "epochs": 2, "steps": None, "last_batch": "keep"}
    alone = plan_batches(federation, np.array([2]), to_device=torch.from_numpy, **args)
    beside = plan_batches(federation, np.array([1, 3, 2]), to_device=torch.from_numpy, **args)
    steps = alone.counts.shape[1]
    assert torch.equal(beside.index[2, :steps], alone.index[0])
    other = plan_batches(federation, np.array([2]), to_device=torch.from_numpy, **args | {"round_index": 4})
    assert not torch.equal(other.index, alone.index)


def test_the_deal_is_a_partition_with_the_largest_first():
    cohort, work = np.array([3, 5, 8, 9]), np.array([1, 10, 4, 6])
    parts = [assign(cohort, work, rank, 2) for rank in range(2)]
    assert [p.tolist() for p in parts] == [[5, 3], [9, 8]]
    assert assign(cohort, work, 0, 1).tolist() == [5, 9, 8, 3]
    assert len(assign(cohort, work, 6, 7)) == 0
    assert [len(assign(np.arange(9), np.ones(9), rank, 3)) for rank in range(3)] == [3, 3, 3]


def test_running_statistics_are_averaged_and_refuse_stacks(federation):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    assert uses_batch_statistics(net)
    start = broadcast_state(net)
    assert "1.running_mean" in start
    assert "1.num_batches_tracked" not in start
    with pytest.raises(ValueError, match=r"client\.stack"):
        ClientStack(net, start, np.array([0, 1]), np.array([1, 1]), np.array([1, 1]))
    net.train()
    stack = ClientStack(net, start, np.array([1]), np.array([12]), np.array([1]))
    x, _ = federation.fetch(torch.arange(7, 19), None)
    stack(x[None])
    expected = 0.1 * F.linear(x, net[0].weight, net[0].bias).mean(0)
    torch.testing.assert_close(stack.delta()["1.running_mean"][0], expected)
    assert net[1].running_mean.eq(0).all()  # the global network is not touched
    assert net[1].num_batches_tracked == 0


@pytest.mark.parametrize("k", [1, 3])
def test_features_come_out_beside_the_logits(k):
    net = MLP(input_shape=(6,), hidden=(5,), num_classes=4).double()
    clients, ones = np.arange(k), np.ones(k)
    x = torch.randn(k, 7, 6, dtype=torch.float64)
    plain = ClientStack(net, broadcast_state(net), clients, ones, ones)(x)
    assert plain.features_KBF is None
    tapped = ClientStack(net, broadcast_state(net), clients, ones, ones, tap_features=True)
    out = tapped(x)
    torch.testing.assert_close(out.logits_KBC, plain.logits_KBC)
    torch.testing.assert_close(out.features_KBF, torch.stack([net.features(x[i]) for i in range(k)]))
    tapped.backward(out.features_KBF.sum((1, 2)))
    assert {name for name, _ in tapped.named_grads()} == {"fc1.weight", "fc1.bias"}


@pytest.mark.parametrize(
    ("kwargs", "key"),
    [
        ({"stack": "many"}, "stack=many"),
        ({"optimizer": torch.optim.LBFGS}, "optimizer=LBFGS"),
    ],
)
def test_bad_solver_settings_name_their_key(kwargs, key):
    optimizer = kwargs.pop("optimizer", torch.optim.SGD)
    with pytest.raises(ValueError, match=key):
        LocalSolver(partial(optimizer, lr=0.1), **kwargs)
    with pytest.raises(ValueError, match="optimizer=3: "):
        LocalSolver(3)


@pytest.mark.parametrize(
    ("net", "gigabytes", "expected"),
    [
        # 4.0 MB of weights, sixteen times as much for a client, and twice 50 activations of 4 kB
        (MLP(input_shape=(1000,), num_classes=1000, hidden=[]), 80, (5, 1)),
        (MLP(input_shape=(1000,), num_classes=1000, hidden=[]), 0.2, (3, 1)),
        (MLP(input_shape=(1000,), num_classes=1000, hidden=[]), 0.001, (1, 1)),
        (CNN(input_shape=(3, 32, 32), num_classes=10), 80, (1, 5)),
        (CNN(input_shape=(3, 32, 32), num_classes=10), 0.5, (1, 3)),
        (nn.Sequential(nn.Linear(1000, 1000), nn.Dropout()), 80, (1, 1)),  # its draws depend on who is in a stack
        (nn.Sequential(nn.BatchNorm1d(1000)), 80, (1, 1)),  # not ours: it may draw numbers
    ],
)
def test_a_gpu_takes_as_many_clients_at_once_as_fit(monkeypatch, net, gigabytes, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(gigabytes * 1e9), 0))
    shape = (3, 32, 32) if isinstance(net, CNN) else (1000,)
    data = SimpleNamespace(fetch=lambda index, augment: (torch.zeros(1, *shape), None))
    monkeypatch.setattr(torch, "zeros", partial(_on_cpu, torch.zeros))
    assert layout("auto", 4, 5, net, torch.device("cuda", 0), data) == expected
    assert layout(2, 4, 5, net, torch.device("cuda", 0), data)[0] == 2
    assert layout("auto", 4, 5, net, CPU, data) == (1, 1)


def _on_cpu(make, *size, device=None, **keywords):
    return make(*size, **keywords)


@pytest.mark.parametrize("how", ["backward", "gradients"])
def test_a_term_written_on_the_leaves_counts_however_many_clients_train(federation, how):
    """½ ‖w_k − w‖² as a ``local_loss``, beside a frozen parameter."""
    net = make_net()
    net[2].bias.requires_grad_(False)
    start = {name: t + 0.1 for name, t in broadcast_state(net).items()}
    grads = []
    for clients in ([0], [1], [0, 1]):
        k = len(clients)
        stack = ClientStack(net, broadcast_state(net), np.array(clients), np.ones(k), np.ones(k))
        x = torch.stack([federation.x[federation.clients[c][:4]] for c in clients])
        term = sum((leaf - start[name]).square().flatten(1).sum(1) for name, leaf in stack.leaves.items())
        loss = stack(x).logits_KBC.square().mean((1, 2)) + 0.5 * term
        if how == "backward":
            stack.backward(loss)
            grads.append(dict(stack.named_grads()))
        else:
            grads.append(stack.gradients(loss))
    assert grads[0].keys() == {"0.weight", "0.bias", "2.weight"}
    for name, both in grads[2].items():
        torch.testing.assert_close(torch.cat([grads[0][name], grads[1][name]]), both, rtol=1e-12, atol=1e-12)


def test_what_a_round_counts():
    """A loss that is no number is left out of the mean, whatever the client sends; bytes are those of all."""
    upload = make_upload({"w": torch.ones(3, 2)}, np.array([3, 1, 2]))
    upload.finite, upload.loss = torch.tensor([True, True, False]), torch.tensor([float("nan"), 2.0, 5.0])
    upload.num_seen = np.array([30, 10, 20])
    tally = Tally(CPU)
    tally.add(upload)
    counts = tally.counts(torch.tensor([True]), list)
    assert counts == Counts(loss=2, finite=2, up_bytes=24, samples=60, steps=6, overflown=True)


def test_the_servers_momentum_rests_in_a_round_without_a_finite_client(federation):
    net, after = make_net(), []

    class Breaks(Spy):
        def send(self, upload, own, download):
            upload.delta["0.bias"] *= float("inf") if download.round == 1 else 1

    train_rounds(
        net, federation, solver(), rounds=3, methods=[Breaks()], server=partial(torch.optim.SGD, lr=1.0, momentum=0.9),
        on_round=lambda *_: after.append(weights(net)),
    )  # fmt: skip
    assert torch.equal(after[1], after[0])
    assert not torch.equal(after[2], after[1])


@pytest.mark.parametrize("k", [1, 2])
def test_a_teacher_has_no_dropout(k):
    net = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4)).double()
    stack, x = (
        ClientStack(net, broadcast_state(net), np.arange(k), np.ones(k), np.ones(k)),
        torch.randn(k, 9, 6).double(),
    )
    expected = net[2](net[0](x))
    for params in (None, stack.full):
        torch.testing.assert_close(stack.reference(x, params=params).logits_KBC, expected)
    assert net.training
    assert not torch.equal(stack(x).logits_KBC, expected)


def test_clients_of_a_stack_drop_different_units():
    net = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    one = np.ones(2, np.int64)
    logits_KBC = ClientStack(net, broadcast_state(net), np.arange(2), one, one)(torch.ones(2, 3, 4)).logits_KBC
    assert not torch.equal(logits_KBC[0], logits_KBC[1])


def test_dropout_is_drawn_for_a_client_a_round_and_a_seed_whoever_else_trains(federation):
    def draws(seed, cohort_of=3):
        drawn = {}

        class Draws(Spy):
            def prepare(self, stack, own, download):
                drawn[seed, download.round, *stack.clients.tolist()] = tuple(torch.rand(2).tolist())

        train_rounds(make_net(), federation, sgd(), rounds=2, seed=seed, cohort_of=cohort_of, methods=[Draws()])
        return drawn

    few = draws(5) | draws(6)
    assert few.items() <= (draws(5, cohort_of=5) | draws(6, cohort_of=5)).items()
    assert len(set(few.values())) == len(few) == 2 * 2 * 3


def test_what_a_stack_needed_is_free_when_it_is_over(federation):
    seen = []

    class Looks(Spy):
        order = Order.MEASURES

        def on_clients_end(self, stack, download):
            seen.append(len(stack.prepared))

    train_rounds(make_net(), federation, solver(), rounds=1, methods=[Scaffold(), Looks()])
    assert seen == [0] * 3


def test_a_wrapped_pass_repeats_the_clients_first_samples():
    """As the authors' code pads its data sets: 9 samples in batches of 4 become 12, the first three twice."""
    data = random_federation(sizes=(9,))
    plan = plan_batches(
        data, np.array([0]), seed=1, round_index=0, batch_size=4, epochs=1, steps=None, last_batch="wrap",
        to_device=torch.from_numpy,
    )  # fmt: skip
    assert np.bincount(plan.index.flatten()).tolist() == [2, 2, 2, 1, 1, 1, 1, 1, 1]


def test_a_teacher_with_batch_norms_is_in_evaluation_mode_and_learns_nothing():
    net = ResNetCIFAR(depth=8, input_shape=(3, 8, 8), num_classes=4, norm="batch").double()
    stack = ClientStack(net, broadcast_state(net), np.arange(1), np.ones(1), np.ones(1))
    before, x = {name: t.clone() for name, t in stack.start.items()}, torch.randn(1, 5, 3, 8, 8).double()
    taught = stack.reference(x).logits_KBC
    assert all(torch.equal(t, before[name]) for name, t in stack.start.items())
    assert net.training
    torch.testing.assert_close(taught[0], net.eval()(x[0]))


class Sends(Spy):
    """Beside a Δ that is finite, client 1 sends a number that is not."""

    def send(self, upload, own, download):
        numbers = [torch.inf if client == 1 else 2.0 for client in upload.clients.tolist()]
        upload.send("more", {"v": torch.tensor(numbers)})

    def uploads(self, round):
        return {"more": {"v": torch.zeros(())}}


@pytest.mark.parametrize("k", [1, 5])
def test_who_sends_beside_its_update_what_is_not_finite_is_left_out(federation, k):
    seen = []
    train_rounds(
        make_net(), federation, sgd(), rounds=1, cohort_of=5, k=k, methods=[Sends()],
        on_round=lambda round, row: seen.append((row["train/nonfinite_clients"], round.received["more"]["v"].item())),
    )  # fmt: skip
    assert seen == [(1, 2.0)]


class Misfit(Sends):
    def __init__(self, sends):
        super().__init__()
        self.sends = sends

    def send(self, upload, own, download):
        for name, tensors in self.sends.items():
            upload.send(name, {key: t.expand(len(upload.clients), *t.shape) for key, t in tensors.items()})


@pytest.mark.parametrize(
    ("sends", "words"),
    [
        ({}, "more lacks v"),
        ({"more": {"v": torch.zeros(2)}}, r"more has v as \(1, 2\), and here it is \(1,\)"),
        ({"more": {"v": torch.zeros((), dtype=torch.int64)}}, "more has v in torch.int64, and here it is in torch.f"),
        ({"more": {"v": torch.zeros(())}, "less": {"u": torch.zeros(())}}, "less has u, which is not known here"),
    ],
)
def test_a_message_that_its_method_does_not_list_is_refused_by_method_and_key(federation, sends, words):
    with pytest.raises(ValueError, match=f"^Misfit: send does not send what uploads.. lists: an upload's {words}"):
        train_rounds(make_net(), federation, sgd(), rounds=1, methods=[Misfit(sends)])
