"""More networks and losses: each trains as ten lines of plain PyTorch do, or is refused with a
reason.

Each trains for two rounds of three steps in float64: one client, three clients one after the other,
and three in a stack, whose batches of 5, 8 and 11 samples have padding.
"""

import re
from inspect import isclass

import numpy as np
import pytest
import torch
import users_more
from omegaconf import open_dict
from torch import nn
from users_networks import Small
from users_plain import PLAIN, SETTING, fresh, plain

from gcfed.run import train
from gcfed.tasks import Classification, SquaredError, Task

pytestmark = pytest.mark.filterwarnings("ignore")
OF_MORE = (
    *SETTING,
    "data.dataset._target_=users_more.load",
    "+data.dataset.clients=3",
    "+data.dataset.kind=classes",
    "participation.per_round=3",
    "algorithm=fedavg",
    *PLAIN,
)


def classes(kind):
    return [
        name
        for name, thing in vars(users_more).items()
        if isclass(thing) and issubclass(thing, kind) and thing.__module__ == users_more.__name__
    ]


def kind_of(loss):
    if issubclass(loss, SquaredError):
        return "numbers"
    return "sequences" if "Sequence" in loss.__name__ else "classes"


def ours(config, folder, net, loss, clients, stack):
    cfg = config("model._target_=users_networks.Small", *OF_MORE, folder=folder)
    with open_dict(cfg):
        cfg.client.stack = stack
        cfg.callbacks = {}
        cfg.participation.sampler.per_round = clients
        cfg.data.dataset.clients = clients
        cfg.data.dataset.kind = kind_of(loss)
        cfg.model._target_ = f"{net.__module__}.{net.__name__}"
        cfg.task._target_ = f"{loss.__module__}.{loss.__name__}"
    return train(cfg)


def typed(array):
    t = torch.from_numpy(array)
    return t.double() if t.is_floating_point() else t.long()


def outcome(config, folder, net, loss, clients, stack):
    """``right``, ``wrong`` or the reason of a refusal."""
    try:
        result = ours(config, folder, net, loss, clients, stack)
    except ValueError as error:
        return str(error)
    data = users_more.load(clients, kind_of(loss))
    x, x_test, y = (typed(data[key]) for key in ("x", "x_test", "y"))
    parts = np.split(np.arange(len(y)), np.cumsum(users_more.SIZES[clients])[:-1])
    expected = plain(lambda: fresh(net.__name__), x, y, parts, x_test, task=loss).state_dict()
    state = result.module.net.state_dict()
    assert state.keys() == expected.keys()
    worst = max(
        (state[name] - value).abs().max().item()
        for name, value in expected.items()
        if value.is_floating_point()
    )
    return "right" if worst < 1e-9 else f"wrong by {worst:.2g}"


RUNS = [(1, 1), (3, 1), (3, 3)]  # number of clients, and of clients in a stack
REFUSED = {  # with one client, too
    "EditsLabels": r"task=EditsLabels changes its labels: .*clone",
}
MEETS = "samples influence each other"
VMAP = r"torch\.func\.vmap cannot batch"
OF_A_STACK = {
    "Experts": VMAP,
    "Packed": "recurrent layers",
    "OwnFunction": VMAP,
    "MemoryBank": MEETS,
    "Mixed": MEETS,
    "NeedsInputGradient": VMAP,
    "Balanced": MEETS,
    "Mixup": MEETS,
    "Normalised": "state in its task=Normalised",
    "WarmUp": "state in its task=WarmUp",
    "Noisy": VMAP,
    "HardOnly": MEETS,
}
NETWORKS = [name for name in classes(nn.Module) if name != "OfSequence"]


@pytest.mark.parametrize(("clients", "stack"), RUNS)
@pytest.mark.parametrize("name", NETWORKS + classes(Task))
def test_it_trains_as_in_plain_pytorch_or_is_refused(
    config, tmp_path, caplog, name, clients, stack
):
    thing = getattr(users_more, name)
    net = thing
    loss = Classification
    if issubclass(thing, Task):
        net = Small
        loss = thing
    if kind_of(loss) == "sequences":
        net = users_more.OfSequence
    expected = REFUSED.get(name) or (stack > 1 and OF_A_STACK.get(name)) or "^right$"
    assert re.search(expected, outcome(config, tmp_path, net, loss, clients, stack))
    assert "no parameters" not in caplog.text  # an input may require a gradient in forward
    keeps = name in ("Normalised", "WarmUp")
    assert ("keeps something from one call to the next" in caplog.text) == keeps
