"""Commands of Hydra's, whose errors end in one sentence also before the command's own function is called."""

import os
import re
import sys
from collections.abc import Callable
from typing import Any

from hydra._internal import utils as hydra_utils
from omegaconf.errors import OmegaConfBaseException

from gcfed.utils.files import in_words
from gcfed.utils.resolvers import CONFIGS

_NO_NAME = re.compile(r"(.*[\[,])?\s*(null|true|false|[-+.\d]+)\s*([\],].*)?", re.IGNORECASE)


def run_command(main: Callable[[], Any]) -> None:
    """Calls a function that ``hydra.main`` decorates; HYDRA_FULL_ERROR=1 shows tracebacks."""
    check_groups(sys.argv[1:])
    report = hydra_utils.run_and_report

    def run_and_report(func: Callable[[], Any]) -> Any:
        return report(lambda: _in_one_sentence(func))

    hydra_utils.run_and_report = run_and_report
    main()


def check_groups(words: list[str]) -> None:
    """Refuses ``gc=null`` and the like, of which Hydra only says that something must be a string.

    Raises:
        SystemExit: names the word, the options and how to leave a group out.
    """
    for word in words:
        group, _, option = word.partition("=")
        found = sorted(path.stem for path in CONFIGS.glob(f"{group}/*.yaml")) if group.isidentifier() else []
        if found and _NO_NAME.fullmatch(option):
            options = ", ".join(name for name in found if name != "base")
            sys.exit(f"{word} names no option of {group}: choose {options}, or ~{group} for none.")


def _in_one_sentence(func: Callable[[], Any]) -> Any:
    try:
        return func()
    except (ValueError, OSError, OmegaConfBaseException) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        hidden = error.__cause__ if str(error).startswith("Unable to configure handler") else None  # that of the log
        sys.exit(f"{in_words(hidden or error)} (HYDRA_FULL_ERROR=1 shows where)")
