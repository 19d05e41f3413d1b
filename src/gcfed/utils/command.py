"""Commands of Hydra's, which end in one sentence: while they import, compose, run, and where nobody reads on.

Imports nothing heavy, so that signals are heard from the first line on.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gcfed.utils.signals import Stopped

log = logging.getLogger(__name__)


def run_command(main: Callable[[], Any], name: str) -> None:
    """Calls what ``hydra.main`` decorates for ``configs/<name>.yaml``; HYDRA_FULL_ERROR=1 shows tracebacks."""
    from hydra._internal import utils as hydra_utils
    from hydra.errors import HydraException

    from gcfed.utils.compose import composed
    from gcfed.utils.hints import check_groups, explained

    def explaining(func: Callable[[], Any]) -> Any:
        with one_sentence():
            try:
                return func()
            except HydraException as error:
                if os.environ.get("HYDRA_FULL_ERROR") == "1":
                    raise
                words = [word for word in sys.argv[1:] if _is_override(word)]
                raise ValueError(explained(error, words, lambda overrides: composed(name, overrides))) from None

    report = hydra_utils.run_and_report
    hydra_utils.run_and_report = lambda func: report(lambda: explaining(func))
    sys.argv[1:] = ordered(sys.argv[1:])
    with one_sentence():
        check_groups(sys.argv[1:])
        try:
            main()
        finally:
            sys.stdout.flush()


def ordered(words: Sequence[str]) -> list[str]:
    """Overrides before flags: Hydra's parser knows no override behind ``-m`` once one stood before it."""
    return sorted(words, key=lambda word: not _is_override(word))


def _is_override(word: str) -> bool:
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


@contextmanager
def one_sentence(*, errors: bool = True) -> Iterator[None]:
    """Ends the process with the sentence of an error that names its key or file, without the frames that led to it.

    A signal that :func:`gcfed.utils.signals.stoppable` turned into an exception ends it with its number. Where the
    reader of a pipe has gone, as behind ``| head``, nothing is said.

    Args:
        errors: False in a sweep's job: the others go on, and the sweep says how each ended. HYDRA_FULL_ERROR=1 shows
            where.
    """
    from omegaconf.errors import OmegaConfBaseException

    from gcfed.utils.files import in_words

    try:
        yield
    except Stopped as stop:
        folder = _drop_unused()
        goes_on = folder is not None and (folder / "checkpoints" / "last.ckpt").is_file()
        hint = " The same command with ckpt_path=last goes on after the last finished round." * goes_on
        _say(f"Stopped: {stop}.{hint}")
        raise SystemExit(stop.exit_code) from None
    except (ValueError, OSError, OmegaConfBaseException) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            raise SystemExit(128 + signal.SIGPIPE) from None
        if not errors or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        hidden = error.__cause__ if str(error).startswith("Unable to configure handler") else None  # that of the log
        _say(f"{in_words(hidden or error, _run_folder())} (HYDRA_FULL_ERROR=1 shows where)")
        _drop_unused()
        raise SystemExit(1) from None


def _nobody_reads() -> bool:
    """Whether what this process prints has no reader any more; if so, the rest goes nowhere."""
    printed = select.poll()
    printed.register(1, 0)
    if not any(event & select.POLLERR for _, event in printed.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def say_stop(stop: Stopped) -> None:
    """Says that a signal ends the process here and now, whatever it is at."""
    os.write(2, f"Stopped: {stop}.\n".encode())
    _drop_unused()


def _say(sentence: str) -> None:
    if _run_folder() in (None, Path.cwd()):
        sys.stderr.write(f"{sentence}\n")
    else:
        log.error("%s", sentence)


def _run_folder() -> Path | None:
    """That of the job that is running, which is the present folder for all commands but a run."""
    config = getattr(sys.modules.get("hydra.core.hydra_config"), "HydraConfig", None)
    folder = config.get().runtime.get("output_dir") if config is not None and config.initialized() else None
    return None if folder is None else Path(folder)


def _drop_unused() -> Path | None:
    """Deletes the folder that Hydra made for a run that has not begun; it, or the run's folder."""
    folder = _run_folder()
    with suppress(OSError):
        if folder is not None and folder != Path.cwd() and [path.name for path in folder.iterdir()] == ["train.log"]:
            shutil.rmtree(folder)
            folder.parent.rmdir()  # logs/<name>/ too, unless other runs are in it
    return folder
