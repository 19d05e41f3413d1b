"""Jobs handed to Hydra's launcher, none of which may stop the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher


def one_by_one(launcher: Launcher) -> bool:
    """Whether this is Hydra's own launcher, which runs jobs one after the other in this process."""
    return type(launcher).__name__ == "BasicLauncher"


def launch(launcher: Launcher, jobs: Sequence[list[str]], first: int) -> list[JobReturn]:
    """Runs jobs by their overrides, ``first`` being the number of the first; each has a return, those that failed too.

    What a launcher raises, because a config does not compose or its pool broke, is the return of all jobs given.
    """
    # It announces "Launching 1 jobs locally" for each; who calls has said more.
    logging.getLogger("hydra._internal.core_plugins.basic_launcher").setLevel(logging.WARNING)
    try:
        returns = list(launcher.launch([list(job) for job in jobs], initial_job_idx=first))
    except Exception as error:
        return [_failed(error) for _ in jobs]
    assert len(returns) == len(jobs)
    return returns


def _failed(error: Exception) -> JobReturn:
    result = JobReturn(status=JobStatus.FAILED)
    result.return_value = error
    return result


def reason_of(result: JobReturn | None) -> str:
    """``ValueError: …`` of a job that failed, in one line; "" of one that did not."""
    if result is None or result.status != JobStatus.FAILED:
        return ""
    error = result._return_value
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
