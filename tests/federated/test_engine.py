"""The engine: rounds equal independent loops for any number of clients in a stack
and of processes.
"""

import copy
import re
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import refuses
from harness import (
    ArrayData,
    Spy,
    assert_near,
    make_net,
    plan_of,
    random_federation,
    sgd,
    stack_of,
    train_rounds,
    weights,
)
from torch import nn

from gcfed.federated.engine.round_row import refuse_changes
from gcfed.federated.network.lent_network import travelling_state
from gcfed.federated.parts import ClientPart, KeptState, Method, ServerPart, like_trained
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.solver import LocalSolver
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.objective.proximal import Proximal
from gcfed.utils.refusal import Refusal


def solver(**kwargs):
    return sgd(momentum=0.9, weight_decay=1e-3, **kwargs)


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
        first = nn.Conv2d(2, 4, 3)
        second = last(4, 6, kernel)
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
        self.table = nn.Embedding(5, 6, padding_idx=0)
        self.head = nn.Linear(6, 4)
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
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 5)
        self.head = nn.Linear(5, 4)

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
    ("stack", "optimizer"), [("many", torch.optim.SGD), (1, torch.optim.Adafactor)]
)
def test_the_error_of_a_solver_setting_names_its_key(stack, optimizer):
    with pytest.raises(ValueError, match=r"stack=many|optimizer=Adafactor"):
        LocalSolver(partial(optimizer, lr=0.1), stack=stack)


@pytest.mark.parametrize("how", ["backward", "gradients"])
def test_a_term_on_the_leaves_counts_in_stacks_of_one_and_two(federation, how):
    """The term is ½ ‖w_k − w‖² as in a ``local_loss``. One parameter is frozen."""
    net = make_net()
    net[2].bias.requires_grad_(False)
    start = {name: t + 0.1 for name, t in travelling_state(net).items()}
    grads = []
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
    net = make_net()
    after = []

    class Breaks(Spy):
        def send(self, upload, own, download):
            upload.delta["0.bias"] *= float("inf") if download.round_index == 1 else 1

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
            (row["train/nonfinite_clients"], round.extra_means["more"]["v"].item())
        ),
    )
    assert seen == [(1, 2.0)]


class Adds(ServerPart):
    """Declares one sum, a number, and adds other terms to its sums."""

    def __init__(self, terms):
        self.terms = terms

    def sums(self, round):
        return {"count": round.zeros()}

    def on_receive(self, upload, round):
        return self.terms


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ({"other": torch.ones(())}, "returns other, and sums() has no such name"),
        ({"count": torch.ones(2)}, "returns count of shape [2], and sums() has shape []"),
    ],
)
def test_terms_that_a_part_has_not_declared_are_refused(federation, terms, why):
    with pytest.raises(Refusal, match=re.escape(f"Adds: on_receive() {why}")):
        train_rounds(make_net(), federation, sgd(), rounds=1, methods=[Adds(terms)])


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
            r"^an upload's less .* u is torch.float32 \(1,\), and here it is unknown\."
            r" No method lists less, and Misfit sends it in send\(\): list it in .* uploads\(\)",
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

    keeps: ClassVar = {"mine": KeptState(like_trained)}

    def __init__(self, reads):
        self.reads_other = reads

    def keep(self, upload, own, download):
        return {"mine": own["yours"]} if self.reads_other else {"yours": upload.delta}


class EditsItsState(Spy):
    """Adds Δ to its state in place. Client 1 sends a number that is not finite."""

    keeps: ClassVar = {"mine": KeptState(like_trained)}

    def __init__(self, adds):
        self.adds = adds

    def send(self, upload, own, download):
        upload.delta["0.bias"][torch.from_numpy(upload.clients == 1)] = torch.inf

    def keep(self, upload, own, download):
        if self.adds:
            return {"mine": own.add("mine", upload.delta, upload.finite)}
        for name, kept in own["mine"].items():
            kept += upload.delta[name]
        return {"mine": own["mine"]}


@pytest.mark.parametrize("adds", [False, True])
def test_a_state_that_a_method_edits_in_place_is_kept_of_finite_clients_only(federation, adds):
    stores = ClientStores()
    net = make_net()
    like = {name: t.detach().clone() for name, t in net.named_parameters()}
    method = EditsItsState(adds)
    train_rounds(
        net, federation, sgd(), rounds=2, methods=[method], cohort_of=5, k=5, stores=stores
    )
    states = stores.read("mine", np.arange(5), like)
    for t in states.values():
        moved = t.flatten(1).abs().sum(1)
        assert moved.isfinite().all()
        assert (moved > 0).tolist() == [True, False, True, True, True]


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


class Weighs(ClientPart):
    """Chooses the weight of the task's loss anew in each round: 0 after the first one."""

    def on_download(self, download):
        self.task_weight = 1.0 if download.round_index == 0 else 0.0


@pytest.mark.parametrize("k", [1, 3])
def test_a_method_may_weigh_the_task_anew_in_each_round(federation, k):
    ends = []
    for rounds in (1, 2):
        net = make_net()
        train_rounds(net, federation, sgd(), rounds=rounds, methods=[Weighs()], k=k)
        ends.append(weights(net))
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], weights(make_net()))


class Hears(ClientPart):
    """Writes its state only when it hears the reply, and sends it in the next round."""

    keeps: ClassVar = {"heard": KeptState(like_trained)}

    def send(self, upload, own, download):
        for name, kept in own["heard"].items():
            upload.delta[name] += 0.5 * kept

    def on_reply(self, reply, own, download):
        kept = own["heard"]
        return {"heard": {name: kept[name] + move for name, move in reply["moved"].items()}}


class Replies(ServerPart):
    def on_aggregate_end(self, update, round):
        round.reply["moved"] = {name: update[name].clone() for name in self.trained_names}


class EditsOnReply(ClientPart):
    """Adds the reply to the states of all clients. Client 1 sends a number that is not finite."""

    keeps: ClassVar = {"heard": KeptState(like_trained)}

    def send(self, upload, own, download):
        upload.delta["0.bias"][torch.from_numpy(upload.clients == 1)] = torch.inf

    def on_reply(self, reply, own, download):
        change = {name: move.expand_as(own["heard"][name]) for name, move in reply["moved"].items()}
        everybody = torch.ones(len(own.version)).bool()
        return {"heard": own.add("heard", change, everybody)}


def test_a_reply_changes_no_state_of_a_client_that_does_not_count(federation):
    stores = ClientStores()
    net = make_net()
    like = {name: t.detach().clone() for name, t in net.named_parameters()}
    method = Method(EditsOnReply(), Replies())
    train_rounds(
        net, federation, sgd(), rounds=2, methods=[method], cohort_of=5, k=5, stores=stores
    )
    for t in stores.read("heard", np.arange(5), like).values():
        moved = t.flatten(1).abs().sum(1)
        assert (moved > 0).tolist() == [True, False, True, True, True]


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


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ({"train/loss": 2.0}, "writes the column train/loss"),
        ({}, "removes the column train/loss"),
    ],
)
def test_a_part_may_only_add_columns_to_a_row(after, words):
    with refuses(words):
        refuse_changes(Spy(), {"train/loss": 1.0}, after)
