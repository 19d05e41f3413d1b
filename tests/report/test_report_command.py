"""``src/report.py`` as one types it, and what it says when there is nothing to report."""

import importlib.util
import os
import subprocess
import sys

import pytest
from run_folders import rows_of, write_run

from gcfed.report import gallery
from gcfed.report.build import Incomplete, report, root_names, shown
from gcfed.report.groups import grouped
from gcfed.report.runs import find_runs
from gcfed.utils.resolvers import ROOT


def write_runs(root):
    """A corner of GC-Fed's Table 5, short, and a failed run."""
    for gc, level in (("none", 0.4), ("gcfed", 0.6)):
        for seed in (1, 2):
            config = {
                "seed": seed, "tags": {"data": "cifar10", "model": "cnn", "algorithm": "fedavg", "gc": gc},
                "participation": {"num_clients": 100, "per_round": 5}, "partition.alpha": 0.05,
                "gc": {"boundary": "fc2", "mean": "out", "tensors": "weights", "lam": None},
            }  # fmt: skip
            write_run(root / f"{gc}_{seed}", config=config, rows=rows_of([0.1, level, level + seed / 100]))
    write_run(root / "failed", config={"rounds": 9}, rows=rows_of([0.2]), failure="OSError: disk full\nTraceback")


def config(folder, **changed):
    base = {"roots": [str(folder / "logs")], "out": str(folder / "out"), "papers": None, "measures": None}
    return base | {"figures": False, "formats": ["png"]} | changed


def test_as_a_user_types_it(tmp_path):
    write_runs(tmp_path / "logs" / "a")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    code = (
        "import atexit, runpy, sys; sys.argv[0] = 'src/report.py'\n"
        "atexit.register(lambda: print('with torch' if 'torch' in sys.modules else 'without torch'))\n"
        f"runpy.run_path({str(ROOT / 'src' / 'report.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "out=logs/report"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "5 runs in 3 settings: 4 finished, 1 failed" in done.stdout
    assert "2 of 117 cells" in " ".join(done.stdout.split())
    assert done.stdout.rstrip().endswith("without torch")
    out = tmp_path / "logs" / "report"
    text = (out / "report.md").read_text()
    assert "| FedAvg | – | <ins>30.50 (0.24) [2]</ins> ≠ | – |" in text
    for wanted in ("GC-Fed, Table 5", "python src/train.py", "after round 1 of 9: OSError: disk full", "](figures/"):
        assert wanted in text, wanted
    assert "<html" in (out / "index.html").read_text()
    for name in ("gcfed_table5", "runs"):
        assert {path.suffix for path in out.glob(f"tables/{name}.*")} == {".md", ".tex", ".csv"}
    assert list(out.glob("figures/*.png"))
    assert list(out.glob("figures/*.pdf"))
    written = [path for path in out.rglob("*") if path.suffix in (".md", ".tex", ".csv", ".html")]
    assert [path for path in written if str(tmp_path) in path.read_text()] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]  # nothing but the report


def test_a_second_report_reads_the_same_runs(tmp_path, capsys):
    write_runs(tmp_path / "logs")
    cfg = config(tmp_path, out=str(tmp_path / "logs" / "report"))
    page = report(cfg)
    assert page == tmp_path / "logs" / "report" / "index.html"
    first = (page.parent / "report.md").read_text()
    report(cfg)
    second = (page.parent / "report.md").read_text()
    assert first.partition("Written")[0] == second.partition("Written")[0]
    assert first.partition("##")[2] == second.partition("##")[2]
    assert "5 runs in 3 settings" in capsys.readouterr().out


def test_the_papers_that_were_asked_for(tmp_path):
    write_runs(tmp_path / "logs")
    report(config(tmp_path, papers=["gcfed_table2", "gcfed_table5"], measures=["max:test/acc"]))
    tables = {path.stem for path in (tmp_path / "out" / "tables").iterdir()}
    assert tables == {"gcfed_table2", "gcfed_table5", "max_test_acc", "runs"}
    report(config(tmp_path, out=str(tmp_path / "one"), papers="gcfed_table2", measures="max:test/acc"))
    assert {path.stem for path in (tmp_path / "one" / "tables").iterdir()} == tables - {"gcfed_table5"}
    report(config(tmp_path, out=str(tmp_path / "all"), roots=str(tmp_path / "logs")))
    tables = {path.stem for path in (tmp_path / "all" / "tables").iterdir()}
    assert "gcfed_table5" in tables
    assert "gcfed_table2" not in tables


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"roots": ["nowhere"]}, FileNotFoundError, "roots=nowhere: there is no such folder"),
        ({"roots": []}, ValueError, r"There is no run below roots=\[\]"),
        ({"papers": ["gcfed_table99"]}, FileNotFoundError, "gcfed_table5"),
        ({"roots": None}, ValueError, r"There is no run below roots=\[\]"),
        ({"measures": ["median:x"]}, ValueError, "'median:x' is not understood"),
        ({"figures": True, "formats": ["doc"]}, ValueError, "formats: figures cannot be written as doc, but as .*png"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, monkeypatch, changed, error, said):
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path / "logs")
    with pytest.raises(error, match=said):
        report(config(tmp_path, **changed))
    assert not (tmp_path / "out").exists()


