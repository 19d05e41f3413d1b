"""``gcfed-new`` writes a project whose own test passes."""

import os
import re
import sys

import pytest
from conftest import forked

from gcfed.commands import table
from gcfed.project import EXAMPLES, main, new_project
from gcfed.utils.resolvers import ROOT


def printed_in(folder, call):
    """What a call prints in a fork of this process that works in a folder."""
    printed = folder.with_suffix(".txt")

    def go():
        os.chdir(folder)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        call()

    forked(go, printed)
    return printed.read_text()


def test_the_test_of_a_new_project_passes(tmp_path):
    folder = new_project(tmp_path / "flowers")
    printed = printed_in(folder, lambda: pytest.main(["-q", "-p", "no:cacheprovider", "."]))
    assert "1 passed" in printed, printed


def test_a_new_project_has_the_files_of_the_examples(tmp_path):
    folder = new_project(tmp_path / "flowers")
    for name, example in (("mynet.py", "network/mynet.py"), ("fedexp.py", "method/fedexp.py")):
        assert (folder / name).read_text() == (EXAMPLES / example).read_text()
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# flowers\n")
    assert len(readme.splitlines()) <= 10
    assert "/logs/" in (folder / ".gitignore").read_text().split()
    assert (ROOT / "src/gcfed/py.typed").is_file()


def test_a_new_project_has_every_yaml_that_its_readme_names(tmp_path):
    folder = new_project(tmp_path / "flowers")
    named = re.findall(r"[\w/]+\.yaml", (folder / "README.md").read_text())
    assert set(named) == {"my.yaml"}
    assert (folder / "my.yaml").is_file()


def test_the_table_of_a_new_project_can_be_planned(tmp_path):
    folder = new_project(tmp_path / "flowers")

    def plan():
        sys.argv = ["gcfed-table", "my.yaml", "--config-dir", "conf", "dry_run=true"]
        table()

    printed = printed_in(folder, plan)
    assert "12 to start" in printed, printed
    assert "FedExP, last iterate, α 0.1, seed 3" in printed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "gcfed-new takes one name"),
        (["a", "b"], "gcfed-new takes one name"),
        (["--help"], "gcfed-new takes one name"),
        (["..."], "needs a letter or digit first"),
        (["taken"], "taken exists already: name a new folder"),
    ],
)
def test_a_wrong_name_ends_in_one_sentence(tmp_path, monkeypatch, words, sentence):
    (tmp_path / "taken").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gcfed-new", *words])
    with pytest.raises(SystemExit, match=sentence):
        main()
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
