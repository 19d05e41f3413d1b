"""``~/`` in a path is the home folder, also in YAML files of one's own and in Python."""

import pytest
from conftest import read_rows, type_command
from omegaconf import OmegaConf
from run_folders import accuracies, write_run

import gcfed
from gcfed.folders.identity import identity
from gcfed.project import new_project
from gcfed.run import evaluate
from gcfed.utils.home import expand_home

SMALL = (
    "rounds=1",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=40",
    "participation.num_clients=8",
    "extras.figures=false",
    "trainer.devices=1",
    "logger=csv",
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_only_the_beginning_of_a_text_is_expanded_and_interpolations_stay(home):
    cfg = OmegaConf.create(
        {"a": "~/x", "b": ["~/y", 1, {"c": "~/${d}/z"}], "d": "x~/y", "e": "${a}", "f": None}
    )
    expand_home(cfg)
    assert OmegaConf.to_container(cfg) == {
        "a": f"{home}/x",
        "b": [f"{home}/y", 1, {"c": f"{home}/${{d}}/z"}],
        "d": "x~/y",
        "e": "${a}",
        "f": None,
    }


def test_a_path_in_an_own_file_is_that_of_the_command_line(tmp_path, home):
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\ndefaults: [{override /data: csv}]\ndata: {path: ~/x.csv, target: y}\n"
    )
    of_file = gcfed.configure("experiment=mine", config_dir=tmp_path / "conf")
    typed = gcfed.configure("data=csv", "data.path=~/x.csv", "data.target=y")
    assert of_file.data.path == f"{home}/x.csv"
    assert identity(of_file) == identity(typed)


def test_a_run_is_written_to_the_home_folder_and_continued_there(tmp_path, home, monkeypatch):
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("# @package _global_\npaths: {log_dir: ~/logs}\n")
    monkeypatch.chdir(tmp_path)
    words = ("--config-dir", "conf", "experiment=mine", *SMALL)
    type_command(tmp_path, "train.py", *words)
    assert not (tmp_path / "~").exists()
    (metrics,) = (home / "logs").rglob("metrics.csv")
    type_command(tmp_path, "train.py", *words, "rounds=2", "ckpt_path=last")
    assert [*(home / "logs").rglob("metrics.csv")] == [metrics]
    assert [row["round"] for row in read_rows(metrics)] == [1, 2]


def test_functions_know_the_home_folder(home):
    write_run(home / "logs" / "a", accuracies(0.5))
    assert gcfed.runs("~/logs")["folder"].tolist() == [str(home / "logs" / "a")]
    page = gcfed.report("~/logs", out="~/page", figures=False)
    assert page == home / "page" / "index.html"
    (home / "conf").mkdir()
    assert gcfed.configure(config_dir="~/conf").rounds
    cfg = gcfed.configure(SMALL, folder="~/run")
    assert gcfed.train(cfg, quiet=True).folder == home / "run"


def test_a_path_that_is_assigned_in_python_is_in_the_home_folder(home):
    cfg = gcfed.configure(SMALL)
    cfg.paths.log_dir = "~/logs"
    result = gcfed.train(cfg, quiet=True)
    assert result.folder.is_relative_to(home / "logs")
    assert cfg.paths.log_dir == "~/logs"  # the caller's config stays as it was
    model = result.folder / "global_model.safetensors"
    cfg.ckpt_path = f"~/{model.relative_to(home)}"
    assert evaluate(cfg)["round"] == 1


def test_a_new_project_may_be_in_the_home_folder(home):
    assert new_project("~/flowers") == home / "flowers"
