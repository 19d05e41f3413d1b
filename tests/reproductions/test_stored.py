"""The stored data of the pages of results: small, complete, and equal to what is printed."""

import re
import subprocess

import matplotlib
import pandas as pd
import pytest
from matplotlib.figure import Figure
from run_folders import accuracies, write_run

from gcfed.check import check
from gcfed.utils.resolvers import ROOT
from reproductions import store, stored
from reproductions.results import figures, printed
from reproductions.results.cells import last

PAGES = ROOT / "reproductions/results"
WITH_DATA = sorted(folder.name for folder in stored.DATA.iterdir())


def test_the_stored_files_are_small_and_those_that_are_listed():
    assert stored.stored_bytes() <= stored.LIMIT
    assert len(WITH_DATA) >= 2
    for page in WITH_DATA:
        runs = stored.stored_runs(page)
        files = {path.name for path in (stored.DATA / page).iterdir()}
        assert files == {stored.RUNS, *(run.path.name for run in runs.values())}
        for run in runs.values():
            assert len(run.metrics) > 1, run.path


@pytest.mark.parametrize("page", WITH_DATA)
def test_the_commands_of_stored_runs_are_accepted(config, page):
    """Of runs whose overrides differ in numbers only, one is checked."""
    by_words = {}
    for run in stored.stored_runs(page).values():
        without_numbers = re.sub(r"(?<==)[\d.e+-]+(?= |$)", "#", " ".join(run.overrides))
        by_words[without_numbers] = run.overrides
    for overrides in by_words.values():
        check(config(*overrides))


@pytest.mark.parametrize("page", WITH_DATA)
def test_the_printed_numbers_are_those_of_the_stored_data(page):
    text = (PAGES / f"{page}.md").read_text()
    assert printed.rewritten(page, text) == text


def test_each_marked_table_has_a_function_and_each_page_with_data_a_table():
    marked = {
        (path.stem, name)
        for path in PAGES.glob("*.md")
        for name in re.findall(r"<!-- data: (.*?) -->", path.read_text())
    }
    assert marked == {*printed.TABLES}
    assert {page for page, _ in marked} == {*WITH_DATA}


@pytest.mark.parametrize(("page", "name"), printed.TABLES)
def test_every_cell_of_the_data_is_compared(page, name):
    """A wrong number in a cell that the data give is mended. Other cells stay."""
    text = (PAGES / f"{page}.md").read_text()
    cells = printed.TABLES[page, name](stored.stored_runs(page))
    assert cells
    wrong = text
    start = text.index(f"<!-- data: {name} -->")
    for head, row in cells.items():
        begin = wrong.index(f"\n| {' | '.join(head)} |", start) + 1
        line = wrong[begin : wrong.index("\n", begin)]
        new = [cell.strip() for cell in line.strip("|").split("|")]
        for i, cell in enumerate(row, start=len(head)):
            if cell is not None:
                new[i] = "wrong"
        wrong = wrong[:begin] + f"| {' | '.join(new)} |" + wrong[begin + len(line) :]
    assert wrong.count("wrong") - text.count("wrong") == sum(
        cell is not None for row in cells.values() for cell in row
    )
    assert printed.rewritten(page, wrong).replace("**", "") == text.replace("**", "")


def test_a_missing_table_and_a_missing_row_are_named():
    text = (PAGES / "coherence.md").read_text()
    with pytest.raises(ValueError, match=r"coherence\.md, table agreement: there is no row"):
        printed.rewritten("coherence", text.replace("| Global GC | 1 |", "| Global GC | 2 |"))
    with pytest.raises(ValueError, match=r"coherence\.md has no table below <!-- data: agree"):
        printed.rewritten("coherence", text.replace("<!-- data: agreement -->", ""))


def test_the_curves_are_those_of_the_stored_data():
    matplotlib.use("agg")
    figure = Figure()
    figures.table5(figure)
    (axes,) = figure.axes
    run = printed.of_table5(stored.stored_runs("gcfed-table5"), "GC-Fed", 2, clipped=False)
    last_50 = last(run, 50)
    ends = [line.get_ydata()[-1] for line in axes.lines if len(line.get_ydata()) > 100]
    assert len(ends) == 6  # two seeds and their mean, of two methods
    assert any(end == pytest.approx(last_50) for end in ends)


@pytest.fixture
def empty(monkeypatch, tmp_path):
    """A folder for stored data without any, in the place of the project's."""
    monkeypatch.setattr(stored, "DATA", tmp_path / "data")
    monkeypatch.setattr(store, "ROOT", tmp_path)
    monkeypatch.setattr(store, "_git", lambda *words: "0123abcd" if words[0] != "status" else "")
    page = tmp_path / "reproductions/results/mine.md"
    page.parent.mkdir(parents=True)
    page.touch()
    return tmp_path


def finished_run(folder, command="seed=2 algorithm=fedprox paths.log_dir=/a/b", rows=None):
    rows = rows or accuracies(0.123456789, 0.5, 0.75)
    for number, row in enumerate(rows):
        row["time/round_s"] = 0.1 * number
    write_run(folder, rows, summary={"rounds": len(rows)}, seed=2, rounds=len(rows))
    config = folder / "config.yaml"
    config.write_text(f"# python src/train.py {command}\n{config.read_text()}")
    return folder


