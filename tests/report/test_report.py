"""``src/report.py`` as one types it, and what it says when there is nothing to report."""

import os
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest
from run_folders import curve, write_run

from gcfed.report import drawing, figures, write_report
from gcfed.report.build import Incomplete
from gcfed.utils.resolvers import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = "<script>alert(1)</script>"


def write_runs(root):
    for seed in (1, 2):
        write_run(root / f"none_{seed}", curve(0.4, 4, seed), "data=digits gc=none rounds=4", seed=seed)
    write_run(root / "gcfed", curve(0.6, 4), "data=digits gc=gcfed rounds=4")
    failure = f"OSError: {EVIL}\nTraceback"
    write_run(root / "failed", curve(0.4, 2), "data=digits gc=none rounds=9", failure=failure)
    write_run(root / "debug" / "run", curve(0.1, 4), "data=digits gc=none rounds=4", seed=9)


def report_of(folder, roots=("logs",), **changed):
    options = {"figures": False, "formats": ["png"]} | changed
    return write_report(*(folder / root for root in roots), **{"out": folder / "out"} | options)


def tables(folder):
    return {path.stem for path in (folder / "tables").iterdir()}


def test_as_a_user_types_it(tmp_path):
    write_runs(tmp_path / "logs" / "a")
    table5 = "experiment=cifar10_cnn_gcfed partition.alpha=0.05"
    write_run(tmp_path / "logs" / "b", curve(0.5, 2), table5, ended=False)
    (folder := tmp_path / "elsewhere").mkdir()
    code = (
        "import atexit, runpy, sys; sys.argv[0] = 'src/report.py'\n"
        "atexit.register(lambda: print('with torch' if 'torch' in sys.modules else 'without torch'))\n"
        f"runpy.run_path({str(ROOT / 'src' / 'report.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"paths.log_dir={tmp_path}/logs"],
        cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "5 runs of 4 settings: 3 finished, 1 failed, 1 unfinished" in done.stdout
    assert done.stdout.rstrip().endswith("without torch")
    assert [*folder.iterdir()] == []  # nothing but the report, where the runs are
    out = tmp_path / "logs" / "report"
    assert tables(out) == {"federation_1", "runs"}  # a debug run is no run
    assert {path.suffix for path in out.glob("tables/runs.*")} == {".md", ".tex", ".csv"}
    assert {path.suffix for path in out.glob("figures/comparison_1.*")} == {".png", ".pdf"}
    assert "after round 2 of 9: OSError: &lt;script>" in (out / "report.md").read_text()
    written = [path for path in out.rglob("*") if path.suffix in (".md", ".tex", ".csv", ".html")]
    assert [path for path in written if str(tmp_path) in path.read_text()] == []

    page = (out / "index.html").read_text()  # which needs no other file, and whose links lead somewhere
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    answer = "GC-Fed +20.0 points over FedAvg"
    assert page.index(answer) < page.index("<img") < page.index("<table") < page.index("federation_1.csv")
    assert answer in (out / "report.md").read_text()
    assert page.index('id="singles"') > page.index("federation_1.csv")  # at the end, folded
    assert "<details><summary>2 settings in 2 federations" in page
    assert all(source.startswith("data:image/png;base64,") for source in re.findall('src="([^"]*)"', page))
    for link in re.findall('href="([^"]*)"', page):
        assert f'id="{link[1:]}"' in page if link.startswith("#") else (out / link).is_file(), link


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"roots": ["nowhere"]}, FileNotFoundError, "roots=.*nowhere: there is no such folder"),
        ({"roots": []}, ValueError, "There is no run below .*logs"),
        ({"measures": ["median:x"]}, ValueError, "'median:x' is not understood"),
        ({"out": "file"}, ValueError, "out=file is a file; name a folder"),
        ({"measures": 5}, ValueError, "measures=5: "),
        ({"figures": "most"}, ValueError, "figures=most: "),
    ],
)
def test_what_cannot_be_is_said(tmp_path, monkeypatch, changed, error, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gcfed.report.build.ROOT", tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "logs").mkdir()
    with pytest.raises(error, match=message):
        report_of(tmp_path, **changed)
    assert not (tmp_path / "out").exists()


def test_what_is_lacking_is_named_and_the_rest_is_there(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise KeyError("test/acc")

    write_runs(tmp_path / "logs")
    monkeypatch.setattr(drawing, "curves", fails)
    monkeypatch.setattr(drawing, "seeds", fails)
    lacks = "no finished run has the measures max:test/nothing"
    with pytest.raises(Incomplete, match=rf"{lacks}.*KeyError: 'test/acc'"):
        report_of(tmp_path, figures=True, measures=["max:test/nothing", "max:test/acc"])
    assert tables(tmp_path / "out") == {"federation_1", "runs"}
    assert all(lacks in (tmp_path / "out" / name).read_text() for name in ("index.html", "report.md"))


def test_what_a_search_tried_is_no_method_and_what_stands_alone_is_not_the_best(tmp_path, unrendered):
    write_runs(tmp_path / "logs")
    search = tmp_path / "logs" / "search"
    for folder, lr in (("trial_0000", 0.1), ("trial_0001/seed_1", 0.2)):  # several seeds a trial
        write_run(search / folder, curve(0.9, 4), f"data=digits gc=none rounds=4 client.optimizer.lr={lr}")
    (search / "trials.csv").write_text("number,value\n0,0.5\n1,0.6\n")
    (search / "optimization_results.yaml").write_text("metric: max:test/acc\n")
    page = report_of(tmp_path, figures=True)
    assert {path.stem for path in (tmp_path / "out" / "figures").iterdir()} >= {"comparison_1", "trials_1"}
    methods = pd.concat(map(pd.read_csv, (tmp_path / "out" / "tables").glob("federation_*.csv")))["method"]
    assert set(methods) == {"FedAvg", "GC-Fed"}
    assert "6 runs of 3 settings: 5 finished, 1 failed; 2 are trials of searches" in page.read_text()
    assert len(pd.read_csv(tmp_path / "out" / "tables" / "runs.csv")) == 6

    write_run(tmp_path / "alone" / "a", curve(0.9, 4), "data=digits gc=none rounds=4")
    report_of(tmp_path, ["alone"])
    assert "**" not in (tmp_path / "out" / "report.md").read_text()
    assert re.search(r'class="answer">FedAvg: \d\d\.\d\d ', (tmp_path / "out" / "index.html").read_text())


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium")
def test_the_comparison_fits_on_a_telephone_by_day_and_by_night(tmp_path, monkeypatch):
    from playwright.sync_api import sync_playwright

    monkeypatch.setattr(figures, "FEDERATIONS", 0)  # no figure but that of the comparison

    for seed in (1, 2, 3):
        for gc in ("none", "local", "gcfed gc.lam=0.25", "gcfed gc.lam=0.75"):
            rows = curve(0.3 + len(gc) / 50, 4, seed)
            write_run(tmp_path / "logs" / f"{gc}_{seed}", rows, f"data=digits rounds=4 gc={gc}", seed=seed)
    address = report_of(tmp_path, figures=True).as_uri()
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
            page.goto(address)
            assert page.evaluate("document.documentElement.scrollWidth") == 390
            table = page.locator(".pair .scroll").first
            assert table.evaluate("e => e.scrollWidth - e.clientWidth") == 0
            figure = page.locator(".pair img").first.bounding_box()
            assert figure["y"] + figure["height"] < table.bounding_box()["y"] < 844  # on the first screen
            colors = page.evaluate("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
            ink, paper = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
            assert abs(ink - paper) > 500
            assert (paper < 100) == (scheme == "dark")
        browser.close()
