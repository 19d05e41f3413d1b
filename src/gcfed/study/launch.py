"""Jobs handed to Hydra's launcher, none of which may stop the others."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        value: what it returned.
        reason: ``ValueError: …`` of one that failed, in one line; "" of one that did not.
        lost: it is the launcher that failed: the job may be running still, or have come to its end.
    """

    value: Any = None
    reason: str = ""
    lost: bool = False


def one_by_one(launcher: Launcher) -> bool:
    """Whether this is Hydra's own launcher, which runs jobs one after the other in this process."""
    return type(launcher).__name__ == "BasicLauncher"


def launch(launcher: Launcher, jobs: Sequence[list[str]], first: int) -> list[Outcome]:
    """Runs jobs by their overrides, ``first`` being the number of the first; each has an outcome.

    What a launcher raises, because a config does not compose or its pool broke, is the outcome of all jobs given.
    """
    # It announces "Launching 1 jobs locally" for each; who calls has said more.
    logging.getLogger("hydra._internal.core_plugins.basic_launcher").setLevel(logging.WARNING)
    try:
        returns = list(launcher.launch([list(job) for job in jobs], initial_job_idx=first))
    except Exception as error:
        return [Outcome(reason=_reason(error), lost=not one_by_one(launcher))] * len(jobs)
    assert len(returns) == len(jobs)
    return [_outcome(result) for result in returns]


def _outcome(result: JobReturn) -> Outcome:
    if result.status != JobStatus.FAILED:
        return Outcome(result.return_value)
    return Outcome(reason=_reason(result._return_value))


def _reason(error: Any) -> str:
    """The error in one line. Its frames let go of what they hold: a failed job's model, data and GPU memory."""
    chain: list[BaseException | None] = [error]
    for one in chain:
        if one is not None:
            traceback.clear_frames(one.__traceback__)
            chain += [other for other in (one.__cause__, one.__context__) if other not in chain]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
