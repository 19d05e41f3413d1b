"""The engine: rounds equal independent loops for any number of clients in a stack
and of processes.
"""

import copy
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from harness import (
    ArrayData,
    Spy,
    assert_near,
    make_net,
    plan_of,
    random_federation,
    sgd,
    train_rounds,
    weights,
)
from torch import nn

from gcfed.federated.engine.stacks import Stacks, assign
from gcfed.federated.network.lent import Traits, broadcast_state
from gcfed.federated.network.stack import ClientStack
from gcfed.federated.parts import ClientPart, Kept, Method, ServerPart, like_trained
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training import batches
from gcfed.federated.training.batches import Kind
from gcfed.federated.training.solver import LocalSolver
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.objective.proximal import Proximal
from gcfed.models.cnn import CNN
from gcfed.models.mlp import MLP


def solver(**kwargs):
    return sgd(momentum=0.9, weight_decay=1e-3, **kwargs)


def stack_of(net, k=1, **how):
    """A stack of the clients 0 … K − 1, with one step each."""
    return ClientStack(net, broadcast_state(net), np.arange(k), np.ones(k), np.ones(k), **how)


@pytest.mark.parametrize(
    ("optimizer", "last_batch"),
    [(torch.optim.SGD, "keep"), (torch.optim.Adam, "drop"), (torch.optim.RMSprop, "wrap")],
)
def test_stacks_of_one_and_all_clients_and_two_processes_agree(federation, optimizer, last_batch):
    results = []
    for k, world, order in [(1, 1, 1), (5, 1, 1), (3, 2, 1), (1, 1, -1)]:
        s = LocalSolver(
            partial(optimizer, lr=0.05),
            epochs=2,
            batch_size=4,
            last_batch=last_batch,
            clip_norm=0.5,
        )
        net = make_net()
        methods = [Proximal(0.1), GradientCentralization(lam=0.5)]
        w = train_rounds(
            net,
            federation,
            s,
            rounds=2,
            methods=methods,
            k=k,
            cohort_of=4,
            world=world,
            order=order,
        )
        results.append(w)
    for w in results[1:]:
        assert_near(w, results[0], 1e-9)


class OwnSGD(torch.optim.Optimizer):
    """A user's own optimizer. Its ``step`` has a decorator."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


def grouped(params, lr, other=None):
    """SGD in two groups of parameters."""
    first, *rest = params
    return torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": other or lr}], lr=lr)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("last", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
def test_convolutions_train_alike_in_stacks_for_every_batch_size(
    last, kernel, dtype, most, batch_size
):
    """Batches of a single sample, too: their convolutions are a special case in torch."""
    x = torch.randn(9, 2, 6, 6, generator=torch.Generator().manual_seed(1), dtype=dtype)
    y = torch.arange(9) % 4
    data = ArrayData(x, y, np.split(np.arange(9), 3))
    found = []
    for k in (1, 3):
        torch.manual_seed(0)
        first, second = nn.Conv2d(2, 4, 3), last(4, 6, kernel)
        net = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.LazyLinear(4))
        net(x[:1].float())
        found.append(
            train_rounds(net.to(dtype), data, solver(batch_size=batch_size), rounds=2, k=k)
        )
    assert_near(found[1], found[0], most)


class Texts(nn.Module):
    """Reads tokens, of which 0 is padding. ``tied``: the table also makes the features."""

    def __init__(self, tied):
        super().__init__()
        self.tied = tied
        self.table, self.head = nn.Embedding(5, 6, padding_idx=0), nn.Linear(6, 4)
        self.last = nn.Linear(6, 5, bias=False)
        if tied:
            self.last.weight = self.table.weight

    def forward(self, x):
        hidden = self.table(x).tanh().mean(1)
        return self.head(hidden + self.last(hidden).mean(1, keepdim=True))


@pytest.mark.parametrize("tied", [False, True])
def test_the_row_of_a_padding_token_trains_alike_in_stacks(tied):
    """Also if the samples of the largest client, on which the probe runs, have no padding."""
    x = torch.randint(1, 5, (20, 3), generator=torch.Generator().manual_seed(0))
    x[12:, 1:] = 0
    data = ArrayData(x, torch.arange(20) % 4, np.split(np.arange(20), [12, 16]))
    data.two_samples = lambda: x[:2]
    found = []
    for k in (1, 3):
        torch.manual_seed(0)
        net = Texts(tied).double()
        net.table.weight.data[0] = 1.0  # as a pretrained table may have
        found.append(train_rounds(net, data, sgd(), rounds=1, k=k))
        assert tied or (net.table.weight[0] == 1).all()
    assert_near(found[1], found[0], 1e-12)


class Sometimes(nn.Module):
    """Its second layer has a gradient in steps with a large first number only."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 4)

    def forward(self, x):
        hidden = self.first(x).tanh()
        if x[:, 0].max() > 1:
            hidden = hidden + self.second(hidden)
        return self.head(hidden)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, momentum=0.9),
        partial(torch.optim.SGD, momentum=0.9, dampening=0.5),
        partial(torch.optim.Adam, weight_decay=0.1),
        torch.optim.AdamW,
    ],
)
def test_a_gradient_that_comes_late_moves_a_parameter_as_in_torch(optimizer):
    x = torch.zeros(6, 6, dtype=torch.float64)
    x[:, 1:] = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[3, 0] = 2.0
    data = ArrayData(x, torch.arange(6) % 4, [np.arange(6)])
    torch.manual_seed(0)
    net = Sometimes().double()
    expected = copy.deepcopy(net)
    steps = LocalSolver(partial(optimizer, lr=0.1), epochs=4, batch_size=1)
    plan = plan_of(data, [0], seed=5, epochs=4, batch_size=1)
    assert plan.index[0, 0, 0] != 3
    plain = optimizer(expected.parameters(), lr=0.1)
    for sample in plan.index[0]:
        plain.zero_grad()
        nn.functional.cross_entropy(expected(x[sample]), data.y[sample]).backward()
        plain.step()
    found = train_rounds(net, data, steps, rounds=1, cohort_of=1)
    assert_near(found, weights(expected), 1e-12)


