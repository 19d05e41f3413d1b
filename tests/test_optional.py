"""Without the optional packages and their tests, the core's tests are collected
and a run trains.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import forked

from gcfed.utils.resolvers import ROOT

OPTIONAL = {
    "reproductions": [
        "reproductions",
        "tests/reproductions",
        "configs/metrics/leakage.yaml",
    ],
    "examples": ["examples", "tests/examples"],
    "gcfed_sites": [
        "src/gcfed_sites",
        "tests/gcfed_sites",
        "configs/federation/nvflare.yaml",
        "docs/federation.md",
    ],
}


def core_files() -> list[Path]:
    """The Python files that work without the optional packages, tests included."""
    optional = [ROOT / folder for folders in OPTIONAL.values() for folder in folders]
    files = []
    for name in ("src/gcfed", "src/hydra_plugins", "tests"):
        for path in (ROOT / name).rglob("*.py"):
            if not any(path.is_relative_to(folder) for folder in optional):
                files.append(path)
    return files


def test_no_file_of_the_core_imports_an_optional_package():
    """Only a ``_target_`` in a YAML file may name an optional package."""
    imports = re.compile(rf"^\s*(from|import) ({'|'.join(OPTIONAL)})\b", re.MULTILINE)
    assert not [path for path in core_files() if imports.search(path.read_text())]


@pytest.mark.slow
def test_a_tree_without_the_optional_packages_works(tmp_path):
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT
    )
    gone = [folder for folders in OPTIONAL.values() for folder in folders]
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file() and not any(
            Path(name).is_relative_to(folder) for folder in gone
        ):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    words = (
        "tests --quiet -n 0 -p no:cacheprovider --assert=plain -k"
        " test_a_run_from_python_and_its_folder_agree"
    )

    def ours(path: str | None) -> bool:
        return bool(path) and Path(path).is_relative_to(ROOT) and "site-packages" not in path

    def collect() -> None:  # in a fork: large packages are imported, those of this clone are not
        for name in [
            name for name, module in sys.modules.items() if ours(getattr(module, "__file__", None))
        ]:
            del sys.modules[name]
        sys.path[:] = [path for path in sys.path if not ours(path)]
        sys.meta_path[:] = [
            finder for finder in sys.meta_path if type(finder).__name__ != "AssertionRewritingHook"
        ]
        sys.stdout = os.fdopen(1, "w", closefd=False)
        os.chdir(tmp_path)
        raise SystemExit(pytest.main(words.split()))

    code = forked(collect, tmp_path / "printed.txt")
    printed = (tmp_path / "printed.txt").read_text()
    assert code == 0, printed[-6000:]
    assert "1 passed, " in printed  # the other tests are collected, and a failed import is an error
