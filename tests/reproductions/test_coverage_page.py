"""The page of all tables and figures of the papers is complete, and its commands compose."""

import re
from collections import Counter
from functools import cache

import pytest

from gcfed.check import check
from gcfed.folders.identity import leaves
from gcfed.tables.plan import make_plan
from gcfed.tables.reading import CATALOG, load, names
from gcfed.tables.records import Selection
from gcfed.utils.resolvers import ROOT

PAGE = ROOT / "reproductions/results/coverage.md"
VERDICTS = ["reproduced", "trend", "fails", "not run"]
#: What has numbers or curves: explanations and lists of symbols are left out.
NUMBERED = {
    "GC-Fed": "Table 2,4,5,6,7,8; Figure 1b,4,6,7,9,10",
    "FedACG": "Table 1a,1b,2,3,4,5,6,7,8; Figure 2",
    "FedGC": "Table 1,2,3,4; Figure 2,3,5,6,7",
    "SSF": "Table 2,3,4,5; Figure 1,2,3,4",
}


def sections():
    """{heading: rows of its table, as lists of cells}."""
    found = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        lines = re.findall(r"^\|(.*)\|$", body, re.MULTILINE)[2:]
        found[heading] = [[cell.strip() for cell in line.split("|")] for line in lines]
    return found


def commands():
    """The words of each command of the page: a table and its scale."""
    return sorted(
        {row[1].strip("`") for rows in sections().values() for row in rows if len(row) == 6}
    )


def test_each_table_and_figure_of_the_papers_has_one_row():
    for paper, text in NUMBERED.items():
        wanted = []
        for group in text.split("; "):
            kind, _, numbers = group.partition(" ")
            wanted += [f"{kind} {number}" for number in numbers.split(",")]
        assert [row[0].partition(",")[0] for row in sections()[paper]] == wanted


def test_the_verdicts_are_counted_in_the_answer():
    rows = [row for paper in NUMBERED for row in sections()[paper]]
    count = Counter(row[4] for row in rows)
    assert {*count} <= {*VERDICTS}
    answer = re.search(
        r"There are (\d+) .*?\. None is reproduced.*\. (\d+) .*, (\d+) fail, (\d+) ha\w+ not",
        PAGE.read_text(),
    )
    assert [int(text) for text in answer.groups()] == [
        len(rows),
        count["trend"],
        count["fails"],
        count["not run"],
    ]
    assert not count["reproduced"]
    for name, _, ran, seeds, verdict, page in rows:
        assert (seeds == "–") == (verdict == "not run"), name
        assert (ran == "–") <= (verdict == "not run"), name
        assert (page == "–") <= (verdict == "not run"), name


def test_each_table_of_a_paper_is_on_the_page():
    """Ours (``# Ours: …``) and open questions have pages of their own."""
    listed = {words.split()[0] for words in commands()}
    assert len(listed) >= 30
    ours = {f"{path.relative_to(ROOT)}": path for path in ROOT.glob("reproductions/tables/*.yaml")}
    for name, path in ours.items() | {(name, CATALOG / f"{name}.yaml") for name in names()}:
        head = path.read_text().partition("\n")[0]
        if re.match(r"# (GC-Fed|FedACG|FedGC|SSF)\b[^:]*, (Table|Figure|Section) ", head):
            assert name in listed
    assert listed <= {*ours, *names()}


@pytest.fixture(scope="module")
def table():
    """A table by its name, or by its path in this repository."""
    return cache(lambda name: load(ROOT / name if "/" in name else name))


@pytest.mark.parametrize("command", commands())
def test_each_command_of_the_page_composes(config, table, command):
    name, *words = command.split()
    scale = dict(word.split("=") for word in words).get("scale", "full")
    jobs = make_plan(table(name), scale, Selection()).jobs
    first = next(iter(jobs.values()))
    check(config(*first.overrides))


def test_the_scale_of_50_classes_is_the_planned_command(config, table):
    """Its cells are the runs of the plan on tinyimagenet-vgg11.md."""
    jobs = make_plan(table("gcfed_table6"), "tiny50", Selection(), ["precision=bf16-mixed"]).jobs
    assert len(jobs) == 4
    page = (ROOT / "reproductions/results/tinyimagenet-vgg11.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"DATA_DIR=data/tiny50 python src/train\.py -m (.*)", page)
    planned = [word for word in line.split() if not word.startswith(("gc=", "seed="))]
    for job in jobs.values():
        (gc,) = [word for word in job.overrides if word.startswith("gc=")]
        theirs = config(*planned, gc, f"seed={job.seed}")
        ours = config(*job.overrides)
        assert leaves(ours) == leaves(theirs)
        assert ours.rounds == theirs.rounds
        assert ours.eval_every == theirs.eval_every
        assert str(ours.paths.data_dir).endswith("data/tiny50")
