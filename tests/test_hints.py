"""What was meant by a word that Hydra does not know, from the command line and from Python."""

import re
import sys

import pytest
from conftest import composer
from hydra.errors import HydraException

import gcfed
from gcfed.commands import ordered
from gcfed.utils import instantiate, resolvers
from gcfed.utils.compose import composed, explained, meant


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rond=3"], "rond: there is no such key: did you mean rounds?"),
        (["algoritm=fedprox"], "algoritm: there is no such key: did you mean algorithm?"),
        (["client.lr=0.1"], "client.lr: there is no such key: did you mean client.optimizer.lr?"),
        (["lr=0.1"], "lr: there is no such key: did you mean client.optimizer.lr or server.lr?"),
        (
            ["algorithm=fedprox", "methods.x.mu=1"],
            "methods.x.mu: there is no such key: did you mean methods.proximal.mu?",
        ),
        (
            ["data=own", "data.dataset._target_=mydata.load", "data.dataset.quux=5"],
            "data.dataset.quux: there is no such key. +data.dataset.quux=… passes it to what data.dataset builds.",
        ),
        (
            ["algorithm=scaffold", "gc.lam=0.5"],
            "gc.lam: the chosen gc has no such key; it is one of configs/gc/base.yaml.",
        ),
        (["methods.prox.mu=1"], "methods.prox.mu: there is no such key."),
        (
            ["gc=gcfd"],
            "gc=gcfd: there is no such option: did you mean gcfed? There are gcfed, global, local, none, warmup.",
        ),
        (
            ["logger=[tensorboard,csvv]"],
            "logger=csvv: there is no such option: did you mean csv? There are csv, many, mlflow, none, tensorboard, "
            "wandb.",
        ),
    ],
)  # fmt: skip
def test_a_wrong_word_is_answered_with_what_was_meant(words, sentence):
    with pytest.raises(ValueError) as said:  # noqa: PT011  (the whole sentence is compared)
        gcfed.configure(words)
    assert str(said.value) == sentence


@pytest.mark.parametrize("word", ["rounds", "seed=1,2,3", "name=it's"])
def test_hydras_own_messages_come_through_in_one_line_with_the_word(word):
    with pytest.raises(ValueError, match=rf"^[^\n]*{word}[^\n]*$") as said:
        composer([word])
    assert "http" not in str(said.value)


def test_the_other_commands_know_their_own_keys():
    path = resolvers.CONFIGS / "eval.yaml"
    with pytest.raises(HydraException) as said:
        composed(["ckptpath=3"], path)
    assert explained(said.value, ["ckptpath=3"], path) == "ckptpath: there is no such key: did you mean ckpt_path?"


def test_the_same_word_elsewhere_comes_before_a_similar_word():
    known = ["client.lr_decay", "server.lr", "client.optimizer.lr"]
    assert meant("client.lr", known) == ": did you mean client.optimizer.lr?"
    assert meant("clients.steps", ["client.step", "x"]) == ": did you mean client.step?"
    assert meant("quite.other", ["client.step"]) == "."
    assert meant("step", ["step", "steps"]) == ": did you mean steps?"  # not what was typed


def test_overrides_may_stand_on_both_sides_of_a_flag():
    words = ["gc=none", "-m", "seed=1,2", "--cfg", "job", "~logger", "+x=1", "--config-dir=here"]
    assert ordered(words) == ["gc=none", "seed=1,2", "~logger", "+x=1", "-m", "--cfg", "job", "--config-dir=here"]


@pytest.mark.parametrize(
    ("installed", "name", "command", "advice"),
    [
        (False, "src/train.py", "python src/train.py", ".venv/bin/uv pip install -e '.[wandb]'"),
        (False, ".venv/bin/gcfed-train", "gcfed-train", ".venv/bin/uv pip install -e '.[wandb]'"),
        (True, "-c", "gcfed-train", "pip install 'gcfed[wandb]'"),
    ],
)
def test_messages_name_the_commands_that_there_are(monkeypatch, installed, name, command, advice):
    monkeypatch.setattr(resolvers, "INSTALLED", installed)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(instantiate, "find_spec", lambda package: None)
    assert resolvers.command("train") == command
    with pytest.raises(ValueError, match=f"^{re.escape(f'logger=wandb needs a package: {advice}')}$"):
        instantiate.installed("wandb", "logger=wandb")
