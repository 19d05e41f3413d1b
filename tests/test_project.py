"""A wheel installs the package, its configs and its commands."""

import os
import subprocess
import sys
import zipfile

import pytest
from hatchling.build import build_wheel

import gcfed
from gcfed.utils.resolvers import ROOT, runs_root

CALL = """
import sys
from importlib.metadata import distribution
commands = {command.name: command.load() for command in distribution("gcfed").entry_points}
print(*sorted(commands))
sys.argv = ["gcfed-train", "data=mnist", "--cfg", "job", "--resolve", "--package", "paths.data_dir"]
commands["gcfed-train"]()
"""


def yamls_below(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*.yaml"))


def test_a_wheel_has_the_configs_and_runs_without_the_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    name = build_wheel(str(tmp_path))
    assert name.startswith(f"gcfed-{gcfed.__version__}-")
    site = tmp_path / "site"
    empty = tmp_path / "empty"
    with zipfile.ZipFile(tmp_path / name) as wheel:
        wheel.extractall(site)
    for ours, theirs in (
        (ROOT / "configs", site / "gcfed/configs"),
        (ROOT / "src/gcfed/tables/catalog", site / "gcfed/tables/catalog"),
    ):
        assert yamls_below(ours) == yamls_below(theirs) != []
    packages = {path.name for path in site.iterdir() if "dist-info" not in path.name}
    assert packages - {"gcfed_sites"} == {"gcfed", "hydra_plugins"}
    assert len(list(site.glob("*.dist-info/licenses/LICENSE"))) == 1

    empty.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "DATA_DIR"} | {
        "PYTHONPATH": str(site)
    }
    done = subprocess.run(
        [sys.executable, "-c", CALL], capture_output=True, text=True, cwd=empty, env=environment
    )
    assert done.stdout.splitlines() == [
        "gcfed-eval gcfed-new gcfed-report gcfed-table gcfed-train",
        str(empty / "data"),
    ], done.stderr


def test_git_and_images_exclude_the_private_keys_of_a_federation():
    for name, line in ((".gitignore", "workspace/"), (".dockerignore", "**/workspace")):
        assert line in (ROOT / name).read_text().split(), name


@pytest.mark.parametrize(
    ("started_in", "runs_in"),
    [("clone", "clone"), ("clone/src", "clone"), ("flowers", "flowers"), ("clone2", "clone2")],
)
def test_runs_stay_with_the_project_that_started_them(tmp_path, started_in, runs_in):
    assert runs_root(tmp_path / started_in, tmp_path / "clone") == tmp_path / runs_in


def test_a_project_beside_a_clone_keeps_its_runs_and_shares_the_data(tmp_path):
    """The commands of an editable installation, started in a folder outside the clone."""
    environment = {key: value for key, value in os.environ.items() if key != "DATA_DIR"} | {
        "PYTHONPATH": str(ROOT / "src")
    }
    words = ["data=mnist", "--cfg", "job", "--resolve", "--package", "paths"]
    train = f"from gcfed.commands import train; import sys; sys.argv[1:] = {words}; train()"
    done = subprocess.run(
        [sys.executable, "-c", train], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert f"log_dir: {tmp_path}/logs\n" in done.stdout, done.stderr
    assert f"data_dir: {ROOT}/data\n" in done.stdout

    report = "from gcfed.commands import report; report()"
    done = subprocess.run(
        [sys.executable, "-c", report],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert f"{tmp_path}/logs" in done.stderr + done.stdout
    assert str(ROOT / "logs") not in done.stderr + done.stdout
