"""Suggestions for keys and options that Hydra does not know."""

import re
from pathlib import Path

import pytest
from conftest import refuses

import gcfed
from gcfed.api import configure
from gcfed.assemble import assemble
from gcfed.commands import train
from gcfed.utils.compose import refuse_words, shorthand
from gcfed.utils.refusal import Refusal
from gcfed.utils.resolvers import CONFIGS

HINTS = {
    "rond=3": "rond: there is no such key: did you mean rounds?",
    "client.lr=0.1": "client.lr: there is no such key: did you mean client.optimizer.lr?",
    "lr=0.1": "lr: there is no such key: did you mean client.optimizer.lr or server.lr?",
    "client.local_epochs=3": (
        "client.local_epochs: there is no such key: did you mean client.epochs?"
    ),
    "algorithm=fedprox methods.x.mu=1": (
        "methods.x.mu: there is no such key: did you mean methods.proximal.mu?"
    ),
    "gc=none gc.lam=0.5": (
        "gc.lam has no effect without gc=gcfed or gc=global or gc=local or gc=warmup."
    ),
    "gc=none gc.boundary=fc1": (
        "gc.boundary has no effect without gc=gcfed or gc=global or gc=local or gc=warmup."
    ),
    "gc=none ++gc.boundary=fc1": (
        "gc.boundary has no effect without gc=gcfed or gc=global or gc=local or gc=warmup."
    ),
    "experiment=cifar10": (
        "experiment=cifar10: there is no such option: did you mean experiment=cifar10_cnn_gcfed "
        "or experiment=cifar10_resnet18_fedacg or experiment=cifar10_resnet9_fedgc?"
    ),
    "gc=gcfd": (
        "gc=gcfd: there is no such option: did you mean gc=gcfed? There are gcfed, global, local,"
        " none, warmup."
    ),
    "logger=[tensorboard,csvv]": (
        "logger=csvv: there is no such option: did you mean logger=csv? "
        "There are csv, many, mlflow, none, tensorboard, wandb."
    ),
    "callbacks.best.monitor=val/acc": "callbacks.best.monitor: there is no such key.",
    "data.root=flowers": "data.root: there is no such key.",
    "data=own data.dataset.quux=5": "data.dataset.quux: there is no such key.",
    "dataset=cifar10": "dataset: there is no such key: did you mean data=cifar10?",
    "device=cuda": "device: there is no such key: did you mean trainer=gpu?",
    "num_clients=10": (
        "num_clients: there is no such key: did you mean participation.num_clients?"
    ),
    "extras=null": (
        "extras=null: extras cannot be left out; set its keys instead. There are default."
    ),
}


FEDREG = "algorithm=fedreg"
OORT = "participation=oort participation.clock.step=1"
#: The words that bring a key to life, the words that do not, and the key.
DEPENDENT = (
    ("gc=gcfed", "gc=global", "gc.lam=0.5"),
    ("gc=local", "gc=global", "gc.boundary=fc1"),
    ("gc=warmup", "gc=global", "gc.local_rounds=2"),
    ("gc=global", "gc=local", "gc.server_boundary=fc2"),
    (
        "participation.clock.step=1 participation.clock.available=0.9",
        "participation.clock.step=1",
        "participation.clock.day=5",
    ),
    (f"{OORT} participation.sampler.preferred=1", OORT, "participation.sampler.penalty=3"),
    *(
        (FEDREG, f"{FEDREG} methods.fedreg.{loss}=false", f"methods.fedreg.{length}=0.2")
        for loss, length in (("pseudo", "eta_s"), ("perturbed", "eta_p"))
    ),
    *(
        (f"algorithm={name} {weight}={live}", f"algorithm={name} {weight}={idle}", key)
        for name in ("fedbuff", "fedasync")
        for weight in [f"methods.{name}.weight"]
        for live, idle, key in (
            ("polynomial", "constant", f"methods.{name}.a=0.3"),
            ("hinge", "polynomial", f"methods.{name}.b=2"),
        )
    ),
)


@pytest.mark.parametrize(("live", "idle", "word"), DEPENDENT)
def test_a_key_without_an_effect_is_refused_with_the_setting_that_it_needs(live, idle, word):
    key, _, _ = word.partition("=")
    configure(*live.split(), word)
    configure(*idle.split())  # a config file may have the key
    with refuses(
        rf"^{re.escape(key)} has no effect with [\w.]+=\w+: change [\w.]+, or leave it out"
    ):
        configure(*idle.split(), word)


