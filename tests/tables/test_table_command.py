"""The command for a table: which jobs it skips, continues and refuses.

No test but the last one trains.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import composer, forked, run_script
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from pretend import Trainer, composed, finish, go, plain

import gcfed.run  # noqa: F401  (forked processes have it)
from gcfed import commands
from gcfed.folders.folder import read_run
from gcfed.tables import command, cost, running
from gcfed.tables.plan import make_plan
from gcfed.tables.reading import load, names
from gcfed.tables.records import Selection, Table
from gcfed.utils.refusal import Refusal

FEDAVG = "fedavg_alpha-0.1_s1"
GCFED = "gc-fed_alpha-0.1_s1"
EVERY = "metrics.gap.every"
PATIENCE = "callbacks.early_stopping.patience"
TABLE = {
    "overrides": ["rounds=4"],
    "rows": [
        {"label": "FedAvg", "overrides": ["gc=none"]},
        {"label": "GC-Fed", "overrides": ["gc=gcfed"]},
    ],
    "columns": [{"label": "α 0.1", "overrides": ["partition.alpha=0.1"]}],
}


SEARCH = {"metric": "last:val/acc", "n_trials": 1, "overrides": ["seed=9"]}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """``table(trainer, *words, name=…, **node)`` runs a table below ``table.root``."""
    plain.logs = tmp_path / "logs"

    def run(trainer, *words, name="try", **node):
        return go(monkeypatch, tmp_path, trainer, TABLE | node, *words, name=name)

    run.root = tmp_path / "logs" / "study"
    return run


def test_finished_jobs_are_skipped_and_unfinished_jobs_continue(table, capsys):
    trainer = Trainer()
    assert table(trainer, "dry_run=true", "rows=[GC-Fed]") == 0
    assert "to start      GC-Fed, α 0.1, seed 1  (gc-fed_alpha-0.1_s1)" in capsys.readouterr().out
    assert not table.root.exists()
    assert table(trainer) == 0
    folder = table.root / "try" / "full"
    assert trainer.folders == [folder / FEDAVG, folder / GCFED]
    assert trainer.jobs[0] == ["rounds=4", "partition.alpha=0.1", "gc=none", "seed=1"]
    said = capsys.readouterr().out
    assert "0 finished, 0 to continue, 2 to start" in said
    assert f"job 2 of 2, about 0 s left: GC-Fed, α 0.1, seed 1\n  {folder / GCFED}" in said
    assert re.search(r"\| GC-Fed +\| 50\.00 ", said)

    (folder / FEDAVG / "summary.json").unlink()
    again = Trainer()
    assert table(again) == 0
    assert again.folders == [folder / FEDAVG]
    assert "1 finished, 1 to continue, 0 to start" in capsys.readouterr().out
    more = Trainer()
    table(more, "rounds=6")
    assert len(more.jobs) == 2


def test_an_equal_run_of_another_table_counts_and_a_longer_one_does_not(table):
    table(Trainer(), "rows=[FedAvg]", name="first")
    table(Trainer(), "rounds=6", "rows=[GC-Fed]", name="longer")
    trainer = Trainer()
    table(trainer, name="second")
    assert ["gc=gcfed" in job for job in trainer.jobs] == [True]
    found = (table.root / "second" / "full" / "comparison.csv").read_text()
    assert str(table.root / "first" / "full" / FEDAVG) in found


@pytest.mark.parametrize(
    ("then", "now", "why"),
    [
        ((), ("rounds=2",), "4 rounds are done there, 2 are asked for, and there is no checkpoint"),
        ((), ("eval_every=2",), "eval_every is 1 there, 2 here"),
        ((), (f"{EVERY}=2",), "it has no metrics=gap"),
        ((f"{EVERY}=10",), (f"{EVERY}=2",), f"{EVERY} is 10 there, 2 here"),
        ((f"{PATIENCE}=3",), (f"{PATIENCE}=20",), f"{PATIENCE} is 3 there, 20 here"),
        (("metrics.cohorts.folder=${paths.output_dir}",) * 2 + (None,)),  # the run's own folder
        (("metrics.drift.a=1", f"{EVERY}=10"), (f"{EVERY}=10",), None),  # more metrics than needed
        (("eval_every=7",), ("eval_every=4",), None),  # both test only round 4 of 4
        # it never stopped
        ((f"{PATIENCE}=3",), ("extras.figures=false", "trainer.devices=1", "targets=[0.3]"), None),
    ],
)
def test_a_folder_with_another_run_is_named_and_not_changed(table, capsys, then, now, why):
    trainer = Trainer()
    folder = table.root / "try" / "full" / FEDAVG
    then, now = ((words,) if isinstance(words, str) else words for words in (then, now))
    finish(folder, ["gc=none", "partition.alpha=0.1", *then], 4, trainer.compose)
    (folder / "checkpoints" / "last.ckpt").unlink()
    assert table(trainer, *now, "rows=[FedAvg]") == (1 if why else 0)
    assert not trainer.jobs
    assert f"{FEDAVG} holds another run: {why}" in capsys.readouterr().out or why is None


@pytest.mark.parametrize("key", ["metrics", "metrics.gap", "callbacks", "eval_every", "rounds"])
@pytest.mark.parametrize("value", ["text", True, -1, [1], {"a": "b"}, None])
def test_a_value_of_another_type_in_a_run_does_not_end_the_table(table, capsys, key, value):
    """In the folder of a job, and in an equal run elsewhere."""
    trainer = Trainer()
    words = ["gc=none", "partition.alpha=0.1", f"{EVERY}=2"]
    for folder in (table.root / "try" / "full" / FEDAVG, table.root.parent / "elsewhere"):
        finish(folder, words, 4, trainer.compose)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    table(trainer, f"{EVERY}=2", "rows=[FedAvg]", "compare=true")
    said = capsys.readouterr().out
    does_not_matter = key == "callbacks" or (key, value) == ("eval_every", None)
    assert ("holds another run" in said) != does_not_matter
    assert ("1 finished" in said) == does_not_matter


@pytest.mark.parametrize(("words", "goes_on"), [((f"{PATIENCE}=3",), False), ((), True)])
def test_a_job_that_stopped_early_is_finished_if_the_table_asks_for_early_stopping(
    table, words, goes_on
):
    """The job stopped after two of four rounds."""
    trainer = Trainer()
    overrides = ["gc=none", "partition.alpha=0.1", f"{PATIENCE}=3"]
    rows = [{"test/acc": 0.5}] * 2
    finish(
        table.root / "try" / "full" / FEDAVG,
        overrides,
        4,
        trainer.compose,
        rows=rows,
        stopped="no better",
    )
    table(trainer, *words, "rows=[FedAvg]")
    assert len(trainer.jobs) == goes_on


def test_a_mistake_is_named_before_any_job(table):
    trainer = Trainer()
    rows = [*TABLE["rows"], {"label": "odd", "overrides": ["client.epochs=${nothing}"]}]
    with pytest.raises(ValueError, match=r"^odd, α 0\.1, seed 1: .*nothing"):
        table(trainer, rows=rows)
    assert not trainer.jobs


def test_cells_that_an_override_makes_equal_are_one_run_and_other_measurements_are_two(
    table, capsys
):
    trainer = Trainer()
    table(trainer, "gc=local")
    assert [job[-1] for job in trainer.jobs] == ["gc=local"]
    columns = [{"label": f"every {n}", "overrides": [f"{EVERY}={n}"]} for n in (1, 2)]
    capsys.readouterr()
    table(Trainer(), "compare=true", "rows=[FedAvg]", columns=columns)
    assert "2 jobs in" in capsys.readouterr().out


def test_two_processes_never_run_the_same_job_and_a_failure_is_reported(table, capsys):
    second = Trainer(lambda values, number: "out of\nmemory")

    def meanwhile(values, number):
        if not second.jobs:
            assert table(second) == 1
            finish(
                table.root / "try" / "full" / GCFED,
                ["gc=gcfed", "partition.alpha=0.1"],
                4,
                second.compose,
            )
        return 0.5

    first = Trainer(meanwhile)
    assert table(first) == 0
    assert [job[2] for job in second.jobs] == ["gc=gcfed"]
    assert [job[2] for job in first.jobs] == ["gc=none"]  # the other job has finished meanwhile
    said = capsys.readouterr().out
    assert (
        f"skipped: FedAvg, α 0.1, seed 1; process {os.getpid()} on {socket.gethostname()} is"
        " running it" in said
    )
    assert "GC-Fed, α 0.1, seed 1: out of\nmemory\n    " in said
    assert "Not finished, 2 of 2 jobs:" in said


def test_hours_are_steps_times_seconds(monkeypatch):
    """The digits have 20 equal clients, 5 per round, 2 epochs in batches of 10."""
    steps = type(
        "Steps",
        (dict,),
        {"__contains__": lambda self, key: True, "__missing__": lambda self, key: 36.0},
    )
    overrides = (
        "client.epochs=2 client.batch_size=10 data.limit_train=1000 data.limit_test=300 rounds=3"
        " eval_every=2"
    )
    cfg = composed(("gc=none", "partition=iid", *overrides.split()))
    assert cost.seconds_a_round(cfg, steps()) == pytest.approx(36 * (5 * 2 * 5 + 300 / 10 / 3 / 2))
    assert 0 < cost.seconds_a_round(cfg, {}) < 36
    monkeypatch.setattr(cost, "seconds_a_round", lambda cfg, steps: 1800.0)
    assert cost.estimate([(cfg, 3), (cfg, 1)]).startswith("about 2.0 h ")


def test_an_estimate_changes_neither_the_config_nor_torchs_threads(monkeypatch):
    cfg = composed(("data.limit_train=100", "data.limit_test=40", "model.hidden=[8]")).copy()
    before = OmegaConf.to_container(cfg)
    threads = []
    monkeypatch.setattr(cost.torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(cost.torch, "set_num_threads", threads.append)
    assert "not counted" not in cost.estimate([(cfg, 1)])
    assert OmegaConf.to_container(cfg) == before
    assert threads == [1, 7]


@pytest.mark.parametrize(
    ("words", "package", "loader"),
    [
        (["data=huggingface", "data.name=nobody/nothing"], "datasets", "load_dataset"),
        (
            ["data=digits", "model=torchvision", "model.weights=DEFAULT"],
            "torchvision.models._api",
            "load_state_dict_from_url",
        ),
    ],
)
def test_an_estimate_downloads_nothing(monkeypatch, tmp_path, words, package, loader):
    downloads = []
    module = pytest.importorskip(package)
    monkeypatch.setattr(module, loader, lambda *args, **settings: downloads.append(args))
    small = ["data.limit_train=20", "data.limit_test=10", "participation.num_clients=2"]
    cfg = composed((*words, *small, f"paths.data_dir={tmp_path}"))
    estimate = cost.estimate([(cfg, 1)])
    assert downloads == []
    if package == "datasets":
        assert "data.name=nobody/nothing is not downloaded yet" in estimate


def test_a_path_with_an_apostrophe_is_one_value_of_the_runs_command_line(monkeypatch):
    """Hydra's quotes end at an apostrophe that is not escaped."""
    commands_of_runs = []

    def start(words):
        commands_of_runs.append(words)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(running.subprocess, "run", start)
    folder = Path("/nowhere/it's a = b, c")
    assert not running.train(["rounds=1"], folder)
    word = commands_of_runs[0][-1]
    (override,) = OverridesParser.create().parse_overrides([word])
    assert override.value() == str(folder)


