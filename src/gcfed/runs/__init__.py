"""A run on disk: identity, folder, lock, files, measures, summary.

``gcfed.runs("logs")`` calls this package: see :func:`gcfed.api.runs`.
"""

import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


class _Callable(ModuleType):
    """A package that can be called: a function of the same name would hide its modules."""

    def __call__(self, *roots: str | Path, **more: str | Iterable[str]) -> "pd.DataFrame":
        table: pd.DataFrame = import_module("gcfed.api").runs(*roots, **more)
        return table


sys.modules[__name__].__class__ = _Callable
