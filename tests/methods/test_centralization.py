"""GC equals an independent loop over entries, and obeys its algebra (GC-Fed, eq. 1–3 and Algorithm
1).
"""

from collections import OrderedDict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import (
    assert_near,
    join_run,
    make_net,
    make_setup,
    random_federation,
    sgd,
    train_rounds,
    without_samples,
)
from torch import nn
from torch.nn.utils import parametrizations

from gcfed.federated.parts import ClientPart
from gcfed.methods.centralization import GlobalGC, GradientCentralization
from gcfed.methods.projection import by_output, centralize_


def by_hand(grad):
    """Entry by entry: subtracts the mean of the entries with the same output."""
    g = grad.numpy()
    out = np.empty_like(g)
    for index in np.ndindex(*g.shape):
        out[index] = g[index] - g[index[0]].mean()
    return torch.from_numpy(out)


@pytest.mark.parametrize("shape", [(4, 3, 2, 3), (5, 7)])
def test_gc_equals_the_loop_over_entries_and_is_an_orthogonal_projection(shape):
    stacked = torch.randn(3, *shape, dtype=torch.float64)
    expected = torch.stack([by_hand(g) for g in stacked])
    once = stacked.clone()
    alone = stacked[0].clone()
    if len(shape) == 4:
        alone = alone.contiguous(memory_format=torch.channels_last)
    for grad, of in ((once, expected), (alone, expected[0])):
        centralize_(grad, len(shape))
        assert_near(grad, of, 1e-14)
    twice = once.clone()
    g, h = stacked[:2]
    centralize_(twice, len(shape))
    assert_near(twice, once, 1e-14)  # P² = P
    assert (once * (stacked - once)).sum().abs() < 1e-12  # the residual is orthogonal
    both = 0.3 * g + 0.7 * h
    centralize_(both, len(shape))
    # linear: P commutes with the cohort's mean
    torch.testing.assert_close(both, 0.3 * once[0] + 0.7 * once[1])


@pytest.mark.parametrize("shape", [(4, 1), (4, 1, 1), (1,)])
def test_a_mean_over_a_single_number_is_not_subtracted(shape):
    """Otherwise a layer with one input, an adapter of rank 1 and a scale per channel would never
    change.
    """
    grad = torch.randn(3, *shape)
    projected = grad.clone()
    centralize_(projected, len(shape))
    assert torch.equal(projected, grad)


@pytest.mark.parametrize(("groups", "kernel"), [(1, (3,)), (2, (3, 2)), (4, (2, 2, 3))])
def test_each_group_of_a_transposed_convolution_counts_as_a_convolution(groups, kernel):
    """Its weight is ``[in, out / groups, …]``.

    With these two axes swapped, each group is a convolution's weight.
    """
    stacked = torch.randn(3, 8, 5, *kernel, dtype=torch.float64)
    ndim = stacked.dim() - 1
    expected = stacked.clone()
    for client in expected:
        for group in client.unflatten(0, (groups, -1)):
            group.copy_(by_hand(group.transpose(0, 1)).transpose(0, 1))
    once = stacked.clone()
    centralize_(once, ndim, groups)
    assert_near(once, expected, 1e-14)
    rows = by_output(stacked, groups)
    removed = by_output(stacked - once, groups)
    means = rows.mean(2, keepdim=True).expand_as(rows)
    assert_near(removed, means, 1e-14)


def test_a_first_layer_of_global_gc_is_no_fact_for_other_parts():
    """Drift, clipping and robust rules still see the tensors before it."""
    setup = make_setup(net(), data=without_samples((1, 4, 4)))
    gc = GlobalGC("fc1")
    join_run(gc, setup)
    assert {*gc.axes_of} == {"fc1.weight", "fc2.weight"}
    assert setup.no_steps == set()


def net():
    torch.manual_seed(0)
    convolutions = {
        "conv1": nn.Conv2d(1, 2, 3),
        "conv2": nn.Conv2d(2, 3, 2, padding=1),
        "flat": nn.Flatten(),
    }
    layers = convolutions | {"fc1": nn.Linear(27, 5), "relu": nn.ReLU(), "fc2": nn.Linear(5, 4)}
    return nn.Sequential(OrderedDict(layers)).double()


def check_run(part, model=None):
    shape = model[0].weight.shape[1:] if model else (1, 4, 4)
    join_run(part, make_setup(model or net(), data=without_samples(shape)))


NAMES = [
    f"{layer}.{kind}" for layer in ("conv1", "conv2", "fc1", "fc2") for kind in ("weight", "bias")
]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"boundary": "fc2"}, ["conv1.weight", "conv2.weight", "fc1.weight"]),
        ({"server": False}, ["conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight"]),
        ({"lam": 0.0}, []),
        ({"lam": 0.62}, ["conv1.weight", "conv2.weight"]),  # ⌊0.62 · 8⌋ = 4
        ({"lam": 0.63}, ["conv1.weight", "conv2.weight", "fc1.weight"]),
        (
            {"lam": 1.0, "boundary": "fc2"},
            ["conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight"],
        ),
        ({"lam": 0.5, "tensors": "all"}, NAMES[:4]),
        ({"server": False, "tensors": "all"}, NAMES),
        ({"boundary": "fc2", "local": False}, []),
    ],
)
def test_local_gc_ends_at_the_boundary(kwargs, expected):
    clients = [
        part for part in GradientCentralization(**kwargs).parts if isinstance(part, ClientPart)
    ]
    for part in clients:
        check_run(part)
    assert [name for part in clients for name in part.axes_of] == expected