def test_a_warning_says_that_steps_count_instead_of_epochs(caplog):
    """FedGC sets the number of its local steps."""
    for words in (
        ["client.epochs=3"],
        ["algorithm=fedgc"],
        ["client.epochs=3", "client.steps=null"],
    ):
        configure(*words)
    assert not caplog.messages
    configure("algorithm=fedgc", "client.epochs=17")
    (said,) = caplog.messages
    assert said.startswith("client.epochs=17 has no effect with client.steps=50, ")


@pytest.mark.parametrize("word", ["fixed=2", "spread=0.5", "jitter=0.1"])
def test_a_time_without_a_clock_is_refused(config, tmp_path, word):
    """It changes nothing where no time is counted and no answer awaited."""
    word = f"participation.clock.{word}"
    key, _, _ = word.partition("=")
    with refuses(rf"^{key}: rounds have no time\. Set participation\.clock\.step, too"):
        assemble(config(word, folder=tmp_path))
    for needed in ("participation.clock.step=1", "participation.faults.extra=1"):
        assemble(config(word, needed, folder=tmp_path))
    assemble(config(word, "participation=buffered", folder=tmp_path))


@pytest.mark.parametrize("words", HINTS)
def test_the_error_of_a_wrong_word_suggests_the_right_one(words):
    with pytest.raises(ValueError) as said:  # noqa: PT011  (the whole sentence is compared)
        gcfed.configure(words.split())
    assert str(said.value).partition(" There are celeba")[0] == HINTS[words]
    *rest, wrong = words.split()
    hint = HINTS[words].partition("did you mean ")[2].partition("?")[0]
    for key in re.findall(r"[\w.=+]{3,}", hint):
        gcfed.configure(rest, key if "=" in key else f"{key}={wrong.partition('=')[2]}")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("model=mynet.Net", "model._target_=mynet.Net"),
        ("algorithm=mine.Mine", "+methods.mine._target_=mine.Mine"),
    ],
)
def test_a_class_in_place_of_an_option_gets_the_key_that_takes_it(word, meant):
    with refuses(re.escape(f"{word}: there is no such option: did you mean {meant}?")):
        gcfed.configure(word)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("seed=1,2", "seed=1,2 has several values: add -m for a run of each, or write a list"),
    ],
)
def test_several_values_need_a_sweep_or_brackets(word, sentence):
    with refuses(re.escape(sentence)):
        gcfed.configure(word)


@pytest.mark.parametrize("word", ["rounds", "seed=1,2,3", "name={x"])
def test_messages_of_hydra_are_one_line_with_the_word(word):
    with refuses(rf"^[^\n]*{word}[^\n]*$") as said:
        gcfed.configure(word)
    assert "http" not in str(said.value)


def test_the_error_of_an_own_option_names_the_folder_that_has_it(tmp_path, monkeypatch):
    (tmp_path / "conf" / "algorithm").mkdir(parents=True)
    (tmp_path / "conf" / "algorithm" / "mine.yaml").write_text("# @package _global_\n")
    monkeypatch.chdir(tmp_path)
    with refuses(r"without conf/algorithm/mine\.yaml: add --config-dir conf \(in Python"):
        gcfed.configure("algorithm=mine")
    gcfed.configure("algorithm=mine", config_dir="conf")


@pytest.mark.parametrize(
    ("experiment", "algorithm"), [("[{override /algorithm: null}]", ""), ("[]", "algorithm=mine")]
)
def test_the_error_of_an_own_file_without_a_tag_names_the_tag(tmp_path, experiment, algorithm):
    for group, text in (("experiment", f"defaults: {experiment}"), ("algorithm", "")):
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    words = [word for word in ("experiment=mine", algorithm) if word]
    cfg = gcfed.configure(words, config_dir=tmp_path)
    with refuses("^tags.algorithm is missing, and it names the folder of the run: "):
        gcfed.train(cfg)


@pytest.mark.parametrize("word", ["flöwers", "my run ü", "数据/x.csv", "~/flöwers.csv"])
def test_foreign_letters_need_no_quotes(word):
    expected = word.replace("~", str(Path.home()))
    assert gcfed.configure("data=csv", f"data.path={word}").data.path == expected


def test_the_home_folder_is_known_behind_an_equals_sign():
    """A shell knows ~ at the beginning of a word only."""
    home = str(Path.home())
    assert shorthand(["a=~/x", "b=[~/x,'~/y z']", 'c="~/x"', "d=x~/y", "~callbacks"]) == [
        f"a={home}/x",
        f"b=[{home}/x,'{home}/y z']",
        f'c="{home}/x"',
        "d=x~/y",
        "~callbacks",
    ]


