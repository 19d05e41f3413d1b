"""FedCurv equals a plain loop on the paper's objective, also under partial participation."""

from functools import partial

import numpy as np
import pytest
import torch
from harness import (
    assert_near,
    client_of,
    join_run,
    make_net,
    make_setup,
    random_federation,
    sgd,
    train_rounds,
    weights,
)
from plain_clients import Net
from plain_clients import federation as sequence_federation
from plain_reference import batches, cohort, local_sgd, loss_at
from torch import nn

from gcfed.federated.network.lent_network import travelling_state
from gcfed.federated.network.stack import ClientStack, StackStart
from gcfed.methods.objective.fedcurv import FedCurv

LAM = 0.7


def squared_gradients(net, w, data, client):
    """The mean of the squared gradients of the losses of a client's samples."""
    samples = torch.from_numpy(data.clients[client]).split(1)
    w = w.clone().requires_grad_()
    return sum(
        torch.autograd.grad(loss_at(net, w, data.x[i], data.y[i]), w)[0] ** 2 for i in samples
    ) / len(samples)


def reference(net, data, solver, *, rounds, cohort_of=3, silent=(), lr=0.1):
    """The final weights. Clients in ``silent`` train, but their uploads do not count."""
    w = weights(net)
    last = {}
    for t in range(rounds):
        now = {}
        for k in cohort(data, t, cohort_of):
            if k in silent:
                continue
            others = [pair for j, pair in last.items() if j != k]

            def term(v, others=others):
                return LAM * sum((fisher * (v - other).square()).sum() for other, fisher in others)

            w_k, _ = local_sgd(net, w, batches(data, solver, k, t), lr=lr, term=term)
            now[k] = (w_k, squared_gradients(net, w_k, data, k))
        if now:
            w = sum(w_k for w_k, _ in now.values()) / len(now)
            last = now
    return w


def test_it_equals_the_plain_loop(federation):
    ours = train_rounds(rounds=4, methods=[FedCurv(LAM, chunk=5)], k=2)
    assert_near(ours, reference(make_net(), federation, sgd(), rounds=4), 1e-10)


def test_a_single_client_trains_as_in_fedavg():
    """It subtracts from the server's sums exactly what it sent, so it trains as in FedAvg."""
    run = partial(train_rounds, data=random_federation((7,)), solver=sgd(), rounds=2, cohort_of=1)
    assert torch.equal(run(make_net(), methods=[FedCurv(LAM)]), run(make_net()))


@pytest.mark.parametrize("sequences", [False, True])
def test_fisher_information_with_frozen_layers_dropout_and_padding(sequences):
    """The network is in evaluation mode.

    The loss of a sequence is the mean over its real labels.
    """
    data = sequence_federation(sequences)
    net = Net()
    net.fc1.weight.requires_grad_(False)
    net.fc2 = nn.Sequential(net.fc2, nn.Dropout(0.5))
    found = []
    for chunk in (1, 4):
        method = client_of(FedCurv(chunk=chunk))
        join_run(method, make_setup(net, data=data))
        clients = np.array([1, 0])
        stack = ClientStack(
            net, StackStart(travelling_state(net), clients, data.sizes(clients), np.ones(2))
        )
        method.on_clients_end(stack, None)
        assert net.training
        found.append(method._own["fedcurv_fisher"])
    for row, client in enumerate([1, 0]):
        expected = {name: 0.0 for name, p in net.named_parameters() if p.requires_grad}
        net.eval()
        for i in data.clients[client]:
            real = data.y[i] >= 0
            loss = nn.functional.cross_entropy(net(data.x[i])[real], data.y[i][real])
            params = [p for p in net.parameters() if p.requires_grad]
            for name, g in zip(expected, torch.autograd.grad(loss, params), strict=True):
                expected[name] += g.square() / len(data.clients[client])
        net.train()
        for fisher in found:
            assert fisher.keys() == expected.keys()
            for name, t in expected.items():
                assert_near(fisher[name][row], t, 1e-14)


def test_recurrent_networks_are_refused():
    with pytest.raises(ValueError, match=r"methods\.fedcurv .* recurrent layers"):
        join_run(FedCurv(), make_setup(nn.Sequential(nn.LSTM(6, 4))))