def test_a_job_that_ends_before_its_run_begins_does_not_blame_the_folder(monkeypatch, tmp_path):
    """Such as one whose imports fail: Hydra has made the folder, and no file is in it."""
    code = "import sys; sys.exit(3)"
    monkeypatch.setattr(running, "TRAIN_COMMAND", code)
    assert running.train([], tmp_path) == "it ended with code 3; see above"


def run_command(*words):
    """Runs ``gcfed-table <words>`` in this process and its terminal."""
    sys.argv = ["gcfed-table", *words]
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    commands.table()


def wrong_command(folder, *words):
    """What the command prints before it ends with exit code 1."""
    printed = folder / "printed.txt"
    assert forked(lambda: run_command(*words), printed) == 1, printed.read_text()
    return printed.read_text()


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ({"sedes": [1]}, "the key sedes is unknown: did you mean seeds?"),
        ({"rows": [{"label": "a", "override": []}]}, "the key rows.0.override is unknown"),
        ({"columns": None}, "columns=null must be a list"),
        ({"rows": {"FedAvg": ["gc=none"]}}, "rows must be a list, such as [{label: FedAvg, over"),
        ({"rows": ["gc=none"]}, "rows.0 must have keys, such as {label: FedAvg, overrides: [gc="),
        ({"overrides": "rounds=2"}, "overrides=rounds=2 must be a list, such as [rounds=2]"),
        ({"seeds": [1, 1]}, "seeds=[1, 1] must be a list without repetitions"),
        (
            {"overrides": ["client.epoch=3"]},
            "FedAvg, α 0.1, seed 1: client.epoch: there is no such key: did you mean client.epo",
        ),
        ({"overrides": ["seed=7"]}, "FedAvg, α 0.1: seed=7 is set by the command: write seeds="),
        ({"seeds": -2}, "seeds=-2 must be at least 1"),
        ({"seeds": [1, -1]}, "seeds.1=-1 must be at least 0"),
        ({"overrides": ["rounds=abc"]}, "FedAvg, α 0.1, seed 1: rounds=abc must be a whole number"),
        (
            {"columns": [{"label": "a"}, {"label": "b", "overrides": ["partition.alpha=low"]}]},
            "FedAvg, b, seed 1: partition.alpha=low must be a number",
        ),
        ({"overrides": ["gc.boundary=fc1"]}, "gc.boundary has no effect without gc=gcfed"),
        (
            {"search": SEARCH | {"params": {"client.optimizer.rl": "interval(0.1, 1)"}}},
            "search for fedavg_alpha-0.1: client.optimizer.rl: there is no such key",
        ),
        ({"unit": "furlong"}, "unit=furlong must be percent, points, rounds"),
        ({"measure": "most:test/acc"}, "measure='most:test/acc' is not understood"),
        (
            {"search": {"metric": "last:val/acc", "n_trials": 0, "params": {}}},
            "search.n_trials=0 must be at least 1",
        ),
    ],
)
def test_a_wrong_key_of_a_table_is_one_sentence(tmp_path, key, sentence):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(TABLE | key))
    said = wrong_command(tmp_path, str(path), f"paths.log_dir={tmp_path / 'logs'}")
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert not [*tmp_path.rglob("metrics.csv")]


