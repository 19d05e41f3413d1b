"""The probe before the first round finds special features of a network."""

import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import calls_of, refuses
from harness import stack_of
from safetensors.torch import save
from torch import nn

from gcfed.federated.network.lent_network import LentNetwork, Traits
from gcfed.federated.network.probing import closeness, stackable
from gcfed.federated.network.probing.probe import probe
from gcfed.models.unchanged import unchanged
from gcfed.tasks import CLASSIFICATION

X = torch.randn(8, 6)
Y = torch.arange(8) % 3


class Net(nn.Module):
    """Two layers.

    Each test gives it a ``step`` for the forward pass, which may return a term for the logits.
    """

    def __init__(self, step=lambda net, x: None, **parts):
        super().__init__()
        self.hidden = nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)
        self.step = [step]
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x):
        term = self.step[0](self, x)
        logits = self.head(self.hidden(x).tanh())
        return logits if term is None else logits + term


def traits(net, x=X):
    return probe(net, x, Y, CLASSIFICATION)


def frozen():
    return nn.Linear(6, 4).requires_grad_(False)


def follow(net, x):
    for t, s in zip(net.teacher.parameters(), net.hidden.parameters(), strict=True):
        t.data = 0.9 * t.data + 0.1 * s.data


def normalise(net, x):
    net.u.copy_(F.normalize(net.u + x.detach().mean(0), dim=0))


def in_place(net, x):
    x.sub_(0.5)


def assign(net, x):
    net.mean = 0.9 * net.mean + 0.1


def aliased(alias):
    net = Net(lambda net, x: x[:, :4] @ net.other)
    net.other = alias(net.head.weight)  # [3, 4]
    return net


@pytest.mark.parametrize(
    ("net", "expected"),
    [
        (Net(), Traits()),
        (Net(in_place), Traits(edits_input=True)),
        (Net(assign, mean=torch.zeros(3), mask=torch.full((4,), -torch.inf)), Traits(assigns=True)),
        (
            Net(follow, teacher=frozen()),
            Traits(averaged=("teacher.bias", "teacher.weight"), assigns=True, why_alone=r"vmap"),
        ),
        (
            Net(lambda net, x: net.norm(x).sum() * 0, norm=nn.BatchNorm1d(6, momentum=None)),
            Traits(averaged=("norm.num_batches_tracked",), why_alone="batch normalisation"),
        ),
        (
            Net(
                lambda net, x: torch.where(net.mask, x[:, :3], 0.0),
                mask=torch.tensor([True, False, True]),
            ),
            Traits(),
        ),
        (
            Net(lambda net, x: net.seen.fill_(True) * 0, seen=torch.tensor([False])),
            Traits(averaged=("seen",)),
        ),
        (Net(lambda net, x: x.mean()), Traits(why_alone="samples influence each other")),
        (Net(lambda net, x: x[:, :3] / len(x)), Traits(why_alone="samples influence each other")),
        (
            nn.Sequential(nn.Linear(6, 3), nn.Softmax(0)),
            Traits(why_alone="samples influence each other"),
        ),
        (nn.Sequential(nn.Linear(6, 3), nn.RReLU()), Traits(why_alone="torch.func.vmap")),
        (Net(lambda net, x: random.random()), Traits(why_alone="NumPy or Python")),
        (Net(lambda net, x: torch.rand(3)), Traits(why_alone="torch.func.vmap")),
        (Net(lambda net, x: F.dropout(x[:, :3], training=net.training)), Traits()),
    ],
)
def test_the_probe_finds_a_networks_features(net, expected):
    found = traits(net)
    assert found.averaged == expected.averaged
    assert found.edits_input == expected.edits_input
    assert found.assigns == expected.assigns
    assert bool(found.why_alone) == bool(expected.why_alone)
    assert re.search(expected.why_alone, found.why_alone)
    assert found.why_alone.count("client.stack=1") == bool(expected.why_alone)