def test_a_users_own_optimizer_steps_as_torchs(federation):
    expected, *ends = (
        train_rounds(
            make_net(),
            federation,
            LocalSolver(partial(make, lr=0.1), epochs=2, batch_size=4),
            rounds=2,
            k=k,
        )
        for make, k in [(torch.optim.SGD, 1), (OwnSGD, 1), (grouped, 1), (grouped, 5)]
    )
    for end in ends:
        assert_near(end, expected, 1e-14)
    with pytest.raises(ValueError, match=r"client\.optimizer: all its groups need one lr"):
        train_rounds(
            make_net(), federation, LocalSolver(partial(grouped, lr=0.1, other=0.2)), rounds=1
        )


@pytest.mark.parametrize(
    ("last_batch", "counts"), [("keep", [4, 4, 1]), ("drop", [4, 4]), ("wrap", [4, 4, 4])]
)
def test_an_epoch_is_divided_as_configured(last_batch, counts):
    data = random_federation(sizes=(9, 3))
    plan = plan_of(data, [0], last_batch=last_batch)
    assert plan.counts.tolist() == [counts * 2]
    epochs = plan.index[0].view(2, -1)
    for epoch in epochs:
        # wrap repeats the first samples at the end
        times = np.bincount(epoch[: sum(counts)], minlength=9)
        assert (
            sorted(times)
            == {"keep": [1] * 9, "drop": [0] + [1] * 8, "wrap": [1] * 6 + [2] * 3}[last_batch]
        )
    assert not torch.equal(epochs[0], epochs[1])
    few = plan_of(data, [1], epochs=1, last_batch=last_batch)
    # a small client keeps its only batch
    assert few.counts.tolist() == [[4 if last_batch == "wrap" else 3]]
    assert (plan_of(data, [0, 1], steps=5, last_batch=last_batch).counts > 0).sum(1).tolist() == [
        5,
        5,
    ]


class Counts(ArrayData):
    """Counts the fetched values, and adds the augmentation's draw to each sample."""

    values: ClassVar = []

    def draw(self, rng, shape):
        return rng.integers(0, 100, (*shape, 1))

    def fetch(self, index, augment):
        x, y = super().fetch(index, augment)
        self.values.append(x.numel())
        return x + augment, y


@pytest.mark.parametrize("ahead", [0, 40, 80, 10**6])  # values; a batch has 20
@pytest.mark.parametrize("clients", [[1], [1, 2]])
def test_a_steps_batch_does_not_depend_on_earlier_steps(monkeypatch, clients, ahead):
    data = random_federation(sizes=(3, 14, 9), features=5)
    data = Counts(data.x, data.y, data.clients)
    monkeypatch.setattr(batches, "VALUES_AHEAD", ahead)
    plan = plan_of(data, clients)
    for step in [*range(8), *range(7, -1, -1), 0, 5, 2, 2, 7, 3]:
        n, size, _ = kind = plan.kinds[step]
        rows = plan.index[:n, step, :size]
        for number in (step, torch.tensor([step])):
            batch = plan.batch(data, number, kind)
            assert torch.equal(batch.x, data.x[rows] + plan.augment[:n, step, :size])
            assert torch.equal(batch.y, data.y[rows])
            # alignment changes the last bits of products on CPUs
            assert batch.x.data_ptr() % 64 == 0
            assert batch.count.tolist() == plan.counts[:n, step].tolist()
        wide = plan.batch(data, step, Kind(n, 4, even=False))  # as FedReg's
        assert torch.equal(wide.x[:, :size], batch.x)
        assert wide.mask.tolist() == [
            [i < count for i in range(4)] for count in plan.counts[:n, step]
        ]


