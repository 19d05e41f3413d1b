"""The pages of results: their form, and that each command on them, and each command for a table, is accepted."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from gcfed.check import check
from gcfed.utils.compose import shorthand
from gcfed.utils.resolvers import ROOT
from reproductions.tables import Part, load, plan

RESULTS = ROOT / "reproductions/results"
PAGES = sorted(RESULTS.glob("[!R]*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_it_asked_found_and_does_not_show(page):
    """In one order; its answer is short, and the page of claims leads to it."""
    text = page.read_text()
    parts = ["**Question.**", "**Answer.**", "**Plan.**", "\n| ", "## How it was made", "## What it does not show"]
    if page.stem == "scaffold-vgg11":
        parts.remove("\n| ")  # one run, and no table
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert len(re.search(r"\*\*Answer\.\*\* (.*)", text)[1].split()) <= 25
    assert f"({page.name}" in (RESULTS / "README.md").read_text()


def test_each_claim_is_short_and_says_how_sure_it_is():
    page = (RESULTS / "README.md").read_text()
    claims = re.findall(r"^\| (.*) \| (.*) \| (.*) \| (\[.*) \|$", page, re.MULTILINE)
    assert len(claims) > 15
    assert all(len(answer.split()) <= 25 and sure for _, answer, sure, _ in claims)


def test_the_links_of_the_pages_lead_somewhere():
    for page in ROOT.glob("reproductions/**/*.md"):
        for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)


def printed(script, pages):
    """Page and words of each command that a page prints."""
    for page in pages:
        for line in re.findall(rf"python {script} (\w[^`…<\n]+)", page.read_text().replace("\\\n", " ")):
            yield pytest.param(shlex.split(line, comments=True), id=f"{page.name}: {line[:80]}")


@pytest.mark.parametrize("words", [*printed(r"src/train\.py", PAGES)])
def test_each_run_of_the_pages_is_accepted(config, words):
    """A sweep by the first of its values."""
    known = OverridesParser.create().parse_overrides(shorthand(word for word in words if word != "-m"))
    first = [next(o.sweep_string_iterator()) if o.is_sweep_override() else o.get_value_element_as_str() for o in known]
    words = [f"{o.input_line.partition('=')[0]}={value}" for o, value in zip(known, first, strict=True)]
    check(config(*(word for word in words if not word.startswith(("ckpt_path=", "hydra.", "hydra/")))))


ALL = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("reproductions/**/*.md"))]
TABLES = [
    *printed(r"reproductions/table\.py", ALL),
    *printed(r"reproductions/table\.py", sorted(ROOT.glob("reproductions/configs/*.yaml"))),
]


@pytest.mark.parametrize("words", TABLES)
def test_each_table_that_a_page_names_is_there_with_its_rows_and_columns(config, words, tmp_path, monkeypatch):
    """By its first job. ``mine.yaml`` is that of the page that names it."""
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```yaml\n(.*?)```", (ROOT / "reproductions/README.md").read_text(), re.DOTALL)[1]
    Path("mine.yaml").write_text(example.replace("algorithm=mine", "algorithm=fedprox"))
    name, *overrides = words
    own = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in overrides)
           if re.match(r"(scale|rows|columns|seeds|dry_run|compare|search\b)", key)}  # fmt: skip
    changes = {key: own.pop(key) for key in [*own] if key.startswith("search")}
    part = Part(**{key: value for key, value in own.items() if key in ("rows", "columns", "seeds")})
    extra = [word for word in overrides if word.partition("=")[0] not in own | changes]
    (job, *_) = plan(load(name, changes), own.get("scale", "full"), part, extra)[0].values()
    check(config(*job.overrides))
