"""Every commit that a page of results or of the docs names is a commit of this repository.

``owner/name@<hash>`` names a commit of another project.
"""

import re
import subprocess

import pytest

from gcfed.utils.resolvers import ROOT

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("reproductions/**/*.md")]
# a word of 7 to 12 hexadecimal digits, among them a letter and a digit; not within a path, a
# number, code or a name of another project
HASH = re.compile(r"(?<![\w@./=-])(?=\w*[a-f])(?=\w*\d)[0-9a-f]{7,12}(?![\w./-]\w|\w)")
NAMED = re.compile(r"\b[Cc]ommits? ([0-9a-f]{7,12})\b")
OTHER = re.compile(r"\b[\w-]+/[\w-]+@([0-9a-f]{7,40})\b")


def git(*words):
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True)


def hashes(text):
    return {*HASH.findall(text), *NAMED.findall(text)}


def stored_commits():
    found = {}
    for path in ROOT.glob("reproductions/results/data/*/runs.yaml"):
        for commit in re.findall(r"commit: '?(\w+)", path.read_text()):
            found.setdefault(commit, path)
    return found


def test_hashes_of_other_projects_and_numbers_are_not_taken_for_commits():
    text = (
        "Commit 4133282, (c177d56 on another machine); a/b-c@f7c543c, lr=0.0137259a, 1234567 steps,"
        " defaced, logs/14f0564c/x, `b362bca`."
    )
    assert hashes(text) == {"4133282", "c177d56", "b362bca"}
    assert OTHER.findall(text) == ["f7c543c"]


def test_every_named_commit_is_in_this_repository():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("this is no clone with its whole history: its commits are not known here")
    named = {}
    for page in PAGES:
        for name in hashes(page.read_text()):
            named.setdefault(name, page)
    assert len(named) > 40
    assert len(stored_commits()) >= 4
    named |= stored_commits()
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for name, path in named.items()
        if git("merge-base", "--is-ancestor", f"{name}^{{commit}}", "HEAD").returncode
    }
    assert not unknown
