"""Suggestions for words that Hydra does not know."""

import re

import pytest

import gcfed

HINTS = {
    "rond=3": "rond: there is no such key: did you mean rounds?",
    "algoritm=fedprox": "algoritm: there is no such key: did you mean algorithm?",
    "client.lr=0.1": "client.lr: there is no such key: did you mean client.optimizer.lr?",
    "lr=0.1": "lr: there is no such key: did you mean client.optimizer.lr or server.lr?",
    "algorithm=fedprox methods.x.mu=1": "methods.x.mu: there is no such key: did you mean methods.proximal.mu?",
    "experiment=cifar10": "experiment=cifar10: there is no such option: did you mean experiment=cifar10_cnn_gcfed "
    "or experiment=cifar10_resnet18_fedacg or experiment=cifar10_resnet9_fedgc?",
    "gc=gcfd": "gc=gcfd: there is no such option: did you mean gc=gcfed? There are gcfed, global, local, none, warmup.",
    "logger=[tensorboard,csvv]": "logger=csvv: there is no such option: did you mean logger=csv? "
    "There are csv, many, mlflow, none, tensorboard, wandb.",
    "data=own data.dataset.quux=5": "data.dataset.quux: there is no such key.",
}  # fmt: skip


@pytest.mark.parametrize("words", HINTS)
def test_a_wrong_word_is_answered_with_what_was_meant(words):
    with pytest.raises(ValueError) as said:  # noqa: PT011  (the whole sentence is compared)
        gcfed.configure(words.split())
    assert str(said.value).partition(" There are celeba")[0] == HINTS[words]
    *rest, wrong = words.split()
    hint = HINTS[words].partition("did you mean ")[2].partition("?")[0]
    for key in re.findall(r"[\w.=]{3,}", hint):
        gcfed.configure(rest, key if "option" in HINTS[words] else f"{key}={wrong.partition('=')[2]}")


@pytest.mark.parametrize("word", ["rounds", "seed=1,2,3", "name={x"])
def test_hydras_own_messages_come_through_in_one_line_with_the_word(word):
    with pytest.raises(ValueError, match=rf"^[^\n]*{word}[^\n]*$") as said:
        gcfed.configure(word)
    assert "http" not in str(said.value)


def test_a_path_needs_no_quotes(tmp_path):
    (folder := tmp_path / "it's, {a=b} (1) [x]").mkdir()
    (folder / "last.ckpt").touch()
    cfg = gcfed.configure(
        "data=image_folder", f"data.root={folder}", f"ckpt_path={folder}/last.ckpt", f"model.start={folder}/last.ckpt",
        "name=it's", "targets=[0.5]", "gc=null",
    )  # fmt: skip
    assert (cfg.data.root, cfg.ckpt_path, cfg.name) == (str(folder), f"{folder}/last.ckpt", "it's")
    assert (cfg.model.start, cfg.targets) == (cfg.ckpt_path, [0.5])
    assert cfg.gc._target_ is None