def test_lam_is_a_share_of_the_trained_tensors(caplog):
    """Otherwise a frozen backbone would use up the share, because adapters come last."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    model[:2].requires_grad_(False)
    gc = GradientCentralization(lam=0.5).local_gc
    check_run(gc, model)
    assert [*gc.axes_of] == ["2.weight"]
    assert not caplog.records
    check_run(GradientCentralization(lam=0.2).local_gc, model)
    assert "there is no Local GC" in caplog.text
    gc = GradientCentralization(lam=0.29, tensors="all").local_gc
    check_run(gc, nn.Sequential(*(nn.Linear(1, 1) for _ in range(50))))
    assert len(gc.axes_of) == 29  # 0.29 · 100 is 28.999… in floating point


class Decoder(nn.Module):
    """Declares its head first.

    It has a token, positions, a convolution and a transposed convolution.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 4)
        self.body = nn.Sequential(
            OrderedDict(up=nn.ConvTranspose1d(4, 6, 2, groups=2), conv=nn.Conv1d(6, 6, 1))
        )
        self.stem = parametrizations.weight_norm(nn.Conv1d(2, 4, 1))
        self.token = nn.Parameter(torch.randn(1, 4, 1))
        self.position = nn.Parameter(torch.randn(1, 4, 4))
        self.double()

    def forward(self, x):
        h = (
            torch.cat([self.token.expand(len(x), -1, -1), self.stem(x.unflatten(1, (2, 3)))], 2)
            + self.position
        )
        return self.head(self.body(h.relu()).relu().mean(2))


STEM = [f"stem.parametrizations.weight.original{i}" for i in range(2)]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"boundary": "head"}, [*STEM, "body.up.weight", "body.conv.weight"]),
        ({"boundary": "auto"}, [*STEM, "body.up.weight", "body.conv.weight"]),
        ({"boundary": "body.conv"}, [*STEM, "body.up.weight"]),
        ({"boundary": "stem"}, []),
        (
            {"lam": 0.6},
            [*STEM, "body.up.weight"],
        ),  # of 11: token, position, stem (3), then up.weight
        ({"lam": 0.5, "tensors": "all"}, ["token", "position", "stem.bias", *STEM]),
        ({"lam": 1}, [*STEM, "body.up.weight", "body.conv.weight", "head.weight"]),
    ],
)
def test_the_boundary_follows_the_order_of_the_forward_pass(kwargs, expected):
    method = GradientCentralization(**kwargs)
    setup = make_setup(Decoder(), data=random_federation())
    join_run(method.local_gc, setup)
    join_run(method.global_gc, setup)
    assert [*method.local_gc.axes_of] == expected
    later = GradientCentralization(local=False, server_boundary="body.conv").global_gc
    join_run(later, setup)
    assert [*later.axes_of] == ["body.conv.weight", "head.weight"]


@pytest.mark.parametrize(
    ("kwargs", "chosen"),
    [
        ({"boundary": "fc2"}, ["conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight"]),
        ({"boundary": "fc2", "tensors": "all"}, NAMES),
        ({"local": False, "server_boundary": "fc1"}, NAMES[4::2]),
    ],
)
def test_global_gc_projects_the_pseudo_gradient_of_all_layers_or_of_later_ones(kwargs, chosen):
    model = net()
    gc = GradientCentralization(**kwargs).global_gc
    check_run(gc, model)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    gc.on_before_optimizer_step(None, SimpleNamespace(net=model), None)
    for name, p in model.named_parameters():
        centred = by_hand(before[name]) if p.dim() > 1 else before[name] - before[name].mean()
        assert_near(p.grad, centred if name in chosen else before[name], 1e-12)


def test_local_gc_may_end_after_some_rounds():
    """The first round has Local GC, the second only Global GC, as in a run in which Local GC is
    turned off.
    """
    run = partial(train_rounds, data=random_federation(), solver=sgd(), cohort_of=4, rounds=2)
    found, always = (
        run(make_net(), methods=[GradientCentralization(lam=1, local_rounds=rounds)])
        for rounds in (1, None)
    )
    switched = GradientCentralization(lam=1, local_rounds=9)

    def on_round(round, row):
        if round.index == 0:
            switched.local_gc.rounds = 0

    assert torch.equal(found, run(make_net(), methods=[switched], on_round=on_round))
    assert not torch.equal(found, always)


def test_a_tied_weight_belongs_to_the_layer_that_uses_it_last():
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    for boundary, expected in (("2", ["0.weight"]), ("1", [])):  # layer 1 uses it last
        gc = GradientCentralization(boundary=boundary).local_gc
        check_run(gc, tied)
        assert [*gc.axes_of] == expected


def test_an_unusable_boundary_is_refused():
    with pytest.raises(ValueError, match=r"boundary and lam are null"):
        GradientCentralization()
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    four = "conv1, conv2, fc1, fc2"
    for model, boundary, known in (
        (net(), "fc9", four),
        (net(), "fc", four),
        (layers, "2", r"0, 1\."),
    ):
        with pytest.raises(ValueError, match=rf"gc\.boundary='{boundary}'.*There are: {known}"):
            check_run(GradientCentralization(boundary=boundary).local_gc, model)