def test_a_table_without_columns_has_one(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("rows: [{label: FedAvg, overrides: [gc=none]}, {label: GC-Fed}]")
    planned = make_plan(load(path), "full", Selection())
    assert [*planned.folders] == [("FedAvg", "result"), ("GC-Fed", "result")]
    assert [job.folder for job in planned.jobs.values()] == ["fedavg_result_s1", "gc-fed_result_s1"]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("rows: [{label: a}]\nseeds: [1]\nrows: [{label: b}]\n", "line 3 has the key rows again"),
        (
            "rows:\n- label: a\n  overrides: []\n  overrides: [gc=none]\n",
            "line 4 has the key overr",
        ),
    ],
)
def test_a_key_that_a_table_has_twice_is_refused(tmp_path, text, where):
    """YAML would take the last one, without a word."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(Refusal, match=rf"mine.yaml is no table: {where}"):
        load(path)


@pytest.mark.parametrize("text", ["- a\n- b\n", "- [a, b]\n", "hello\n"])
def test_a_table_without_keys_is_one_sentence(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(Refusal, match=r"mine.yaml is no table: it holds a .*, not keys with val"):
        load(path)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gcfed_table5", "scale"], "scale: write key=value, such as scale=small"),
        (["gcfed_table5", "seeds=[1,1]"], "seeds=[1, 1] must be a list without repetitions"),
        (
            ["gcfed_table5", "measure=last:test/acc"],
            "measure=last:test/acc: measure is a key of the table: set it in its YAML file.",
        ),
        (["gcfed_table5", "dry_run=1"], "dry_run=1 must be true or false."),
        (["gcfed_table5", "compare="], "compare= has no value."),
        (["gcfed_table5", "seeds=[1"], "seeds=[1: the value of seeds is no YAML."),
        (
            ["gcfed_table5", "--config-dir", "nowhere"],
            "config_dir=nowhere: there is no such folder",
        ),
        (["gcfed_table5", "--config-dir"], "config_dir has no value: name a folder"),
        (["gcfed_table5", "--config-dir="], "config_dir has no value: name a folder"),
        (["gcfed_table5", "--config-dir", "compare=true"], "config_dir=compare=true: there is no"),
        (["gcfed_table5", "rows="], "rows= has no value."),
        (["gcfed_table5", "seeds="], "seeds= has no value."),
        (["gcfed_table5", "scale="], "scale= must be full"),
        (["gcfed_table5", "search="], "search= has no value."),
        (["gcfed_table5", "rows=FedAvg"], "rows=FedAvg must be a list"),
        (["gcfed_table5", "search.n_trials=3"], "gcfed_table5 has no search that it could change"),
        (["gcfed_table5", "paths.log_dir=it's"], "paths.log_dir=it's: "),
        (["gcfed_table55"], "There is no table gcfed_table55. Did you mean gcfed_table5"),
        (["gcfed_table55"], "The package has fedacg_dirichlet, "),
        (["nowhere.yaml"], "nowhere.yaml: there is no such file in /"),
        (["--dry-run", "gcfed_table5"], "--dry-run: the table comes first"),
        (["gcfed_table5", "--dry-run"], "--dry-run: write key=value without dashes"),
        (["gcfed_table5", "dryrun=true"], "dryrun=true: did you mean dry_run?"),
        (["gcfed_table5", "seeds=[a]"], "seeds.0=a must be a whole number."),
    ],
)
def test_a_wrong_word_is_one_sentence(tmp_path, words, sentence):
    said = wrong_command(tmp_path, *words)
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_without_a_table_the_command_lists_them_and_help_shows_its_words(capsys):
    assert command.main([]) == 0
    listed = capsys.readouterr().out
    assert len(listed.splitlines()) == len(names())
    assert "gcfed_table5         GC-Fed, Table 5: severe heterogeneity" in listed
    assert command.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "--config-dir conf" in said
    example = said.partition("A my.yaml of your own:\n")[2]
    table = Table(name="my", **yaml.safe_load(example))
    assert table.own_seeds == [1, 2, 3]


def test_a_table_finds_methods_in_a_folder_of_the_users(tmp_path):
    """The run's process gets the folder."""
    algorithms = tmp_path / "conf/algorithm"
    algorithms.mkdir(parents=True)
    own = "# @package _global_\ndefaults: [fedavg, _self_]\nclient: {epochs: 7}\n"
    (algorithms / "mine.yaml").write_text(own)
    plain.logs = tmp_path / "logs"
    node = TABLE | {"rows": [{"label": "Mine", "overrides": ["algorithm=mine"]}]}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(node, allow_unicode=True))
    asked = command.request_of([str(path), "--config-dir", str(tmp_path / "conf"), "rounds=3"])
    table = load(path)
    (job,) = make_plan(table, "full", asked.selection, asked.arguments).jobs.values()
    cfg = composer(job.overrides)
    assert cfg.client.epochs == 7
    assert cfg.rounds == 3
    assert asked.changes_of(table) == ["rounds=3"]


