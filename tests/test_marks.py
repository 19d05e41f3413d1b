"""``assemble`` leaves no mark in a network: all that it refers to equals a freshly built one's.

Trial passes before the first round find out how the engine must treat a network. The walk below
shares no code with the restore.
"""

import random
from types import CellType, FunctionType, MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
import users_states
from test_users_networks import EQUAL, NETWORKS
from torch import nn
from users_plain import composed, fresh

from gcfed.assemble import assemble
from gcfed.federated.network.probing.probe import probe
from gcfed.models.forward_watch import forward_order
from gcfed.models.own import fitted
from gcfed.models.unchanged import hand_copies
from gcfed.tasks import CLASSIFICATION

pytestmark = pytest.mark.filterwarnings("ignore")
STATES = [
    name
    for name, thing in vars(users_states).items()
    if isinstance(thing, type) and thing.__module__ == "users_states"
]
TRAINED = [name for name, results in NETWORKS.items() if EQUAL in results]
REFUSED = {"LayerOfForward", "TiedInForward"}


def describe(thing, seen=None, place="net"):
    """Yields (place, value) for all that a network refers to."""
    seen = {} if seen is None else seen
    if isinstance(thing, bool | int | float | complex | str | bytes | type(None)):
        yield place, repr(thing)
        return
    if id(thing) in seen:
        yield place, f"as {seen[id(thing)]}"
        return
    seen[id(thing)] = place
    inside = {}
    if isinstance(thing, torch.Tensor):
        yield place, (thing.dtype, thing.requires_grad, thing.grad is None, thing.detach().tolist())
        inside = dict(vars(thing))
        if thing.is_leaf:
            inside["hooks"] = list((thing._backward_hooks or {}).values())
    elif isinstance(thing, np.ndarray):
        yield place, thing.tolist()
    elif isinstance(thing, torch.Generator):
        yield place, thing.get_state().tolist()
    elif isinstance(thing, np.random.Generator):
        yield place, repr(thing.bit_generator.state)
    elif isinstance(thing, random.Random):
        yield place, thing.getstate()
    elif isinstance(thing, dict):
        values = [value for value in thing.values() if value is not hand_copies]
        yield place, len(values)
        hooks = bool(thing) and all(isinstance(key, int) for key in thing)  # counted by torch
        inside = dict(enumerate(values)) if hooks else dict(thing)
    elif isinstance(thing, list | tuple | set):
        yield place, len(thing)
        inside = dict(enumerate(thing))
    elif isinstance(thing, FunctionType):
        yield place, thing.__qualname__
        inside = dict(enumerate(thing.__closure__ or ()))
    elif isinstance(thing, MethodType):
        inside = {"self": thing.__self__, "function": thing.__func__}
    elif isinstance(thing, CellType):
        inside = {"content": thing.cell_contents}
    elif hasattr(thing, "func"):  # functools.partial
        inside = {"func": thing.func, "args": thing.args}
    elif isinstance(thing, nn.Module | SimpleNamespace):
        inside = dict(vars(thing))
        own = type(thing)
        if own.__module__.startswith("users_"):
            inside |= {f"class.{k}": v for k, v in vars(own).items() if not k.startswith("__")}
    else:
        yield place, type(thing).__qualname__
    for key, value in inside.items():
        yield from describe(value, seen, f"{place}.{key}")


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("name", [*TRAINED, *STATES])
def test_assembling_a_run_changes_nothing_in_a_network(config, tmp_path, name, clients):
    if name in REFUSED or (clients == 3 and name in TRAINED and NETWORKS[name][1] is None):
        return
    words = (
        "gc=gcfed",
        "gc.boundary=head",
        f"precision={32 if name == 'DoubleInside' else 64}-true",
        "channels_last=false",
    )
    cfg = composed(config, tmp_path, name, *words, clients=clients)
    expected = dict(describe(fresh(name).train()))
    found = dict(describe(assemble(cfg).module.net.train()))
    places = expected.keys() | found.keys()
    differ = sorted(key for key in places if expected.get(key) != found.get(key))
    assert not differ


class Remembers(nn.Module):
    """Changes all that it can in a forward pass: attributes, buffers, generators and its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6).eval()
        self.calls = 0
        self.plain = torch.ones(6)
        self.own = torch.Generator().manual_seed(3)
        self.register_buffer("assigned", torch.zeros(6))
        self.register_buffer("moved", torch.zeros(6))
        self.register_buffer("expanded", torch.zeros(1).expand(6))

    def forward(self, x):
        self.calls += 1
        self.first = getattr(self, "first", x.mean())
        self.assigned = 0.9 * self.assigned + x.mean(0)
        self.moved.add_(x.mean(0))
        self.plain.add_(1)
        noise = torch.rand(6) + torch.rand(6, generator=self.own)
        return self.layer(self.norm(x.mul_(2) + noise))


def probed(net, x):
    return probe(net, x, torch.arange(8) % 3, CLASSIFICATION)


def fits(net, x):
    assert fitted(net, (6,), 3) is net


@pytest.mark.parametrize("look", [forward_order, probed, fits])
def test_a_trial_pass_changes_neither_values_nor_memory_nor_modes(look):
    net = Remembers()
    x = torch.randn(8, 6)
    before = dict(describe(net))
    buffers = {name: (buffer, buffer.data_ptr()) for name, buffer in net.named_buffers()}
    sample = x.clone()
    seed = torch.get_rng_state()
    look(net, x)
    assert dict(describe(net)) == before
    assert torch.equal(x, sample)
    assert torch.equal(torch.get_rng_state(), seed)
    for name, buffer in net.named_buffers():
        assert buffer is buffers[name][0]
        assert buffer.data_ptr() == buffers[name][1]
