"""What a broken network or loss prints: the last line names the model, the task or a key.

The user's own traceback stays.
"""

import copy
import re
import traceback
from inspect import isclass, isfunction

import pytest
import users_broken
from omegaconf import open_dict
from torch import nn

from gcfed.run import train
from gcfed.tasks import Task

pytestmark = pytest.mark.filterwarnings("ignore")
NETWORKS = [
    name
    for name, thing in vars(users_broken).items()
    if getattr(thing, "__module__", "") == users_broken.__name__
    and (name == "late_function" or (isclass(thing) and issubclass(thing, nn.Module)))
]
LOSSES = [
    name
    for name, thing in vars(users_broken).items()
    if isclass(thing) and issubclass(thing, Task) and thing.__module__ == users_broken.__name__
]
SETTING = (
    "data=own",
    "data.dataset._target_=users_networks.load",
    "data.standardize=false",
    "+data.dataset.clients=3",
    "partition=natural",
    "participation.num_clients=null",
    "participation.per_round=3",
    "model=own",
    "algorithm=fedavg",
    "gc=none",
    "rounds=3",
    "client.steps=2",
    "logger=none",
)
COMPOSED = {}  # the config, once


def composed(config, **targets):
    if not COMPOSED:
        COMPOSED[""] = config("model._target_=users_networks.Small", *SETTING)
    cfg = copy.deepcopy(COMPOSED[""])
    with open_dict(cfg):
        cfg.callbacks = {"arm": {"_target_": "users_broken.Arm"}}
        for group, name in targets.items():
            cfg[group]._target_ = f"users_broken.{name}"
    return cfg


def failure(cfg):
    """What Python prints of the error of a run."""
    users_broken.LATE["fails"] = False
    try:
        train(cfg)
    except Exception as error:
        return "".join(traceback.format_exception(error))
    return ""


def last_line(text):
    return text.rstrip("\n").rpartition("\n")[2]


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_last_line_of_an_error_names_the_network(config, tmp_path, name, stack):
    cfg = composed(config, model=name)
    cfg.paths.output_dir, cfg.client.stack = str(tmp_path / "run"), stack
    text = failure(cfg)
    print(text)
    shown = "Sequential" if isfunction(getattr(users_broken, name)) else name
    assert re.search(rf"\bmodel\b.*\b{shown}\b", last_line(text))


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_the_last_line_of_an_error_names_the_loss(config, tmp_path, name, stack):
    cfg = composed(config, task=name)
    cfg.paths.output_dir, cfg.client.stack = str(tmp_path / "run"), stack
    text = failure(cfg)
    print(text)
    assert re.search(rf"\btask\b.*\b{name}\b", last_line(text))