def test_a_stored_run_has_its_rounded_metrics_its_command_and_its_commit(empty):
    folder = finished_run(empty / "logs/run")
    store.main(["mine", str(empty / "logs")])
    (run,) = stored.stored_runs("mine").values()
    assert run.name == "algorithm=fedprox,seed=2"
    assert run.overrides == ("seed=2", "algorithm=fedprox")
    assert run.commit == "0123abcd"
    assert [*run.curve("test/acc")] == [0.123457, 0.5, 0.75]
    assert not [column for column in run.metrics if column.startswith("time/")]
    first = run.path.read_bytes()
    store.main(["mine", str(folder)])
    assert run.path.read_bytes() == first
    assert str(empty) not in (empty / "data/mine/runs.yaml").read_text()


def test_a_second_run_is_added_beside_the_first(empty):
    finished_run(empty / "logs/run")
    finished_run(empty / "logs/other", "seed=2 algorithm=scaffold")
    store.main(["mine", str(empty / "logs")])
    runs = stored.stored_runs("mine")
    assert [run.name for run in stored.chosen(runs, "seed=2")] == [
        "algorithm=fedprox,seed=2",
        "algorithm=scaffold,seed=2",
    ]
    with pytest.raises(ValueError, match="no stored run has algorithm=fedavg"):
        stored.chosen(runs, "algorithm=fedavg")


def test_runs_that_were_stopped_are_stored_up_to_a_common_round(empty):
    for name, seed, rounds in (("a", 1, 3), ("b", 2, 2)):
        rows = accuracies(0.25, 0.5, 0.75)[:rounds]
        folder = finished_run(empty / "logs" / name, f"seed={seed}", rows)
        (folder / "summary.json").unlink()
    with pytest.raises(ValueError, match="there is no run that has ended"):
        store.main(["mine", str(empty / "logs")])
    with pytest.raises(ValueError, match="b has 2 rounds, fewer than until=3"):
        store.main(["mine", str(empty / "logs"), "until=3"])
    with pytest.raises(ValueError, match="until=last must be a round"):
        store.main(["mine", str(empty / "logs"), "until=last"])
    store.main(["mine", str(empty / "logs"), "until=2"])
    runs = stored.stored_runs("mine").values()
    assert [[*run.curve("test/acc")] for run in runs] == [[0.25, 0.5]] * 2


def test_wrong_arguments_end_in_a_sentence(empty, monkeypatch):
    folder = str(finished_run(empty / "logs/run"))
    with pytest.raises(ValueError, match="Name a page and at least one folder"):
        store.main(["mine"])
    with pytest.raises(ValueError, match=r"has no page yours\.md"):
        store.main(["yours", folder])
    (empty / "none").mkdir()
    with pytest.raises(ValueError, match="there is no run that has ended"):
        store.main(["mine", str(empty / "none")])
    monkeypatch.setattr(stored, "LIMIT", 10)
    with pytest.raises(ValueError, match="10 are allowed: remove runs"):
        store.main(["mine", folder])


def test_a_run_without_a_command_and_an_unknown_commit_are_refused(empty, monkeypatch):
    folder = finished_run(empty / "logs/run")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("# python src/train.py", "# made from Python"))
    with pytest.raises(ValueError, match="must begin with its command"):
        store.main(["mine", str(folder)])

    def unknown(*words):
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(store, "_git", unknown)
    with pytest.raises(ValueError, match="commit=abc is no commit of this repository"):
        store.main(["mine", str(folder), "commit=abc"])


def test_changed_sources_need_a_commit(empty, monkeypatch):
    monkeypatch.setattr(store, "_git", lambda *words: " M src/gcfed/run.py")
    with pytest.raises(ValueError, match="src or configs have changes"):
        store.main(["mine", str(finished_run(empty / "logs/run"))])


def test_a_name_that_is_too_long_is_the_folders(empty):
    long = [f"a{number}=1" for number in range(40)]
    assert store.name_of(long, empty / "fedavg_s1") == "fedavg_s1"


def test_two_runs_of_one_name_are_refused(empty):
    long = " ".join(f"a{number}=1" for number in range(40))
    store.main(["mine", str(finished_run(empty / "x/fedavg_s1", f"{long} seed=2"))])
    other = finished_run(empty / "y/fedavg_s1", f"{long} a=5 seed=2")
    with pytest.raises(ValueError, match="mine has another run fedavg_s1: rename the folder"):
        store.main(["mine", str(other)])


def test_numbers_that_are_not_finite_or_not_measured_come_back(empty):
    frame = pd.DataFrame(
        {"test/acc": [0.5, None], "train/loss": [1e-9, float("inf")]},
        index=pd.Index([1, 2], name="round"),
    )
    run = stored.StoredRun("one", ("seed=1",), "0123abcd", empty)
    stored.write_run("mine", run, frame)
    back = stored.stored_runs("mine")["one"].metrics
    pd.testing.assert_frame_equal(back, frame)
