"""The commands for what a paper's table lacks."""

import shlex

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from toy_table import Runs

from gcfed.report.commands import study
from gcfed.utils.resolvers import ROOT


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def test_what_is_missing_and_the_command_for_it(runs):
    runs.add(
        "a", [0.4, 0.4], seed=2, config={"rounds": 2}, overrides=["rounds=2", "hydra.run.dir=/x", "+client.steps=3"]
    )
    comparison = runs.compared()
    missing = dict(comparison.missing)
    assert missing["FedAvg, α 0.1; FedAvg, rounds to 50 %"] == (
        "python src/train.py -m algorithm=fedavg gc=none partition.alpha=0.1 rounds=2 +client.steps=3 seed=1,3"
    )
    # A cell without runs is to be as its column is, in what one sees to be no row's own.
    assert missing["GC-Fed, α 0.1; GC-Fed, rounds to 50 %"] == (
        "python src/train.py -m data=digits model=mlp partition.alpha=0.1 gc=gcfed rounds=2 +client.steps=3 seed=1,2,3"
    )
    assert missing["FedAvg, α 1"] == (
        "python src/train.py -m data=digits model=mlp partition.alpha=1 algorithm=fedavg gc=none seed=1,2,3"
    )
    assert not any("Lost" in places for places in missing)
    assert runs.cell("FedAvg").missing == (1, 3)
    assert runs.cell("Lost").note == "There is no code of it."
    assert comparison.command == ""


def test_what_changes_no_result_is_no_other_setting(runs):
    overrides = ["rounds=2", "trainer.devices=1", "callbacks.progress=null", "+client.steps=3", "paths.log_dir=x"]
    runs.add("a", [0.4, 0.4], config={"rounds": 2}, overrides=overrides)
    assert runs.cell("FedAvg").beyond == {"rounds=2", "+client.steps=3"}
    assert runs.cell("GC-Fed").beyond is None


@pytest.mark.parametrize(
    ("beyond", "wanted"),
    [
        ([], "python src/train.py -m study=gcfed_table5"),
        ([(), ()], "python src/train.py -m study=gcfed_table5"),
        ([("rounds=30", "eval_every=2")], "python src/train.py -m study=gcfed_table5 scale=small"),
        ([("rounds=30",)], "python src/train.py -m study=gcfed_table5 rounds=30"),
        ([("rounds=30",), ()], ""),  # it would fill some cells and not others
        ([("experiment=cifar10_cnn_gcfed",)], ""),
    ],
)
def test_the_study_that_fills_the_cells_shown(beyond, wanted):
    assert study("gcfed_table5", map(frozenset, beyond)) == wanted
    assert study("toy_table3", map(frozenset, beyond)) == ""


def test_the_missing_command_makes_the_cells_run(runs):
    runs.add("a", [0.4, 0.4], config={"rounds": 2}, overrides=["rounds=2"])
    comparison = runs.compared()
    paper = comparison.paper
    rows, columns = ({axis.label: axis for axis in axes} for axes in (paper.rows, paper.columns))
    for row, column in (("FedAvg", "α 0.1"), ("FedProx", "α 1"), ("GC-Fed", "rounds to 50 %")):
        command = shlex.split(runs.cell(row, column).command)
        assert command[:3] == ["python", "src/train.py", "-m"]
        seed = f"seed={command[-1].removeprefix('seed=').split(',')[0]}"
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            cfg = compose("train", overrides=[*command[3:-1], seed], return_hydra_config=False)
        for key, value in paper.match(rows[row], columns[column]).items():
            assert OmegaConf.select(cfg, key) == value, key
        assert cfg.rounds == (100 if column == "α 1" else 2)
