"""A key that nobody knows is used or refused, wherever it is added."""

from pathlib import Path

import pytest
from conftest import composer, options
from omegaconf import DictConfig, OmegaConf, open_dict

from gcfed.assemble import assemble, build_trainer
from gcfed.check import check
from gcfed.utils.compose import composed
from gcfed.utils.idle import SWITCHES
from gcfed.utils.keys import GROUPS
from gcfed.utils.refusal import Refusal
from gcfed.utils.resolvers import CONFIGS
from gcfed.utils.unread import refuse_unread

SMALL = (
    "data.limit_train=100",
    "data.limit_test=40",
    "model.hidden=[8]",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
)


def dicts(cfg: DictConfig) -> list[str]:
    """The dotted names of all dicts of a config, and "" for its root."""
    found = [""]
    for name in found:
        node = OmegaConf.select(cfg, name) if name else cfg
        for key in node:
            if OmegaConf.is_dict(node._get_node(key)):
                found.append(f"{name}.{key}".lstrip("."))
    return found


def refusal(words: list[str], folder: Path, without: str = "") -> str:
    """Why a run with these words, and without a group, is refused; "" if it would begin."""
    try:
        cfg = composer([*SMALL, *words, f"paths.output_dir={folder}"])
        with open_dict(cfg):
            if without:
                cfg[without] = None
        check(cfg)
        assembly = assemble(cfg)
        build_trainer(cfg, assembly, assembly.callbacks)
    except ValueError as error:
        return str(error)
    return ""


PLACES = dicts(composer(["algorithm=fedprox", "gc=gcfed", "callbacks=best", "metrics=drift"]))


@pytest.mark.parametrize("place", PLACES)
def test_an_unknown_key_in_any_dict_of_a_run_is_refused(tmp_path, place):
    words = ["algorithm=fedprox", "gc=gcfed", "callbacks=best", "metrics=drift", "logger=csv"]
    if place.startswith("logger.tensorboard"):
        words[-1] = "logger=tensorboard"
    assert refusal(words, tmp_path) == ""
    key = f"{place}.qvx".lstrip(".")
    # of an object's argument the section is enough
    assert (place or key) in refusal([*words, f"+{key}=3"], tmp_path)


def test_a_run_works_without_a_group_or_names_it(tmp_path):
    """This also builds the default option of each group."""
    for entry in OmegaConf.load(CONFIGS / "train.yaml").defaults:
        if entry == "_self_":
            continue
        for group, option in entry.items():
            if option and group not in ("hydra", "algorithm"):
                said = refusal(["algorithm=fedadam", "gc=gcfed"], tmp_path, without=group)
                assert said == "" or group in said, (group, said)


@pytest.mark.parametrize("group", [g for g in GROUPS if not g.startswith("hydra")])
def test_every_option_of_a_group_has_only_keys_that_something_reads(group):
    for option in options(group):
        refuse_unread(composer([f"{group}={option}"]))


@pytest.mark.parametrize("group", [g for g in GROUPS if "hydra" not in g and g != "hparams_search"])
def test_a_key_beside_each_group_is_refused_with_a_suggestion(group):
    """A group with a letter too many is a top-level key that no config has."""
    with pytest.raises(Refusal, match=f"did you mean .*{group}"):
        refuse_unread(composer([f"+{group}z.x._target_=mine.Mine"]))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("+rond=3", "rond: nothing reads this setting: did you mean rounds?"),
        ("+method.mine._target_=mine.Mine", "did you mean methods?"),
        ("+callback.x._target_=a.B", "did you mean callbacks?"),
        ("+callbacks.x.qvx=3", "callbacks.x builds nothing without callbacks.x._target_."),
        ("+methods.mine=3", "methods.mine builds nothing"),
        ("+extras.figure=false", "did you mean extras.figures?"),
        ("+participation.per_rounds=3", "did you mean participation.per_round"),
    ],
)
def test_the_refusal_says_what_to_do(words, sentence):
    with pytest.raises(Refusal) as refused:
        refuse_unread(composer(words.split()))
    assert sentence in str(refused.value)


@pytest.mark.parametrize("group", SWITCHES)
def test_an_argument_of_an_object_that_is_off_is_refused(group):
    """For each argument of each option of a group."""
    arguments = set()
    for option in options(group):
        arguments |= {*(OmegaConf.select(composer([f"{group}={option}"]), group) or {})}
    for name in ("qvx", *(name for name in arguments if not name.startswith("_"))):
        with pytest.raises(Refusal, match=rf"^{group}\.{name} has no effect without {group}="):
            composed([f"{group}=none", f"++{group}.{name}=1"])


@pytest.mark.parametrize("experiment", options("experiment"))
def test_an_experiment_without_gc_keeps_its_other_settings(experiment):
    refuse_unread(composer([f"experiment={experiment}", "gc=none"]))


@pytest.mark.parametrize(
    "words",
    [
        "+rond=3 name=with_${rond}",
        "+mine.lr=0.3 client.optimizer.lr=${mine.lr}",
        "+mine.lr=0.3 client.optimizer.lr=${oc.select:mine.lr,0.1}",
        "algorithm=fedprox methods.proximal._target_=null",
        "experiment=matrix_regression_ssf metrics=none",
        "callbacks.progress=null",
        "+callbacks.none={}",
    ],
)
def test_a_key_to_which_an_interpolation_refers_is_accepted(words):
    refuse_unread(composer(words.split()))
