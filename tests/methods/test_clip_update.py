"""Clipped updates: the norm of each update is bounded, and the adaptive bound converges to its quantile."""

from functools import partial

import numpy as np
import pytest
import torch
from harness import Sizes, make_download, make_net, make_received, make_round, make_upload, sgd, train_rounds, weights

from gcfed.methods.clip_update import ClipUpdate
from gcfed.methods.fedgc import FedGC
from gcfed.methods.lookahead import LookAhead
from gcfed.methods.ssf import SSF


def upload_of(norms):
    """An upload with two tensors, whose clients' updates have these norms."""
    g = torch.Generator().manual_seed(0)
    w, b = torch.randn(len(norms), 3, 2, generator=g).double(), torch.randn(len(norms), generator=g).double()
    scale = torch.tensor(norms).double() / (w.square().sum((1, 2)) + b.square()).sqrt()
    return make_upload({"w": w * scale[:, None, None], "b": b * scale}, np.ones(len(norms)))


def norms_of(upload):
    return (upload.delta["w"].square().sum((1, 2)) + upload.delta["b"].square()).sqrt()


MODEL = {"w": torch.zeros(3, 2).double(), "b": torch.zeros(()).double()}


def clipped(method, upload):
    """Clips an upload in place in a round of its own. Returns the row."""
    client, server = method.parts
    client._no_steps = set()
    round, download, row = make_round(MODEL), make_download(MODEL), {}
    server.on_broadcast(download, round)
    client.send(upload, {}, download)
    received = make_received(MODEL, int(upload.finite.sum()), sums={server: server.on_receive(upload, round)})
    server.on_aggregate_end({}, received)
    server.on_round_end(row, received)
    return row


def test_only_longer_updates_are_clipped_and_keep_their_direction():
    upload, before = upload_of([0.5, 2.0, 8.0]), upload_of([0.5, 2.0, 8.0])
    clipped(ClipUpdate(2.0), upload)
    torch.testing.assert_close(norms_of(upload), torch.tensor([0.5, 2.0, 2.0]).double())
    torch.testing.assert_close(upload.delta["w"][2] * 4, before.delta["w"][2])
    assert torch.equal(upload.delta["w"][0], before.delta["w"][0])


def test_the_adaptive_bound_follows_the_papers_step_to_the_quantile():
    method, norms = ClipUpdate(1.0, quantile=0.5, lr=0.2), np.linspace(1, 9, 9).tolist()
    rows = [clipped(method, upload_of(norms)) for _ in range(200)]
    bounds = [row["clip_update/max_norm"] for row in rows]
    assert bounds[1] == pytest.approx(np.exp(-0.2 * (1 / 9 - 0.5)))  # one of nine is not clipped
    assert 4 < np.mean(bounds[-20:]) < 6
    assert 0.3 < rows[-1]["clip_update/clipped"] < 0.7


def test_the_bound_is_sent_down_and_one_bit_up(federation):
    sizes = Sizes()
    train_rounds(make_net(), federation, sgd(), rounds=1, methods=[ClipUpdate(), sizes])
    model = weights(make_net()).numel() * 8
    assert sizes.down == [model + 8]
    assert set(sizes.up) == {model + 1}


def test_stacks_and_two_processes_agree_and_a_large_bound_equals_fedavg(federation):
    def run(*methods, **kwargs):
        return train_rounds(make_net(), federation, sgd(), rounds=3, cohort_of=4, methods=methods, **kwargs)

    one, *others = (run(ClipUpdate(0.05, quantile=0.3), **where) for where in ({}, {"k": 4}, {"world": 2}))
    for other in others:
        torch.testing.assert_close(other, one, rtol=0, atol=1e-9)
    assert torch.equal(run(ClipUpdate(1e6)), run())


@pytest.mark.parametrize(("methods", "more"), [
    ((lambda: ClipUpdate(0.02), lambda: SSF(ratio=0.5)), {}),
    ((LookAhead, FedGC), {"server": partial(torch.optim.SGD, lr=1.0, momentum=0.85)}),
], ids=["clipped SSF", "FedGC ahead"])  # fmt: skip
def test_the_listed_order_of_methods_does_not_matter(federation, methods, more):
    """A method that reads updates comes before clipping. A method that reads the model sees the clients' model."""
    one, other = (
        train_rounds(make_net(), federation, sgd(), rounds=3, methods=[make() for make in listed], **more)
        for listed in (methods, methods[::-1])
    )
    assert torch.equal(one, other)
