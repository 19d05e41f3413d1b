"""Where Hydra looks for plugins: this project's two sweepers, which ``configs/hydra/sweeper/*.yaml`` name.

The folder is shared by all plugins that are installed, so it has no ``__init__.py``. Hydra reads this file at every
start, so what does the work is imported when it is asked for.
"""

from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class StudySweeper(Sweeper):
    """The jobs of a study: ``-m study=<name>``. It has no settings."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        self.start = config, hydra_context, launcher

    def sweep(self, arguments: list[str]) -> None:
        """Raises errors that end in one sentence, by :mod:`gcfed.commands`."""
        from gcfed.commands import stoppable
        from gcfed.study.sweep import sweep

        for key, value in self.settings.items():
            raise ValueError(f"hydra.sweeper.{key}={value} is read by nothing; ~hydra.sweeper.{key} leaves it out.")
        with stoppable():
            sweep(*self.start, arguments)


class OptunaSweeper(StudySweeper):
    """An Optuna search: ``-m hparams_search=<name>``; its settings are in ``configs/hydra/sweeper/optuna.yaml``."""

    def sweep(self, arguments: list[str]) -> None:
        from gcfed.commands import stoppable
        from gcfed.study.search import search

        with stoppable():
            if not search(*self.start, arguments, **self.settings):
                raise SystemExit(1)
