"""Commands of Hydra's, which end in one sentence, also before their own function is called and while they import.

Imports nothing heavy, so that signals are heard from the first line on.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gcfed.utils.signals import Stopped

log = logging.getLogger(__name__)
_NO_NAME = re.compile(r"(.*[\[,])?\s*(null|true|false|[-+.\d]+)\s*([\],].*)?", re.IGNORECASE)


def run_command(main: Callable[[], Any]) -> None:
    """Calls a function that ``hydra.main`` decorates; HYDRA_FULL_ERROR=1 shows tracebacks."""
    from hydra._internal import utils as hydra_utils

    check_groups(sys.argv[1:])
    report = hydra_utils.run_and_report

    hydra_utils.run_and_report = lambda func: report(one_sentence()(func))
    main()


def check_groups(words: list[str]) -> None:
    """Refuses ``gc=null`` and the like, of which Hydra only says that something must be a string.

    Raises:
        SystemExit: names the word, the options and how to leave a group out.
    """
    from gcfed.utils.resolvers import CONFIGS

    for word in words:
        group, _, option = word.partition("=")
        if group in ("hydra.sweeper", "hydra.launcher"):
            sys.exit(f"{word} must be a group of settings: choose one by {group.replace('.', '/')}=<name>.")
        found = sorted(path.stem for path in CONFIGS.glob(f"{group}/*.yaml")) if group.isidentifier() else []
        if found and _NO_NAME.fullmatch(option):
            options = ", ".join(name for name in found if name != "base")
            sys.exit(f"{word} names no option of {group}: choose {options}, or ~{group} for none.")


@contextmanager
def one_sentence(*, errors: bool = True) -> Iterator[None]:
    """Ends the process with the sentence of an error that names its key or file, without the frames that led to it.

    A signal that :func:`gcfed.utils.signals.stoppable` turned into an exception ends it with its number.

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
        if not errors or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        hidden = error.__cause__ if str(error).startswith("Unable to configure handler") else None  # that of the log
        _say(f"{in_words(hidden or error, _run_folder())} (HYDRA_FULL_ERROR=1 shows where)")
        _drop_unused()
        raise SystemExit(1) from None


def say_stop(stop: Stopped) -> None:
    """Says that a signal ends the process here and now, whatever it is at."""
    os.write(2, f"Stopped: {stop}.\n".encode())
    _drop_unused()


def _say(sentence: str) -> None:
    if _run_folder() is None:
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