def test_a_client_fetches_no_value_beyond_its_plan(monkeypatch):
    data = random_federation(sizes=(3, 14, 2))
    data = Counts(data.x, data.y, data.clients)
    monkeypatch.setattr(batches, "VALUES_AHEAD", 100)
    for client, cut, expected in ((1, 8, [96, 96]), (1, 5, [96, 24]), (2, 6, [72])):
        plan = plan_of(data, [client], epochs=2 if client == 1 else 6).cut(np.array([cut]))
        data.values.clear()
        for step, kind in enumerate(plan.kinds):
            plan.batch(data, step, kind)
        assert data.values == expected


def test_clients_are_assigned_to_processes_largest_first():
    cohort, work = np.array([3, 5, 8, 9]), np.array([1, 10, 4, 6])
    parts = [assign(cohort, work, rank, 2) for rank in range(2)]
    assert [p.tolist() for p in parts] == [[5, 3], [9, 8]]
    assert assign(cohort, work, 0, 1).tolist() == [5, 9, 8, 3]
    assert len(assign(cohort, work, 6, 7)) == 0
    assert [len(assign(np.arange(9), np.ones(9), rank, 3)) for rank in range(3)] == [3, 3, 3]


@pytest.mark.parametrize(
    ("stack", "optimizer"), [("many", torch.optim.SGD), (1, torch.optim.Adafactor)]
)
def test_the_error_of_a_solver_setting_names_its_key(stack, optimizer):
    with pytest.raises(ValueError, match=r"stack=many|optimizer=Adafactor"):
        LocalSolver(partial(optimizer, lr=0.1), stack=stack)


@pytest.mark.parametrize(
    ("net", "gigabytes", "expected"),
    [
        # weights of 4.0 MB; a client needs 16 times as much, and twice 50 activations of 4 kB
        (MLP(input_shape=(1000,), num_classes=1000, hidden=[]), 80, (5, 1)),
        (MLP(input_shape=(1000,), num_classes=1000, hidden=[]), 0.2, (3, 1)),
        (CNN(input_shape=(3, 32, 32), num_classes=10), 0.5, (1, 3)),
        # its draws depend on the stack
        (nn.Sequential(nn.Linear(1000, 1000), nn.Dropout()), 80, (1, 1)),
    ],
)
def test_a_gpu_trains_as_many_clients_at_once_as_fit(monkeypatch, net, gigabytes, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(gigabytes * 1e9), 0))
    shape = (3, 32, 32) if isinstance(net, CNN) else (1000,)
    sample = SimpleNamespace(
        fetch=lambda index, augment: (torch.zeros(1, *shape), None),
        sizes=lambda: np.square(np.arange(5)),
    )
    monkeypatch.setattr(torch, "zeros", partial(_on_cpu, torch.zeros))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)

    def layout(stack, device):
        module = SimpleNamespace(
            net=net, device=torch.device(device), lent=SimpleNamespace(traits=Traits())
        )
        program = SimpleNamespace(solver=sgd(stack=stack), module=module, data=sample)
        found = Stacks(program, None, 5).layout
        return found.k, len(found.streams)

    assert layout("auto", "cuda") == expected
    assert layout(2, "cuda")[0] == 2
    assert layout("auto", "cpu") == (1, 0)


def _on_cpu(make, *size, device=None, **keywords):
    return make(*size, **keywords)


@pytest.mark.parametrize("how", ["backward", "gradients"])
def test_a_term_on_the_leaves_counts_in_stacks_of_one_and_two(federation, how):
    """The term is ½ ‖w_k − w‖² as in a ``local_loss``. One parameter is frozen."""
    net = make_net()
    net[2].bias.requires_grad_(False)
    start, grads = {name: t + 0.1 for name, t in broadcast_state(net).items()}, []
    for clients in ([0], [1], [0, 1]):
        stack = stack_of(net, len(clients))
        x = torch.stack([federation.x[federation.clients[c][:4]] for c in clients])
        term = sum(
            (leaf - start[name]).square().flatten(1).sum(1) for name, leaf in stack.leaves.items()
        )
        loss = stack(x).logits_KBC.square().mean((1, 2)) + 0.5 * term
        grads.append(
            stack.gradients(loss)
            if how == "gradients"
            else stack.backward(loss) or dict(stack.named_grads())
        )
    assert grads[0].keys() == {"0.weight", "0.bias", "2.weight"}
    for name, both in grads[2].items():
        torch.testing.assert_close(
            torch.cat([grads[0][name], grads[1][name]]), both, rtol=1e-12, atol=1e-12
        )