@pytest.mark.parametrize(
    ("net", "mixes"),
    [
        (Net(), False),
        (Net(lambda net, x: torch.rand(3)), False),
        (Net(lambda net, x: x.mean()), True),
        (Net(lambda net, x: net.norm(x).sum() * 0, norm=nn.BatchNorm1d(6)), True),
        (Net(lambda net, x: net.norm(x[:, None]).sum() * 0, norm=nn.InstanceNorm1d(1)), False),
    ],
)
def test_the_probe_finds_whether_samples_of_a_batch_mix(net, mixes):
    assert traits(net).mixes_samples == mixes


def test_samples_that_mix_are_found_also_if_there_is_another_reason_to_train_alone():
    """Weights in a tuple cannot be replaced, so clients train one at a time in any case."""
    net = Net(lambda net, x: (x - x.mean(0))[:, :4] @ net.weights[0].T)
    net.weights = (net.head.weight,)
    found = traits(net)
    assert "other than through its modules" in found.why_alone
    assert found.mixes_samples


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (
            Net(normalise, u=F.normalize(torch.ones(6), dim=0)),
            r"Net changes u, which has unit norm.*persistent=False",
        ),
        (
            Net(
                lambda net, x: net.top.copy_(torch.maximum(net.top, x.detach().max())) * 0,
                top=torch.tensor(-np.inf),
            ),
            "Net changes top, which begins at ±∞",
        ),
        (
            Net(lambda net, x: setattr(net.head.weight, "data", net.head.weight.data.clamp(-1, 1))),
            (
                r"forward gives the trained parameter head.weight other"
                r" memory.*self.head.weight.data.copy_"
            ),
        ),
        (
            Net(lambda net, x: net.register_buffer("first", x.detach().mean(0))),
            "Net makes the buffer first in forward: register its value in __init__",
        ),
        *[
            (
                aliased(alias),
                "Net keeps a weight's memory in another tensor.*use self.a.weight in forward",
            )
            for alias in (lambda w: w.t(), lambda w: w.data.t(), lambda w: nn.Parameter(w.data.t()))
        ],
        (
            Net(lambda net, x: x.sum() * np.nan),
            "Net fails .*: its loss is not a number before anything is trained",
        ),
        (Net(lambda net, x: x @ torch.ones(5)), "Net fails on 8 samples in training mode: .*size"),
    ],
)
def test_networks_that_cannot_be_trained_correctly_are_refused_by_name(net, message):
    with refuses(message):
        traits(net)


class ReadOnly(dict):
    """A dict that refuses changes, as the outputs of transformers do."""

    def update(self, *_):
        raise TypeError("read only")

    clear = update


def test_a_network_may_keep_a_dict_that_refuses_changes():
    net = nn.Linear(4, 3)
    net.last = ReadOnly(a=1)
    net.seen = {"a": 1}
    with unchanged(net):
        net.last = None
        net.seen["b"] = 2
    assert net.last == {"a": 1}
    assert net.seen == {"a": 1}


def test_the_probe_warns_of_untrained_weights_and_of_buffers_that_tests_change(caplog):
    spare = nn.Parameter(torch.zeros(3))
    traits(Net(lambda net, x: spare))
    assert "Net has 1 weights that are no parameters of it" in caplog.text
    traits(Net(assign, mean=torch.zeros(3)))
    assert "Net changes mean in evaluation mode" in caplog.text


class InTest(Net):
    """Its ``step`` acts in evaluation mode only."""

    def forward(self, x):
        return super().forward(x) if not self.training else self.head(self.hidden(x).tanh())


def known(*layers):
    return nn.Sequential(nn.Linear(6, 4), *layers, nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: InTest(lambda net, x: F.dropout(x[:, :3], 0.5)), "draws random numbers"),
        (lambda: InTest(lambda net, x: x.mean()), "mixes the samples"),
        (lambda: known(nn.BatchNorm1d(4, track_running_stats=False)), "mixes the samples"),
        (lambda: Net(lambda net, x: F.dropout(x[:, :3], 0.5, net.training)), ""),
        (lambda: Net(lambda net, x: x.mean() if net.training else None), ""),
        (lambda: known(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.LayerNorm(4)), ""),
    ],
)
def test_the_probe_warns_of_tests_that_depend_on_batches_or_draws(caplog, make, what):
    traits(make())
    warned = [text for text in caplog.messages if "evaluation mode" in text]
    assert [what in text for text in warned] == [True] * bool(what)


