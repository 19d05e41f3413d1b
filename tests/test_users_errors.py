"""What a broken network or loss prints: the last line names the model, the task or a key.

The user's own traceback stays.
"""

import re
import traceback
from inspect import isclass, isfunction

import pytest
import users_broken
from conftest import type_command
from omegaconf import open_dict
from torch import nn
from users_plain import SETTING

from gcfed.run import train
from gcfed.tasks import Task

pytestmark = pytest.mark.filterwarnings("ignore")
NO_CASES = ("Changes", "Positions", "Tokens")
NETWORKS = [
    name
    for name, thing in vars(users_broken).items()
    if getattr(thing, "__module__", "") == users_broken.__name__
    and name not in NO_CASES
    and (name == "late_function" or (isclass(thing) and issubclass(thing, nn.Module)))
]
LOSSES = [
    name
    for name, thing in vars(users_broken).items()
    if isclass(thing) and issubclass(thing, Task) and thing.__module__ == users_broken.__name__
]
OF_ERRORS = (
    *SETTING,
    "+data.dataset.clients=3",
    "participation.per_round=3",
    "algorithm=fedavg",
    "gc=none",
    "rounds=3",
    "client.steps=2",
)


def composed(config, folder, **targets):
    cfg = config("model._target_=users_networks.Small", *OF_ERRORS, folder=folder)
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
    cfg = composed(config, tmp_path / "run", model=name)
    cfg.client.stack = stack
    text = failure(cfg)
    shown = "Sequential" if isfunction(getattr(users_broken, name)) else name
    assert re.search(rf"\bmodel\b.*\b{shown}\b", last_line(text))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Positions", "a text has 6 tokens from 0 to .*its positions"),
        ("Tokens", "a text has 6 tokens from 0 to .*its tokens"),
    ],
)
def test_texts_that_do_not_fit_a_network_are_named(config, tmp_path, name, words):
    cfg = composed(config, tmp_path / "run", model=name)
    with open_dict(cfg):
        cfg.data.dataset._target_ = "users_more.load"
        cfg.data.dataset.kind = "sequences"
    assert re.search(rf"Refusal: model: {name} .*{words}", last_line(failure(cfg)))


def test_the_last_line_on_the_screen_names_the_network(tmp_path, monkeypatch):
    """In one process and in two, whose errors are texts."""
    monkeypatch.setitem(users_broken.LATE, "fails", False)  # other tests may have set it
    for devices in (1, 2):
        words = ["+callbacks.arm._target_=users_broken.Arm"]
        words += ["model._target_=users_broken.LateError", f"trainer.devices={devices}"]
        words += [f"paths.output_dir={tmp_path}/{devices}", f"hydra.run.dir={tmp_path}/{devices}"]
        printed = type_command(tmp_path, "train.py", *OF_ERRORS, *words, code=1)
        assert printed.rstrip("\n").splitlines()[-1] == "model: LateError fails in round 2."


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_the_last_line_of_an_error_names_the_loss(config, tmp_path, name, stack):
    cfg = composed(config, tmp_path / "run", task=name)
    cfg.client.stack = stack
    text = failure(cfg)
    assert re.search(rf"\btask\b.*\b{name}\b", last_line(text))
