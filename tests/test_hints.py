"""What was meant by a word that Hydra does not know, from the command line and from Python."""

import re
import sys
from functools import partial

import pytest
from conftest import composer
from hydra.errors import ConfigCompositionException

import gcfed
from gcfed.commands import ordered
from gcfed.utils import instantiate, resolvers
from gcfed.utils.compose import Composer, composed, explained, meant


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rond=3"], "rond=3 sets nothing: did you mean rounds?"),
        (["algoritm=fedprox"], "algoritm=fedprox sets nothing: did you mean algorithm?"),
        (["client.lr=0.1"], "client.lr=0.1 sets nothing: did you mean client.optimizer.lr?"),
        (["lr=0.1"], "lr=0.1 sets nothing: did you mean client.optimizer.lr or server.lr?"),
        (["algorithm=fedprox", "methods.x.mu=1"], "methods.x.mu=1 sets nothing: did you mean methods.proximal.mu?"),
        (["client.epoch=3"], "client.epoch=3 sets nothing: did you mean client.epochs?"),
        (
            ["data=own", "data.dataset._target_=mydata.load", "data.dataset.samples=5"],
            "data.dataset.samples=5 sets nothing: +data.dataset.samples=5 gives it to what data.dataset builds.",
        ),
        (["data=csv", "partition.by=job"], "partition.by=job sets nothing: it is a setting of partition=natural."),
        (["partition.min_siz=2"], "partition.min_siz=2 sets nothing: did you mean partition.min_size?"),
        (["methods.prox.mu=1"], "methods.prox.mu=1 sets nothing: there is no key methods.prox.mu."),
        (["seed=1,2,3"], "seed=1,2,3 is a sweep: add -m; a list is 'seed=[1,2,3]'."),
        (["rounds=range(1,3)"], "rounds=range(1,3) is a sweep: add -m."),
        (["seed=2", "rounds", "5"], "rounds is no setting: write rounds=<value>, one word without spaces."),
        (["rounds=", "5"], "5 is no setting: write <key>=<value>, one word without spaces."),
        (["a/b"], "a/b is no setting: write ckpt_path=a/b, one word without spaces."),
        (["x.ckpt"], "x.ckpt is no setting: write ckpt_path=x.ckpt, one word without spaces."),
        (["gc=zzz"], "gc=zzz is unknown. There are gcfed, global, local, none, warmup."),
        (
            ["logger=[tensorboard,csvv]"],
            "logger=csvv is unknown: did you mean csv? There are csv, many, mlflow, none, tensorboard, wandb.",
        ),
        (["gc=gcfd"], "gc=gcfd is unknown: did you mean gcfed? There are gcfed, global, local, none, warmup."),
    ],
)  # fmt: skip
def test_a_wrong_word_is_answered_with_what_was_meant(words, sentence):
    with pytest.raises(ValueError) as said:  # noqa: PT011  (the whole sentence is compared)
        composer(words)
    assert str(said.value) == sentence


@pytest.mark.parametrize(
    ("name", "word", "sentence"),
    [
        ("eval", "ckptpath=3", "ckptpath=3 sets nothing: did you mean ckpt_path?"),
        ("report", "logs/", "logs/ is no setting: write roots=logs/, one word without spaces."),
    ],
)
def test_the_other_commands_know_their_own_keys(name, word, sentence):
    with pytest.raises(ValueError) as said:  # noqa: PT011  (the whole sentence is compared)
        Composer(partial(composed, resolvers.CONFIGS / f"{name}.yaml"))([word])
    assert str(said.value) == sentence


def test_hydras_other_sentences_come_through_as_one():
    with pytest.raises(ValueError, match=r"^[^\n]*name=it's[^\n]*$") as said:  # without the address of Hydra's page
        composer(["name=it's"])
    assert "http" not in str(said.value)
    error = ConfigCompositionException("Could not append.\n  An item\nis there.")
    assert explained(error, [], lambda _: composer([])) == "Could not append. An item is there."
    with pytest.raises(ValueError, match="did you mean rounds"):
        gcfed.configure("rond=3")


def test_the_same_word_elsewhere_comes_before_a_word_that_is_alike():
    known = ["client.lr_decay", "server.lr", "client.optimizer.lr"]
    assert meant("client.lr", known) == ": did you mean client.optimizer.lr?"
    assert meant("clients.steps", ["client.step", "x"]) == ": did you mean client.step?"
    assert meant("quite.other", ["client.step"]) == ""
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
def test_sentences_name_the_commands_that_there_are(monkeypatch, installed, name, command, advice):
    monkeypatch.setattr(resolvers, "INSTALLED", installed)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(instantiate, "find_spec", lambda package: None)
    assert resolvers.command("train") == command
    with pytest.raises(ValueError, match=f"^{re.escape(f'logger=wandb needs a package: {advice}')}$"):
        instantiate.installed("wandb", "logger=wandb")