def test_a_change_that_occurs_only_in_some_steps_stops_the_run():
    class Late(Net):
        late = 2

        def forward(self, x):
            self.late -= self.training
            if self.late == 0:
                self.step[0](self, x)
            return self.head(self.hidden(x).tanh())

    def train(net, steps=3):
        stack = stack_of(net, lent_network=LentNetwork(net))
        try:
            for _ in range(steps):
                stack(X.unsqueeze(0).clone())
            stack.settle()
        finally:
            stack.lent_network.take_back()

    with refuses("forward changes its input in some steps only"):
        train(Late(in_place))
    with refuses(r"forward changes requires_grad of hidden.weight: set it in __init__"):
        train(Late(lambda net, x: net.hidden.weight.requires_grad_(False)))
    net = Late(follow, teacher=frozen())
    with refuses(r"forward changes teacher.weight in some steps only"):
        train(net)


def test_a_teacher_that_would_read_the_students_weights_is_refused():
    net = Net()
    net.step = [lambda _, x, w=net.hidden.weight: w.sum()]
    stack = stack_of(net, lent_network=LentNetwork(net, traits(net)))
    with refuses("needs a teacher, and Net has weights that forward reaches other than"):
        stack.reference(X.unsqueeze(0))
    stack.lent_network.take_back()


@pytest.mark.parametrize(("stack", "tried"), [("auto", False), (1, False), (2, True)])
def test_a_stack_is_tried_out_only_where_clients_may_train_in_one(stack, tried, monkeypatch):
    calls = calls_of(monkeypatch, stackable, "vmap")
    net = Net()
    x = torch.randn(4, 6)
    probe(net, x, Y[:4], CLASSIFICATION, stack)
    assert bool(calls) == tried


def test_tensors_are_compared_in_pieces(monkeypatch):
    """In the memory's order, and wherever they differ."""
    monkeypatch.setattr(closeness, "PIECE", 7)
    image = torch.rand(2, 5, 3, 4).movedim(1, -1) + 1
    for other in (image.clone(), image.contiguous()):
        assert closeness.is_close(image, other)
        for place in np.ndindex(image.shape):
            changed = other.clone()
            changed[place] += 0.01
            assert not closeness.is_close(image, changed)


@pytest.mark.parametrize("limit", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_numbers_beside_one_that_is_not_finite_are_compared(limit, dtype):
    expected = torch.tensor([[1.0, -2.0], [limit, 3.0]]).to(dtype)
    assert closeness.is_close(expected.clone(), expected)
    for place in np.ndindex(expected.shape):
        changed = expected.clone()
        changed[place] = 3.5
        assert not closeness.is_close(changed, expected)
        assert not closeness.is_close(expected, changed)
        assert not closeness.are_close([changed, changed], [expected, expected])


def test_a_sample_that_is_not_a_number_stops_no_probe():
    """Its row of outputs and all gradients are no numbers. The other rows are compared."""
    x = X.clone()
    x[-1] = torch.nan
    assert traits(Net(), x) == traits(Net())
    meeting = Net(lambda net, x: x[:5].mean(0)[:3])
    assert "influence each other" in traits(meeting, x).why_alone


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_constant_that_the_exported_file_cannot_hold_is_refused(dtype):
    """Else a run would fail after its last round. A parameter is as a buffer."""
    constant = torch.ones(3, dtype=dtype)
    nets = [Net(phase=constant), Net(phase=nn.Parameter(constant, requires_grad=False))]
    for net in nets:
        if dtype == torch.complex64:
            traits(net)
            save(net.state_dict())
        else:
            with refuses(r"Net has phase of the type torch\.complex128.*complex64"):
                traits(net)
