"""Suggestions for words that Hydra does not know."""

import pytest

import gcfed

HINTS = {
    "rond=3": "rond: there is no such key: did you mean rounds?",
    "algoritm=fedprox": "algoritm: there is no such key: did you mean algorithm?",
    "client.lr=0.1": "client.lr: there is no such key: did you mean client.optimizer.lr?",
    "lr=0.1": "lr: there is no such key: did you mean client.optimizer.lr or server.lr?",
    "algorithm=fedprox methods.x.mu=1": "methods.x.mu: there is no such key: did you mean methods.proximal.mu?",
    "algorithm=scaffold gc.lam=0.5": "gc.lam: the chosen gc has no such key. Choose another, gc=…, which has it.",
    "gc=gcfd": "gc=gcfd: there is no such option: did you mean gcfed? There are gcfed, global, local, none, warmup.",
    "logger=[tensorboard,csvv]": "logger=csvv: there is no such option: did you mean csv? "
    "There are csv, many, mlflow, none, tensorboard, wandb.",
    "data=own data.dataset.quux=5": "data.dataset.quux: there is no such key.",
}  # fmt: skip


@pytest.mark.parametrize("words", HINTS)
def test_a_wrong_word_is_answered_with_what_was_meant(words):
    with pytest.raises(ValueError) as said:  # noqa: PT011  (the whole sentence is compared)
        gcfed.configure(words.split())
    assert str(said.value) == HINTS[words]


@pytest.mark.parametrize("word", ["rounds", "seed=1,2,3", "name=it's"])
def test_hydras_own_messages_come_through_in_one_line_with_the_word(word):
    with pytest.raises(ValueError, match=rf"^[^\n]*{word}[^\n]*$") as said:
        gcfed.configure(word)
    assert "http" not in str(said.value)
