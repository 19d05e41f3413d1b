"""Stores the metrics of runs that a page of results cites:
``python reproductions/store.py coherence logs/digits_mlp_gcfed/multirun_…``

It takes a page's name and folders of runs, or folders that contain them. ``commit=<hash>`` is the
commit that the runs were made with; without it, it is this clone's, which must have no changes.
Columns of times are left out, because they are not the runs' result. ``until=<round>`` stores the
rounds up to this one, also of runs that were stopped later.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gcfed.folders.folder import CONFIG, Run, find_runs  # noqa: E402
from reproductions import stored  # noqa: E402

LONGEST = 120  # letters of a name
# They name folders and machines of whoever made the run, or change no number.
LOCAL = re.compile(
    r"(paths|hydra|logger|extras)(\.|=|/)|ckpt_path=|trainer\.devices="
    r"|callbacks\.(progress|checkpoint\.every)="
)


def main(words: Sequence[str]) -> None:
    names = []
    options = {}
    for word in words:
        key, sign, value = word.partition("=")
        if sign and key in ("commit", "until"):
            options[key] = value
        else:
            names.append(word)
    if len(names) < 2:
        raise ValueError("Name a page and at least one folder, such as coherence logs/my_run.")
    page, *folders = names
    if not (ROOT / "reproductions/results" / f"{page}.md").is_file():
        raise ValueError(f"reproductions/results has no page {page}.md: write it first.")
    commit = known_commit(options["commit"]) if "commit" in options else clean_commit()
    if "until" in options:
        runs = runs_until(folders, options["until"])
    else:
        runs = [run for run in find_runs(folders) if run.has_ended]
    if not runs:
        raise ValueError(f"{' '.join(folders)}: there is no run that has ended.")
    for run in runs:
        print(store(page, run, commit).relative_to(ROOT))
    if stored.stored_bytes() > stored.LIMIT:
        raise ValueError(
            f"The stored data have {stored.stored_bytes():,} bytes, and {stored.LIMIT:,} are"
            " allowed: remove runs of other pages before you commit."
        )


def runs_until(folders: Sequence[str], until: str) -> list[Run]:
    """The runs with their rounds up to this one. ValueError if one has not reached it."""
    if not until.isdecimal():
        raise ValueError(f"until={until} must be a round, such as until=50.")
    runs = find_runs(folders)
    for run in runs:
        if run.rounds < int(until):
            raise ValueError(f"{run.folder} has {run.rounds} rounds, fewer than until={until}.")
    return [replace(run, metrics=run.metrics.loc[: int(until)]) for run in runs]


def store(page: str, run: Run, commit: str) -> Path:
    """Stores one run; returns its file."""
    overrides = [word for word in overrides_of(run) if not LOCAL.match(word)]
    if f"seed={run.seed}" not in overrides:
        overrides.append(f"seed={run.seed}")
    name = name_of(overrides, run.folder)
    other = stored.stored_runs(page).get(name)
    if other and other.overrides != tuple(overrides):
        raise ValueError(f"{page} has another run {name}: rename the folder {run.folder}.")
    kept = [column for column in run.metrics if not column.startswith("time/")]
    place = stored.StoredRun(name, tuple(overrides), commit, Path())
    return stored.write_run(page, place, run.metrics[kept])


def overrides_of(run: Run) -> list[str]:
    """The words of the command that is the first line of the run's config."""
    first = (run.folder / CONFIG).read_text(encoding="utf-8").partition("\n")[0]
    head = "# python src/train.py"
    if not first.startswith(head):
        raise ValueError(f"{run.folder / CONFIG} must begin with its command: {head} …")
    return shlex.split(first.removeprefix(head))


def name_of(overrides: Sequence[str], folder: Path) -> str:
    """The overrides as a file's name; the folder's name if they are too long."""
    name = re.sub(r"[^\w.,=+-]+", "-", ",".join(sorted(overrides))).strip("-")
    return name if len(name) <= LONGEST else folder.name


def clean_commit() -> str:
    changes = _git("status", "--porcelain", "--", "src", "configs")
    if changes:
        raise ValueError("src or configs have changes: commit them, or give commit=<hash>.")
    return _git("rev-parse", "--short=8", "HEAD")


def known_commit(name: str) -> str:
    try:
        return _git("rev-parse", "--short=8", "--verify", f"{name}^{{commit}}")
    except subprocess.CalledProcessError:
        raise ValueError(f"commit={name} is no commit of this repository.") from None


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as problem:
        sys.exit(str(problem))
