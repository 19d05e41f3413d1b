"""``src/report.py`` as one types it, and what it says when there is nothing to report."""

import os
import re
import subprocess
import sys

import pytest
from run_folders import curve, write_run

from gcfed.report import drawing
from gcfed.report.build import Incomplete, report
from gcfed.utils.resolvers import ROOT

EVIL = "<script>alert(1)</script>"


def write_runs(root):
    for seed in (1, 2):
        write_run(root / f"none_{seed}", curve(0.4, 4, seed), "data=digits gc=none rounds=4", seed=seed)
    write_run(root / "gcfed", curve(0.6, 4), "data=digits gc=gcfed rounds=4")
    failure = f"OSError: {EVIL}\nTraceback"
    write_run(root / "failed", curve(0.4, 2), "data=digits gc=none rounds=9", failure=failure)
    write_run(root / "debug" / "run", curve(0.1, 4), "data=digits gc=none rounds=4", seed=9)


def config(folder, **changed):
    base = {"roots": [str(folder / "logs")], "out": str(folder / "out"), "papers": [], "measures": None, "empty": False}
    return base | {"figures": False, "formats": ["png"]} | changed


def tables(folder):
    return {path.stem for path in (folder / "tables").iterdir()}


def test_as_a_user_types_it(tmp_path):
    write_runs(tmp_path / "logs" / "a")
    table5 = "experiment=cifar10_cnn_gcfed partition.alpha=0.05"
    write_run(tmp_path / "logs" / "b", curve(0.5, 2), table5, ended=False)
    code = (
        "import atexit, runpy, sys; sys.argv[0] = 'src/report.py'\n"
        "atexit.register(lambda: print('with torch' if 'torch' in sys.modules else 'without torch'))\n"
        f"runpy.run_path({str(ROOT / 'src' / 'report.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "roots=[logs]", "papers=[gcfed_table5]"],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "5 runs of 4 settings: 3 finished, 1 failed, 1 unfinished" in done.stdout
    assert done.stdout.rstrip().endswith("without torch")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]  # nothing but the report
    out = tmp_path / "logs" / "report"
    assert tables(out) == {"best", "federation_1", "gcfed_table5", "targets", "runs"}  # a debug run is no run
    assert {path.suffix for path in out.glob("tables/runs.*")} == {".md", ".tex", ".csv"}
    assert {path.suffix for path in out.glob("figures/test_acc_1.*")} == {".png", ".pdf"}
    assert "after round 2 of 9: OSError: &lt;script>" in (out / "report.md").read_text()
    written = [path for path in out.rglob("*") if path.suffix in (".md", ".tex", ".csv", ".html")]
    assert [path for path in written if str(tmp_path) in path.read_text()] == []

    page = (out / "index.html").read_text()  # which needs no other file, and whose links lead somewhere
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.index("Best of each federation") < page.index("<img") < page.index("federation_1.csv")
    assert all(source.startswith("data:image/png;base64,") for source in re.findall('src="([^"]*)"', page))
    for link in re.findall('href="([^"]*)"', page):
        assert f'id="{link[1:]}"' in page if link.startswith("#") else (out / link).is_file(), link


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"roots": ["nowhere"]}, FileNotFoundError, "roots=nowhere: there is no such folder"),
        ({"roots": None}, ValueError, r"There is no run below roots=\[\]"),
        ({"papers": ["gcfed_table99"]}, FileNotFoundError, "gcfed_table5"),
        ({"measures": ["median:x"]}, ValueError, "'median:x' is not understood"),
        ({"out": "file"}, ValueError, "out=file is a file; name a folder"),
    ],
)
def test_what_cannot_be_is_said(tmp_path, monkeypatch, changed, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "logs").mkdir()
    with pytest.raises(error, match=message):
        report(config(tmp_path, **changed))
    assert not (tmp_path / "out").exists()


def test_what_is_lacking_is_named_and_the_rest_is_there(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise KeyError("test/acc")

    write_runs(tmp_path / "logs")
    monkeypatch.setattr(drawing, "curves", fails)
    monkeypatch.setattr(drawing, "bars", fails)
    lacks = "no finished run has the measures max:test/nothing"
    with pytest.raises(Incomplete, match=rf"{lacks}.*KeyError: 'test/acc'"):
        report(config(tmp_path, figures=True, measures=["max:test/nothing", "max:test/acc"]))
    assert tables(tmp_path / "out") == {"best", "federation_1", "targets", "runs"}
    assert all(lacks in (tmp_path / "out" / name).read_text() for name in ("index.html", "report.md"))


def test_the_papers_that_were_asked_for_while_nothing_has_ended(tmp_path):
    table5 = "experiment=cifar10_cnn_gcfed partition.alpha=0.05"
    write_run(tmp_path / "logs" / "a", curve(0.5, 2), table5, ended=False)
    out = tmp_path / "out"
    for changed, names in (
        ({"papers": "gcfed_table2"}, set()),
        ({"papers": None}, {"gcfed_table5"}),
        ({"papers": ["gcfed_table2"], "empty": True}, {"gcfed_table5", "gcfed_table2", "gcfed_table2_small"}),
    ):
        report(config(tmp_path, **changed))
        assert tables(out) == {"runs"} | names
    assert "after round 2 of 800" in (out / "report.md").read_text()
