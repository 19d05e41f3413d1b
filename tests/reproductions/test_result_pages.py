"""The commands for runs and tables on all pages of the docs are accepted."""

import re
import shlex
from functools import cache

import pytest
from conftest import first_values

from gcfed.check import check
from gcfed.tables.command import request_of
from gcfed.tables.plan import make_plan
from gcfed.tables.reading import CATALOG, load
from gcfed.utils.resolvers import ROOT

PAGES = sorted((ROOT / "reproductions/results").glob("[!R]*.md"))
ALL = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("reproductions/**/*.md")]


def printed(command, pages):
    """The arguments of each such command that a page prints."""
    texts = (page.read_text().replace("\\\n", " ") for page in pages)
    lines = dict.fromkeys(
        line for text in texts for line in re.findall(rf"{command} (\w[^`…<\n]+)", text)
    )
    return [shlex.split(line, comments=True) for line in lines]


def test_readme_states_the_number_of_methods_in_the_table_of_digits():
    text = (ROOT / "README.md").read_text()
    stated = re.search(r"\[The table of (\d+) methods\]\(reproductions/results/every-method", text)
    page = (ROOT / "reproductions/results/every-method.md").read_text()
    section = page.partition("## The digits, three seeds")[2].partition("\n## ")[0]
    assert int(stated[1]) == len(re.findall(r"^\|.*\|$", section, re.MULTILINE)) - 2


@pytest.mark.parametrize(
    "words", printed(r"python src/train\.py", PAGES), ids=lambda words: " ".join(words)[:80]
)
def test_each_run_on_the_pages_is_accepted(config, words):
    """For a sweep, the first values are checked."""
    check(config(*first_values(word for word in words if word != "-m")))


def test_each_table_that_a_page_names_exists_with_its_rows_and_columns(
    config, tmp_path, monkeypatch
):
    """Only the page's own ``my.yaml`` is composed: test_papers.py composes the others."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/tables.md").read_text()
    example = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]
    (tmp_path / "my.yaml").write_text(example.replace("algorithm=mine", "algorithm=fedprox"))
    (tmp_path / "conf").mkdir()
    (tmp_path / "reproductions").symlink_to(ROOT / "reproductions")
    tables = [*CATALOG.glob("*.yaml"), *ROOT.glob("reproductions/tables/*.yaml")]
    commands = printed("gcfed-table", [*ALL, *tables])
    known = cache(load)
    assert len(commands) > 50, len(commands)
    for words in commands:
        asked = request_of(words)
        table = (
            load(asked.name, asked.search_changes) if asked.search_changes else known(asked.name)
        )
        job, *_ = make_plan(table, asked.scale, asked.selection, asked.arguments).jobs.values()
        if asked.name == "my.yaml":
            check(config(*job.overrides))
