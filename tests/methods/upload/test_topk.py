"""Top-k with error feedback equals a plain loop: sent entries, kept residuals and bytes."""

import numpy as np
import pytest
import torch
from harness import (
    assert_near,
    make_net,
    make_setup,
    random_federation,
    sgd,
    train_rounds,
    weights,
)
from plain_reference import batches, cohort, local_sgd, tensors

from gcfed.federated.parts.refusals import validate_parts
from gcfed.federated.state.store import ClientStores
from gcfed.methods.subspace.ssf import SSF
from gcfed.methods.upload.quantization import Quantization
from gcfed.methods.upload.topk import TopK


def compressed(p, ratio):
    """The largest entries of a tensor, found by sorting a list."""
    flat = p.flatten().tolist()
    kept = torch.zeros_like(p).flatten()
    for i in sorted(range(len(flat)), key=lambda i: -abs(flat[i]))[
        : max(1, round(ratio * len(flat)))
    ]:
        kept[i] = flat[i]
    return kept.view(p.shape)


@pytest.mark.parametrize(("ratio", "entries"), [(0.1, 3 + 1 + 2 + 1), (0.46, 14 + 2 + 9 + 2)])
def test_it_equals_the_plain_loop(ratio, entries):
    """The tensors have 30, 5, 20 and 4 entries. k is rounded, and at least 1."""
    data = random_federation()
    net = make_net()
    solver = sgd(momentum=0.5)
    sizes = []
    stores = ClientStores()
    w = weights(net)
    errors = {}
    like = dict(net.named_parameters())
    ours = train_rounds(
        net,
        data,
        solver,
        rounds=4,
        methods=[TopK(ratio)],
        k=2,
        stores=stores,
        on_round=lambda round, row: sizes.append(row["comm/up_bytes"]),
    )
    for t in range(4):
        sent = []
        for k in cohort(data, t, 3):
            w_k, _ = local_sgd(net, w, batches(data, solver, k, t), lr=0.1, momentum=0.5)
            wanted = tensors(net, w_k - w + errors.get(k, torch.zeros_like(w)))
            chosen = torch.cat([compressed(p, ratio).flatten() for p in wanted.values()])
            errors[k] = torch.cat([p.flatten() for p in wanted.values()]) - chosen
            sent.append(chosen)
        w = w + sum(sent) / 3
    assert_near(ours, w, 1e-10)
    kept = stores.read("topk", np.arange(5), {n: p.detach() for n, p in like.items()})
    for k, error in errors.items():
        assert_near(torch.cat([t[k].flatten() for t in kept.values()]), error, 1e-10)
    assert sizes == [3 * entries * (8 + 4)] * 4  # a value and an index each


@pytest.mark.parametrize("other", [SSF, Quantization])
def test_other_compressions_are_refused(other):
    with pytest.raises(ValueError, match=f"TopK does not combine with {other.__name__}"):
        validate_parts(make_setup(make_net(), methods=[other(), TopK()]))