def test_a_path_needs_no_quotes(tmp_path):
    folder = tmp_path / "it's, {a=b} (1) [x]"
    folder.mkdir()
    (folder / "last.ckpt").touch()
    cfg = gcfed.configure(
        "data=image_folder",
        f"data.root={folder}",
        f"ckpt_path={folder}/last.ckpt",
        f"model.start={folder}/last.ckpt",
        "name=it's",
        "targets=[0.5]",
        "gc=null",
    )
    assert cfg.data.root == str(folder)
    assert cfg.ckpt_path == f"{folder}/last.ckpt"
    assert cfg.name == "it's"
    assert cfg.model.start == cfg.ckpt_path
    assert cfg.targets == [0.5]
    assert cfg.gc._target_ is None


def said(*words, command="train"):
    """The refusal of a command line, before anything is composed."""
    with pytest.raises(Refusal) as refused:
        refuse_words(words, CONFIGS / f"{command}.yaml")
    return str(refused.value)


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        (["--epochs", "3"], "client.epochs=3"),
        (["--batch-size=32"], "client.batch_size=32"),
        (["--lr", "0.1", "-m"], "client.optimizer.lr=0.1 or server.lr=0.1"),
        (["--rounds"], "rounds=…"),
        (["--rounds", "-m"], "rounds=…"),
    ],
)
def test_the_error_of_a_setting_with_dashes_suggests_the_key(flags, keys):
    assert said(*flags) == f"{flags[0]}: a setting has no dashes: did you mean {keys}?"


@pytest.mark.parametrize(
    ("command", "words", "sentence"),
    [
        ("train", ["help"], "help: a setting is written key=value, and --help shows all settings."),
        ("train", ["scaffold"], "scaffold: did you mean algorithm=scaffold?"),
        ("train", ["rounds"], "shows all settings: did you mean rounds=…?"),
        ("train", ["round"], "shows all settings: did you mean rounds=…?"),
        ("train", ["-m", "seed=1", "2"], "separated by commas, without spaces: seed=1,2."),
        ("report", ["logs"], "logs: name the folders of runs as in 'roots=[logs]'."),
        ("eval", ["a/last.ckpt"], "name the checkpoint as in ckpt_path=a/last.ckpt."),
    ],
)
def test_a_bare_word_is_refused_with_what_to_type(command, words, sentence):
    assert sentence in said(*words, command=command)


@pytest.mark.parametrize("flag", ["--config-dir", "--config-name", "--config-path", "--package"])
def test_a_flag_without_a_value_is_refused(flag):
    """Hydra passes over an empty one."""
    for words in ([f"{flag}="], [flag, ""]):
        assert said(*words) == f"{flag} has no value."


def test_an_empty_folder_is_not_the_working_folder():
    with refuses("config_dir has no value"):
        gcfed.configure(config_dir="")


def test_flags_of_hydra_are_not_taken_for_settings():
    refuse_words(["-m", "--config-dir", "conf", "--cfg=job", "seed=1"], CONFIGS / "train.yaml")


OWN = """
# @package _global_
methods:
  mine:
    _target_: mymethod.Mine
    strength: 1.0
"""
OWN_HINTS = {
    "algorithm=mien": "algorithm=mien: there is no such option: did you mean algorithm=mine? There",
    "algorithm=mine methods.mine.strenght=2": (
        "methods.mine.strenght: there is no such key: did you mean methods.mine.strength?"
    ),
    "algorithm=mine sed=2": "sed: there is no such key: did you mean seed?",
    "experiment=first": "experiment=first: there is no such option. There are c",
}


@pytest.fixture
def conf(tmp_path):
    """A user's folder with an algorithm."""
    file = tmp_path / "conf" / "algorithm" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(OWN)
    return tmp_path / "conf"


@pytest.mark.parametrize("words", OWN_HINTS)
def test_hints_know_the_users_own_files(conf, words):
    with pytest.raises(ValueError) as said:  # noqa: PT011  (the whole sentence is compared)
        gcfed.configure(words.split(), config_dir=conf)
    assert str(said.value).startswith(OWN_HINTS[words])


@pytest.mark.parametrize("words", OWN_HINTS)
def test_hints_of_a_command_know_the_users_own_files(conf, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gcfed-train", "--config-dir", str(conf), *words.split()])
    with pytest.raises(SystemExit):
        train()
    assert OWN_HINTS[words] in capsys.readouterr().err


def test_a_broken_file_of_the_users_is_named_in_one_line(tmp_path):
    file = tmp_path / "algorithm" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("defaults: [fedavg, _self_\ntags: 3\n")
    with pytest.raises(Refusal, match=r"^[^\n]*algorithm/mine.yaml\", line 1, [^\n]*$"):
        gcfed.configure("algorithm=mine", config_dir=tmp_path)
