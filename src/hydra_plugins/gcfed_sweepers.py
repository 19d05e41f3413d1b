"""Where Hydra looks for plugins: this project's two sweepers, which ``configs/hydra/sweeper/*.yaml`` name.

The folder is shared by all plugins that are installed, so it has no ``__init__.py``. Hydra reads this file at every
start, so what does the work is imported when it is asked for.
"""

import logging
import os
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

log = logging.getLogger(__name__)


class StudySweeper(Sweeper):
    """The jobs of a study: ``-m study=<name>``."""

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        self.start = config, hydra_context, launcher

    def sweep(self, arguments: list[str]) -> None:
        """Ends with one sentence where the user has to change something, but for HYDRA_FULL_ERROR=1."""
        try:
            self.work(arguments)
        except (ValueError, FileNotFoundError, ImportError) as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            log.error("%s (HYDRA_FULL_ERROR=1 shows where)", error)
            raise SystemExit(1) from None

    def work(self, arguments: list[str]) -> None:
        from gcfed.study.sweep import sweep

        sweep(*self.start, arguments)


class OptunaSweeper(StudySweeper):
    """An Optuna search: ``-m hparams_search=<name>``; its settings are in ``configs/hydra/sweeper/optuna.yaml``."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def work(self, arguments: list[str]) -> None:
        from gcfed.study.search import search

        if not search(*self.start, arguments, **self.settings):
            raise SystemExit(1)
