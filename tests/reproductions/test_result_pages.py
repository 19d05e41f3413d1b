"""The commands for runs and tables on all pages of the docs are accepted."""

import re
import shlex
from functools import cache

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from gcfed.check import check
from gcfed.utils.compose import shorthand
from gcfed.utils.resolvers import ROOT
from reproductions.tables import Part, load, plan

PAGES = sorted((ROOT / "reproductions/results").glob("[!R]*.md"))
ALL = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("reproductions/**/*.md")]


def printed(script, pages):
    """The arguments of each command that a page prints."""
    texts = (page.read_text().replace("\\\n", " ") for page in pages)
    lines = dict.fromkeys(
        line for text in texts for line in re.findall(rf"python {script} (\w[^`…<\n]+)", text)
    )
    return [shlex.split(line, comments=True) for line in lines]


def test_the_links_of_the_pages_are_valid():
    for page in ROOT.glob("reproductions/**/*.md"):
        for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), (page.name, link)


def test_readme_states_the_number_of_methods_in_the_table_of_digits():
    text = (ROOT / "README.md").read_text()
    stated = re.search(r"\[The table of (\d+) methods\]\(reproductions/results/every-method", text)
    page = (ROOT / "reproductions/results/every-method.md").read_text()
    section = page.partition("## The digits, three seeds")[2].partition("\n## ")[0]
    assert int(stated[1]) == len(re.findall(r"^\|.*\|$", section, re.MULTILINE)) - 2


@pytest.mark.parametrize(
    "words", printed(r"src/train\.py", PAGES), ids=lambda words: " ".join(words)[:80]
)
def test_each_run_on_the_pages_is_accepted(config, words):
    """For a sweep, the first values are checked."""
    known = OverridesParser.create().parse_overrides(
        shorthand(word for word in words if word != "-m")
    )
    first = [
        next(o.sweep_string_iterator()) if o.is_sweep_override() else o.get_value_element_as_str()
        for o in known
    ]
    words = [
        f"{o.input_line.partition('=')[0]}={value}" for o, value in zip(known, first, strict=True)
    ]
    check(
        config(*(word for word in words if not word.startswith(("ckpt_path=", "hydra.", "hydra/"))))
    )


def test_each_table_that_a_page_names_exists_with_its_rows_and_columns(
    config, tmp_path, monkeypatch
):
    """Only the page's own ``mine.yaml`` is composed: test_papers.py composes the others."""
    monkeypatch.chdir(tmp_path)
    example = re.search(
        r"```yaml\n(.*?)```", (ROOT / "reproductions/README.md").read_text(), re.DOTALL
    )[1]
    (tmp_path / "mine.yaml").write_text(example.replace("algorithm=mine", "algorithm=fedprox"))
    commands = printed(
        r"reproductions/table\.py", [*ALL, *ROOT.glob("reproductions/configs/*.yaml")]
    )
    known = cache(load)
    assert len(commands) > 50, len(commands)
    for name, *overrides in commands:
        own = {
            key: yaml.safe_load(value)
            for key, _, value in (word.partition("=") for word in overrides)
            if re.match(r"(scale|rows|columns|seeds|dry_run|compare|search\b)", key)
        }
        changes = {key: own.pop(key) for key in [*own] if key.startswith("search")}
        part = Part(
            **{key: value for key, value in own.items() if key in ("rows", "columns", "seeds")}
        )
        extra = [word for word in overrides if word.partition("=")[0] not in own | changes]
        table = load(name, changes) if changes or name == "mine.yaml" else known(name)
        job, *_ = plan(table, own.get("scale", "full"), part, extra)[0].values()
        if name == "mine.yaml":
            check(config(*job.overrides))
