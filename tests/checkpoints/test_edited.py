"""A checkpoint that somebody has edited ends a run with one line that names it, or does no harm."""

import copy
import pickle
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import config_of, contents
from safetensors.torch import save_file

from gcfed.folders.folder import CHECKPOINT
from gcfed.run import evaluate, train
from gcfed.utils.refusal import Refusal, says_all

FAST = (
    "rounds=2",
    "participation.num_clients=6",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=40",
    "model.hidden=[8]",
    "algorithm=fedavgm",
    "callbacks=best",
    "extras.figures=false",
)
# A setting of another run, and a part of the sentence about its checkpoint.
OTHER = {
    "algorithm=scaffold": "belongs to another run: ",
    "model.hidden=[9]": "holds another model than MLP: .*model=…",
    "model=fedgc_cnn": "holds another model than MLP: .*model=…",
    "seed=2": "belongs to another run: seed is 2 there, 1 here",
}
CALLED: list[str] = []


class Evil:
    def __reduce__(self):
        return (CALLED.append, ("called",))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The checkpoint of a finished run."""
    folder = tmp_path_factory.mktemp("edited") / "run"
    train(config_of(*FAST, folder=folder))
    return folder / CHECKPOINT


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the run. The test edits its checkpoint."""
    shutil.copytree(finished.parent.parent, tmp_path / "run")
    return tmp_path / "run" / CHECKPOINT


def outcome(config, path: Path, *words: str) -> Exception | None:
    """The error of a resumed run, or None."""
    CALLED.clear()
    try:
        train(config(*FAST, "rounds=3", *words, f"ckpt_path={path}", folder=path.parent.parent))
    except Exception as error:
        return error
    finally:
        assert CALLED == []
    return None


def refuse_in_one_line(error: Exception | None, path: Path) -> None:
    assert isinstance(error, Refusal)
    assert str(path) in str(error)
    assert "\n" not in str(error)
    assert says_all(error)


def edit(path: Path, change) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


BYTES = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "without its end": lambda content: content[:-20],
    "a flipped bit in the middle": lambda content: (
        content[: len(content) // 2]
        + bytes([content[len(content) // 2] ^ 1])
        + content[len(content) // 2 + 1 :]
    ),
    "text": lambda content: b"no checkpoint\n" * 100,
    "a pickle that calls something": lambda content: pickle.dumps(Evil()),
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("kind", BYTES)
def test_other_bytes_are_refused(config, copied, kind):
    copied.write_bytes(BYTES[kind](copied.read_bytes()))
    refuse_in_one_line(outcome(config, copied), copied)
    with pytest.raises(Refusal) as refused:
        evaluate(config(*FAST, f"ckpt_path={copied}"))
    refuse_in_one_line(refused.value, copied)


def _first_weight(content):
    return next(name for name in content["state_dict"] if name.endswith("weight"))


def _without(*keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def _with(value, *keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def _other_shape(content):
    content["state_dict"][_first_weight(content)] = torch.zeros(3)


def _momentum(value):
    def change(content):
        for state in content["optimizer_states"][0]["state"].values():
            state["momentum_buffer"] = value

    return change


EDITS = {
    "an object in it": lambda content: content.update(evil=Evil()),
    "no weights": _without("state_dict"),
    "no record": _without("gcfed"),
    "no identity": _without("gcfed", "identity"),
    "no loops": _without("loops"),
    "no callbacks": _without("callbacks"),
    "no optimizer": _with([], "optimizer_states"),
    "weights that are a list": _with([1, 2], "state_dict"),
    "a weight that is a text": lambda content: content["state_dict"].update(
        {_first_weight(content): "text"}
    ),
    "a weight less": lambda content: content["state_dict"].pop(_first_weight(content)),
    "a weight of another shape": _other_shape,
    "a round that is a text": _with("two", "global_step"),
    "another round": _with(1, "global_step"),
    "no round": _with(0, "global_step"),
    "momentum of another shape": _momentum(torch.zeros(2, 2)),
    "momentum that is a text": _momentum("text"),
    "loops that are a list": _with([], "loops"),
    "a record that is a text": _with("text", "gcfed"),
    "checksums that are a list": _with([], "gcfed", "checksums"),
    "processes that are a text": _with("two", "gcfed", "processes"),
    "processes from a text on": _with({"one": 2}, "gcfed", "processes"),
    "no process": _with({1: 0}, "gcfed", "processes"),
    "half a process": _with({1: 0.5}, "gcfed", "processes"),
    "processes before the first round": _with({0: 1}, "gcfed", "processes"),
    "processes of a later round": _with({1: 1, 3: 2}, "gcfed", "processes"),
    "versions that are a text": _with("two", "gcfed", "versions"),
    "a version from a text on": _with({"one": "0.2.0"}, "gcfed", "versions"),
    "a version that is a number": _with({1: 2}, "gcfed", "versions"),
    "a version of two lines": _with({1: "0.2.0\n"}, "gcfed", "versions"),
    "a version of a later round": _with({1: "0.2.0", 3: "0.3.0"}, "gcfed", "versions"),
    "callbacks that are numbers": lambda content: content.update(
        callbacks=dict.fromkeys(content["callbacks"], 3)
    ),
}


@pytest.mark.parametrize("kind", EDITS)
def test_other_contents_are_refused(config, copied, kind):
    edit(copied, EDITS[kind])
    refuse_in_one_line(outcome(config, copied), copied)


@pytest.mark.parametrize("word", OTHER)
def test_the_checkpoint_of_another_run_is_refused(config, copied, tmp_path, word):
    train(config(*FAST, word, folder=tmp_path / "other"))
    shutil.copy(tmp_path / "other" / CHECKPOINT, copied)
    before = contents(tmp_path)
    error = outcome(config, copied)
    refuse_in_one_line(error, copied)
    assert re.search(OTHER[word], str(error))
    assert contents(tmp_path) == before


def test_an_exported_model_is_no_checkpoint(config, copied):
    save_file({"net.fc1.weight": torch.zeros(2)}, copied)
    refuse_in_one_line(outcome(config, copied), copied)


def leaves(node, way=()):
    """The ways to all values of a tree of dicts and lists."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        yield (*way, key)
        if isinstance(value, dict | list):
            yield from leaves(value, (*way, key))


@pytest.mark.parametrize("seed", range(40))
def test_any_value_of_any_other_type_is_refused_or_harmless(config, copied, seed):
    """Two random changes each, anywhere in the file."""
    rng = random.Random(seed)

    def change(content):
        for _ in range(2):
            *way, last = rng.choice(list(leaves(content)))
            node = content
            for key in way:
                node = node[key]
            others = (None, "text", -1, 1.5, [], {}, torch.zeros(2, 3), True)
            if rng.random() < 0.3 and isinstance(node, dict):
                del node[last]
            else:
                node[last] = copy.deepcopy(rng.choice(others))

    edit(copied, change)
    error = outcome(config, copied)
    if error is not None:
        refuse_in_one_line(error, copied)
