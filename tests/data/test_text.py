"""Sequences with a label at every position: loader, transform, partitions and whole runs."""

import hashlib
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import DATA_DIR, refuses
from harness import weights

from gcfed.assemble import assemble, build_module
from gcfed.data.augment import PlainTransform
from gcfed.data.sets import tiny_shakespeare as tiny
from gcfed.data.sets.text import ALPHABET, PAD, encode, sequences
from gcfed.data.sets.tiny_shakespeare import tiny_shakespeare
from gcfed.run import train
from gcfed.tasks import IGNORE


def decoded(tokens) -> str:
    return "".join((*ALPHABET, "_")[int(token)] for token in tokens)


def test_encode_is_an_index_into_the_alphabet():
    assert len(set(ALPHABET)) == len(ALPHABET) == PAD == 80
    np.testing.assert_array_equal(encode(ALPHABET), np.arange(80))
    assert decoded(encode("Aé$\t😀\x7fz")) == "A_____z"
    assert encode("").shape == (0,)


@pytest.mark.parametrize("length", [2, 3, 4, 7])
def test_every_character_but_the_first_is_a_label_once(length):
    said = "abc$efgh"[:length]
    x, y = sequences(encode(said), 3)
    assert x.dtype == np.uint8
    assert y.shape == x.shape == (-(-(len(said) - 1) // 3), 3)
    assert decoded(y[y != IGNORE]) == said[1:].replace("$", "")
    inputs = decoded(x.ravel())
    assert inputs.startswith(said[:-1].replace("$", "_"))
    for token, label, following in zip(inputs, y.ravel(), said[1:], strict=False):
        assert label == IGNORE or (following == ALPHABET[label] and token in said + "_")


@pytest.fixture
def play(tmp_path, monkeypatch):
    """A folder with a small play: speakers of 1 to 12 sequences."""
    rng = np.random.default_rng(0)
    lines = {
        name: "".join(rng.choice(list("abcde "), 80 * n))
        for n, name in ((12, "A"), (1, "B"), (5, "C"))
    }
    content = "\n\n".join(f"{name}:\n{said}" for name, said in lines.items()).encode()
    path = tmp_path / "shakespeare" / "input.txt"
    path.parent.mkdir()
    path.write_bytes(content)
    monkeypatch.setattr(tiny, "MD5", hashlib.md5(content).hexdigest())
    return tmp_path


def test_tiny_shakespeare_trains_on_the_first_nine_tenths_of_each_speaker(play):
    dataset = tiny_shakespeare(str(play), download=False)
    assert dataset.train.groups.tolist() == [0] * 10 + [1] + [2] * 4
    assert dataset.test.groups.tolist() == [0] * 2 + [2]
    assert dataset.train.x.shape == dataset.train.y.shape == (15, 80)
    assert dataset.num_classes == len(dataset.class_names) == 80


@pytest.mark.skipif(
    not (DATA_DIR / tiny.TINY).exists(),
    reason=f"{tiny.TINY} is not in {DATA_DIR} (DATA_DIR moves it)",
)
def test_the_real_text():
    dataset = tiny_shakespeare(str(DATA_DIR), download=False)
    assert len(np.unique(dataset.train.groups)) == 299
    assert len(dataset.train) == 11_565
    assert len(dataset.test) == 1_427
    assert decoded(dataset.train.x[0]).startswith(
        "Before we proceed any further, hear me speak.\nYou are all resolved"
    )


def test_tokens_and_vectors_reach_the_network_in_its_type():
    tokens = torch.tensor([[0, 255, 80]], dtype=torch.uint8)
    plain = PlainTransform()
    out = plain(tokens, None, torch.bfloat16, torch.channels_last)
    assert out.dtype == torch.int64
    assert out.tolist() == tokens.tolist()
    assert plain(torch.ones(2, 4), None, torch.float64).dtype == torch.float64
    assert plain.draw(np.random.default_rng(0), (2, 3)) is None
    with pytest.raises(ValueError, match=r"data\.input_shape=\[1, 8, 8\]"):
        plain.check((1, 8, 8))


NETS = {"lstm": ("model.hidden=8",), "gpt": ("model.width=8", "client=adamw")}


def run_of(play, model, *more):
    small = (
        f"paths.data_dir={play}",
        "participation.num_clients=2",
        "participation.per_round=2",
        "client.batch_size=4",
    )
    return f"experiment=tiny_shakespeare_{model}_gcfed", *NETS[model], *small, "rounds=1", *more


@pytest.mark.parametrize("model", NETS)
def test_a_run_on_the_small_play(config, play, model, capsys):
    """Accuracy and loss are means over the characters of the test split, and class counts are
    right.
    """
    result = train(config(*run_of(play, model)))
    data = result.trainer.datamodule
    assert data.num_clients == 2
    x, y = data.fetch_test((0, 3))
    with torch.no_grad():
        logits = result.module.net(x)
    real = y != IGNORE
    assert result.metrics["test/acc"] == pytest.approx(
        (logits.argmax(-1) == y)[real].float().mean().item()
    )
    loss = F.cross_entropy(logits[real], y[real]).item()
    assert result.metrics["test/loss"] == pytest.approx(loss, rel=1e-5)
    assert result.metrics["test/perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
    printed = capsys.readouterr().out
    assert re.search(rf"global model, test/perplexity +│ {np.exp(loss):.4g}, at best", printed)
    groups = data.dataset.train.groups[data.partition.indices]
    owners = [
        {*groups[data.partition.offsets[k] : data.partition.offsets[k + 1]].tolist()}
        for k in (0, 1)
    ]
    assert [len(owner) for owner in owners] == [1, 1]  # a client is a speaker
    assert (
        data.class_counts(np.array([0, 1])).sum()
        == (data.labels[data.partition.indices] != IGNORE).sum()
    )


@pytest.mark.parametrize(("model", "name"), [("lstm", "CharLSTM"), ("gpt", "GPT")])
def test_more_tokens_than_the_vocabulary_are_refused(config, play, model, name):
    """Each token beyond it would share the embedding of another one."""
    with refuses(rf"has the token \d\d, and {name} knows the tokens 0 to 39: raise model\.vocab"):
        assemble(config(*run_of(play, model, "model.vocabulary=40")))


def test_a_gpt_in_bfloat16_stays_near_float32(config, play, tmp_path):
    half, full = (
        train(
            config(
                *run_of(play, "gpt", f"precision={precision}", "rounds=2"),
                folder=tmp_path / precision,
            )
        )
        for precision in ("bf16-mixed", "32-true")
    )
    (a, b) = (weights(result.module.net) for result in (half, full))
    start = full.metrics["test/loss"]
    first = weights(build_module(config(*run_of(play, "gpt"))).net)
    assert a.dtype == torch.float32
    assert 0 < (a - b).norm() < 0.1 * (b - first).norm()
    assert half.metrics["test/loss"] == pytest.approx(start, rel=0.02)
