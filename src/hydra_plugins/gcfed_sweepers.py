"""Where Hydra looks for plugins: this project's two sweepers, which ``configs/hydra/sweeper/*.yaml`` name.

The folder is shared by all plugins that are installed, so it has no ``__init__.py``. Hydra reads this file at every
start, so what does the work is imported when it is asked for.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

log = logging.getLogger(__name__)


class _Sweeper(Sweeper):
    """Makes the launcher of the user's choice, and ends with one sentence where the user has to change something.

    Not under HYDRA_FULL_ERROR=1.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.composed, self.context = config, hydra_context
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        try:
            return self.work(arguments)
        except (ValueError, FileNotFoundError) as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            log.error("%s (HYDRA_FULL_ERROR=1 shows where)", error)
            raise SystemExit(1) from None

    def work(self, arguments: list[str]) -> Any:
        raise NotImplementedError


class StudySweeper(_Sweeper):
    """The jobs of a study: ``-m study=<name>``."""

    def work(self, arguments: list[str]) -> Any:
        from gcfed.study.sweep import sweep

        return sweep(self.composed, self.context, self.launcher, arguments)


class OptunaSweeper(_Sweeper):
    """An Optuna search: ``-m hparams_search=<name>``.

    Args:
        settings: those of ``configs/hydra/sweeper/optuna.yaml``.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def work(self, arguments: list[str]) -> Any:
        from gcfed.study.search import search

        return search(self.composed, self.context, self.launcher, arguments, **self.settings)