@pytest.mark.slow
def test_a_table_from_the_command_line_names_failed_jobs_and_continues_with_more_rounds(tmp_path):
    words = [
        "rounds=2",
        "client.epochs=1",
        "participation.num_clients=8",
        "data.limit_train=200",
        "data.limit_test=50",
        "extras.figures=false",
        "trainer.devices=1",
    ]
    rows = [
        {"label": "broken", "overrides": ["participation.num_clients=300"]},
        {"label": "GC-Fed", "overrides": ["gc=gcfed"]},
    ]
    node = {"overrides": words, "rows": rows, "columns": [{"label": "digits"}]}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(node))

    def train(command):
        """Runs the command of a job in a fork, which needs no imports."""
        assert command[:3] == [sys.executable, "-c", running.TRAIN_COMMAND]
        code = forked(lambda: run_script("train.py", *command[3:]), tmp_path / "run.txt")
        print((tmp_path / "run.txt").read_text(), flush=True)
        return SimpleNamespace(returncode=code)

    def call(*arguments, code):
        def command():
            subprocess.run = train
            logs = f"paths.log_dir={tmp_path / 'logs'}"
            run_command(str(tmp_path / "tiny.yaml"), logs, *arguments)

        printed = tmp_path / "printed.txt"
        ended = forked(command, printed)
        assert ended == (code or 0), printed.read_text()
        return printed.read_text()

    said = call(code=1)
    assert "participation.num_clients=300 needs 300 training samples" in said, said
    assert "Not finished, 1 of 2 jobs:" in said
    run = read_run(tmp_path / "logs/study/tiny/full/gc-fed_digits_s1")
    assert run.state == "finished"
    assert run.rounds == 2

    assert "0 finished, 1 to continue, 0 to start" in call("rows=[gc-fed]", "rounds=3", code=0)
    longer = read_run(run.folder)
    assert longer.state == "finished"
    assert longer.rounds == 3
    assert longer.identity == run.identity
    assert longer.metrics.iloc[:2].equals(run.metrics)