def test_the_servers_momentum_does_not_act_in_a_round_without_a_finite_client(federation):
    net, after = make_net(), []

    class Breaks(Spy):
        def send(self, upload, own, download):
            upload.delta["0.bias"] *= float("inf") if download.round == 1 else 1

    train_rounds(
        net,
        federation,
        solver(),
        rounds=3,
        methods=[Breaks()],
        server=partial(torch.optim.SGD, lr=1.0, momentum=0.9),
        on_round=lambda *_: after.append(weights(net)),
    )
    assert torch.equal(after[1], after[0])
    assert not torch.equal(after[2], after[1])


class Sends(Spy):
    """Client 1 sends a number that is not finite in addition to a finite Δ."""

    def send(self, upload, own, download):
        numbers = [torch.inf if client == 1 else 2.0 for client in upload.clients.tolist()]
        upload.send("more", {"v": torch.tensor(numbers)})

    def uploads(self, round):
        return {"more": {"v": torch.zeros(())}}


def test_a_client_whose_extra_numbers_are_not_finite_is_left_out(federation):
    seen = []
    train_rounds(
        make_net(),
        federation,
        sgd(),
        rounds=1,
        cohort_of=5,
        k=2,
        methods=[Sends()],
        on_round=lambda round, row: seen.append(
            (row["train/nonfinite_clients"], round.received["more"]["v"].item())
        ),
    )
    assert seen == [(1, 2.0)]


class Misfit(Spy):
    """Sends tensors that ``uploads`` does not list."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def send(self, upload, own, download):
        for name, key, t in self.tensors:
            upload.send(name, {key: t.expand(len(upload.clients), *t.shape)})

    uploads = Sends.uploads


@pytest.mark.parametrize(
    ("sends", "words"),
    [
        ([], "^an upload's more is .* model or method: v is missing"),
        (
            [("more", "v", torch.zeros(2))],
            r"v is torch.float32 \(1, 2\), and here it is torch.float32 \(1,\)",
        ),
        (
            [("more", "v", torch.zeros(())), ("less", "u", torch.zeros(()))],
            r"^an upload's less .* u is torch.float32 \(1,\), and here it is unknown",
        ),
    ],
)
def test_a_message_that_its_method_does_not_list_is_refused_with_its_name_and_key(
    federation, sends, words
):
    with pytest.raises(ValueError, match=words):
        train_rounds(make_net(), federation, sgd(), rounds=1, methods=[Misfit(*sends)])


class KeepsOther(ClientPart):
    """Reads or returns a state that its ``keeps`` does not list."""

    keeps: ClassVar = {"mine": Kept(like_trained)}

    def __init__(self, reads):
        self.reads_other = reads

    def keep(self, upload, own, download):
        return {"mine": own["yours"]} if self.reads_other else {"yours": upload.delta}


class TermOfClasses(ClientPart):
    def local_loss(self, stack, batch, out):
        return out.logits_KBC.mean((0, 1))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (KeepsOther(reads=True), r"'yours'\n.*KeepsOther\.keep fails"),
        (KeepsOther(reads=False), "'yours'$"),
        (TermOfClasses(), r"TermOfClasses\.local_loss returns a tensor of shape \[4\], not \[1\]"),
    ],
)
def test_a_method_that_contradicts_itself_is_refused_by_name(federation, method, words):
    with pytest.raises((ValueError, KeyError), match=f"^{words}"):
        train_rounds(make_net(), federation, sgd(), rounds=1, methods=[method])


class Hears(ClientPart):
    """Writes its state only when it hears the reply, and sends it in the next round."""

    keeps: ClassVar = {"heard": Kept(like_trained)}

    def send(self, upload, own, download):
        for name, kept in own["heard"].items():
            upload.delta[name] += 0.5 * kept

    def hear(self, reply, own, download):
        kept = own["heard"]
        return {"heard": {name: kept[name] + move for name, move in reply["moved"].items()}}


class Replies(ServerPart):
    def on_aggregate_end(self, update, round):
        round.reply["moved"] = {name: update[name].clone() for name in self.trained_names}


@pytest.mark.parametrize("k", [1, 3])
def test_a_state_that_is_written_only_with_the_reply_is_there_in_every_process(tmp_path, k):
    """A client trains in another process in the next round."""
    found = []
    for world in (1, 2):
        stores = ClientStores(folder=tmp_path / str(world))
        end = train_rounds(
            make_net(),
            random_federation(),
            sgd(),
            rounds=8,
            methods=[Method(Hears(), Replies())],
            cohort_of=3,
            stores=stores,
            world=world,
            k=k,
        )
        found.append((end, stores.versions("heard", np.arange(5))))
    (alone, versions), (together, others) = found
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)
    assert others == versions
    assert max(versions) == 7