def test_a_measure_that_no_run_has_costs_nothing_else(tmp_path):
    write_runs(tmp_path / "logs")
    with pytest.raises(Incomplete, match="lacks: measures: no run has max:test/nothing"):
        report(config(tmp_path, measures=["max:test/nothing", "max:test/acc"], papers=()))
    assert {path.stem for path in (tmp_path / "out" / "tables").iterdir()} == {"max_test_acc", "runs"}
    for name in ("index.html", "report.md"):
        assert "no run has max:test/nothing" in (tmp_path / "out" / name).read_text()


def test_while_nothing_has_ended_the_runs_are_listed(tmp_path):
    write_run(tmp_path / "logs" / "a", config={"rounds": 9}, rows=rows_of([0.2]), summary=False)
    with pytest.raises(Incomplete, match="last:test/acc: no run has come to its end yet"):
        report(config(tmp_path, measures=["last:test/acc"]))
    assert "after round 1 of 9" in (tmp_path / "out" / "report.md").read_text()


def test_a_figure_that_fails_costs_no_other(tmp_path, monkeypatch, caplog):
    def fails(groups, path):
        path.touch()
        raise KeyError("test/acc")

    write_runs(tmp_path / "logs")
    odd = gallery.Entry("odd", "Odd <figure>", "", fails)
    monkeypatch.setattr(gallery, "FIRST", (odd, *gallery.FIRST[:1]))
    monkeypatch.setattr(gallery, "families_of", lambda groups: {})
    with pytest.raises(Incomplete, match=r"The report lacks: Figure 'Odd <figure>': KeyError: 'test/acc'") as error:
        report(config(tmp_path, figures=True, formats=None, papers="gcfed_table5"))
    assert isinstance(error.value.__cause__, KeyError)
    assert "'Odd <figure>' cannot be drawn" in caplog.text
    out = tmp_path / "out"
    assert [path.name for path in (out / "figures").iterdir()] == ["dynamics.png"]
    assert (out / "tables" / "gcfed_table5.csv").is_file()
    assert "Odd &lt;figure>" in (out / "report.md").read_text()
    assert "Odd &lt;figure&gt;" in (out / "index.html").read_text()


def test_nothing_of_an_older_report_stays(tmp_path, monkeypatch):
    write_runs(tmp_path / "logs")
    monkeypatch.setattr(gallery, "FIRST", gallery.FIRST[:1])
    monkeypatch.setattr(gallery, "families_of", lambda groups: {})
    report(config(tmp_path, figures=True, measures="max:test/acc", papers=()))
    out = tmp_path / "out"
    own = [out / "tables" / "notes.md", out / "mine.txt"]
    for path in own:
        path.write_text("a user's own")
    (out / ".written").write_text((out / ".written").read_text() + "mine.txt\n../logs/none_1/summary.json\ntables/..\n")
    report(config(tmp_path, measures="last:test/acc", papers=()))
    assert not (out / "figures").exists()
    assert {path.stem for path in (out / "tables").iterdir()} == {"last_test_acc", "runs", "notes"}
    assert all(path.is_file() for path in (*own, tmp_path / "logs" / "none_1" / "summary.json"))


def test_nothing_found_and_no_place_to_write(tmp_path):
    (tmp_path / "logs").mkdir()
    with pytest.raises(ValueError, match=r"There is no run below .*logs: a run's folder holds config.yaml"):
        report(config(tmp_path))
    write_runs(tmp_path / "logs")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file; name a folder"):
        report(config(tmp_path, out=str(tmp_path / "file")))


def test_folders_are_shown_below_their_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_runs(tmp_path / "logs" / "x")
    run = find_runs([tmp_path])[0]
    logs = str(tmp_path / "logs")
    assert shown(run, (logs,)) == shown(run, ("logs",)) == "x/failed"
    assert shown(run, (str(tmp_path / "logs" / "x" / "failed"), logs)) == "failed"
    assert shown(run, ("src", logs)) == shown(run, ("src", "logs")) == "logs/x/failed"
    assert shown(run, ("src",)) == "failed"


def test_roots_are_named_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert root_names(["logs/study", "logs"]) == ["logs/study", "logs"]
    assert root_names(["/a/b/out", "/a/c/out", "/a/runs"]) == ["b/out", "c/out", "runs"]
    assert root_names(["/a/out", "/a/out", "../x"]) == ["out", "out", "x"]


def test_the_benchmark_writes_runs_as_runs_are(tmp_path):
    spec = importlib.util.spec_from_file_location("benchmark", ROOT / "benchmarks" / "report.py")
    assert spec
    assert spec.loader
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    benchmark.write_runs(tmp_path, 22, 4)
    runs = find_runs([tmp_path])
    assert [run.state for run in runs] == ["unfinished", *["finished"] * 21]
    assert [len(group.runs) for group in grouped(runs)] == [3] * 7 + [1]
    assert all(len(run.curve("test/acc")[0]) == 4 for run in runs)
