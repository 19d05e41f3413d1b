"""Jobs handed to Hydra's launcher, none of which stops the others."""

import logging
import traceback
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher

from gcfed.runs.folder import CHECKPOINT


def one_by_one(launcher: Launcher) -> bool:
    """Whether this is Hydra's own launcher, which runs jobs one after the other in this process."""
    return type(launcher).__name__ == "BasicLauncher"


def launch(launcher: Launcher, jobs: Sequence[tuple[Sequence[str], Path]], first: int) -> list[str]:
    """Runs jobs, each by its overrides in its folder, from the checkpoint there if there is one.

    Returns ``ValueError: …`` of each job that failed, else ""; ``first`` is the number of the first job.

    Raises:
        ValueError: the launcher itself failed, and not in this process.
    """
    calls = []
    for overrides, folder in jobs:
        place = {"hydra.sweep.dir": folder.parent, "hydra.sweep.subdir": folder.name}
        if (folder / CHECKPOINT).is_file():
            place["ckpt_path"] = folder / CHECKPOINT
        quoted = {key: QuotedString(str(path), Quote.single).with_quotes() for key, path in place.items()}
        calls.append([*overrides, *(f"{key}={path}" for key, path in quoted.items())])
    # It announces "Launching 1 jobs locally" for each; who calls has said more.
    logging.getLogger("hydra._internal.core_plugins.basic_launcher").setLevel(logging.WARNING)
    try:
        returns = launcher.launch(calls, initial_job_idx=first)
    except Exception as error:
        if one_by_one(launcher):
            return [_reason(error)] * len(calls)
        hint = "Jobs that it started may still be running: look before you give the same command again."
        raise ValueError(f"the launcher failed, {_reason(error)}. {hint}") from None
    return [_reason(r._return_value) if r.status == JobStatus.FAILED else "" for r in returns]


def _reason(error: BaseException) -> str:
    """The error in one line. Its frames let go of what they hold: a failed job's model, data and GPU memory."""
    chain = [error]  # may be a ring
    for one in chain:
        traceback.clear_frames(one.__traceback__)
        chain += [other for other in (one.__cause__, one.__context__) if other and other not in chain]
    sentence = " ".join(str(error).split())
    return sentence if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {sentence}"
