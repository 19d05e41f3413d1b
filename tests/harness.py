"""The engine without Lightning: a plain loop drives stack, solver, methods and aggregator, as the callback does."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from conftest import ArrayData
from torch import nn

from gcfed.federated.aggregate import MeanAggregator, Upload, finite_clients
from gcfed.federated.method import Setup, upload_shapes, validate_methods
from gcfed.federated.round import Round, assign, no_reduce
from gcfed.federated.solver import LocalSolver
from gcfed.federated.stack import ClientStack, broadcast_state, nbytes
from gcfed.federated.store import ClientStores
from gcfed.tasks import CLASSIFICATION

CPU = torch.device("cpu")
PLAIN_SERVER = partial(torch.optim.SGD, lr=1.0)


def make_net(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).to(dtype)


def sgd(lr=0.1, momentum=0.0, weight_decay=0.0, **kwargs):
    """A local solver: SGD, two epochs in batches of four unless told otherwise."""
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay)
    return LocalSolver(optimizer, **{"epochs": 2, "batch_size": 4} | kwargs)


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def make_setup(
    net, *, methods=(), solver=None, aggregator=None, server=PLAIN_SERVER, stores=None, data=None, task=CLASSIFICATION,
    rounds=1, cohort_of=3,
):  # fmt: skip
    """The parts of a run as ``validate`` meets them, its methods in the order of their hooks."""
    module = SimpleNamespace(net=net, clients=None, server=server, task=task)
    methods = sorted(methods, key=lambda m: m.order)
    return Setup(
        SimpleNamespace(per_round=cohort_of), solver or sgd(), aggregator or MeanAggregator(),
        stores or ClientStores(), data, module, methods, rounds,
    )  # fmt: skip


def plain_loop(
    net,
    data: ArrayData,
    solver: LocalSolver,
    *,
    rounds: int,
    methods=(),
    aggregator=None,
    server=PLAIN_SERVER,
    stores=None,
    k=1,
    cohort_of=3,
    seed=5,
    order=1,
    world=1,
    task=CLASSIFICATION,
    on_round=lambda round, update: None,
):
    """Trains ``net``; returns its weights and the losses of all stacks.

    ``k`` clients train in a stack, ``world`` processes share the cohort and run one after the other,
    ``order=-1`` reverses the cohort. ``on_round`` sees each finished round.
    """
    setup = make_setup(
        net, methods=methods, solver=solver, aggregator=aggregator, server=server, stores=stores, data=data, task=task,
        rounds=rounds, cohort_of=cohort_of,
    )  # fmt: skip
    validate_methods(setup)
    module, methods, stores = setup.module, setup.methods, setup.stores
    aggregators = [setup.aggregator, *(deepcopy(setup.aggregator) for _ in range(world - 1))]
    optimizer = server(net.parameters())
    losses = []
    for t in range(rounds):
        ids = np.sort(np.random.default_rng(t).choice(len(data.clients), cohort_of, replace=False))[::order]
        round = Round(t, seed, ids, len(data.clients), broadcast_state(net), lr=solver.lr(t), server=optimizer)
        round.down_bytes = len(ids) * nbytes(round.start)
        for m in methods:
            m.on_broadcast(round)
        shapes = upload_shapes(methods, round)
        extra = {name: MeanAggregator() for name in shapes if name != "delta"}
        num_finite = 0
        for rank in range(world):
            mine = assign(ids, solver.num_steps(data.sizes(ids)), rank, world)
            for clients in np.split(mine, range(k, len(mine), k)) if len(mine) else []:
                upload, loss_K = train_clients(module, data, solver, clients, round, methods)
                losses.append(loss_K)
                for m in methods:
                    m.on_receive(upload, round)
                for name, tensors in upload.extra.items():
                    extra[name].add_weighted(tensors, upload.finite.float())
                aggregators[rank].add(upload, round)
                num_finite += int(upload.finite.sum())
        update = reduce_over(aggregators, round, shapes["delta"])
        round.num_finite = num_finite
        round.received = {name: mean.reduce(round, shapes[name]) for name, mean in extra.items()}
        stores.finish_round(round)
        if num_finite:
            for m in methods:
                m.on_aggregate_end(update, round)
            for name, p in net.named_parameters():
                p.grad = -update[name]
            with torch.no_grad():
                for m in methods:
                    m.on_before_optimizer_step(None, module, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        on_round(round, update)
    return weights(net), losses


def train_clients(module, data, solver, clients, round, methods):
    """K clients side by side: broadcast, local training, upload."""
    plan = solver.plan(data, clients, round, CPU)
    module.clients = stack = ClientStack(
        module.net, round.start, clients, data.sizes(clients), plan.steps,
        tap_features=any(m.needs_features for m in methods), tap_stages=any(m.needs_stages for m in methods),
        task=module.task,
    )  # fmt: skip
    for m in methods:
        m.on_clients_start(stack, round)

    def after_backward():
        for m in methods:
            m.on_after_backward(None, module)

    loss_K = solver.train(stack, plan, data, round, methods, after_backward)
    for m in methods:
        m.on_clients_end(stack, round)
    delta = stack.delta()
    upload = Upload(
        clients, data.sizes(clients), plan.steps, delta, finite_clients(delta), nbytes(round.start)
    )  # fmt: skip
    for m in methods:
        m.on_upload(upload, round)
    for tensors in (upload.delta, *upload.extra.values()):
        upload.finite = upload.finite & finite_clients(tensors)
    return upload, loss_K


def make_upload(delta, sizes, finite=None):
    return Upload(np.arange(len(sizes)), sizes, sizes, delta, finite_clients(delta) if finite is None else finite, 0)


def make_round(start, reduce=no_reduce, lr=0.1):
    return Round(0, 1, np.array([1, 4]), 5, start, lr=lr, reduce=reduce)


def reduce_over(aggregators, round, like=None):
    """What an all-reduce over processes does: the sums of the parts are added up, then each divides."""
    if len(aggregators) == 1:
        return aggregators[0].reduce(round, like)
    messages = []

    def record(tensors):
        messages.append([t.clone() for t in tensors])
        return tensors

    for a in aggregators[1:]:
        a.reduce(replace(round, reduce=record), like)
    added = replace(round, reduce=lambda ts: [t + sum(m[i] for m in messages) for i, t in enumerate(ts)])
    return aggregators[0].reduce(added, like)
