"""Federated learning on heterogeneous data, from Python: ``configure``, ``train``, ``compare``,
``runs``, ``report``.

    import gcfed

    cfg = gcfed.configure("algorithm=scaffold", "rounds=20")
    result = gcfed.train(cfg)
    result.frame["test/acc"].plot()

torch and the other packages are imported at the first use of these names.
"""

import random
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gcfed.api import Comparison, compare, configure, runs
    from gcfed.reporting import write_report as report
    from gcfed.run import RunResult, train

__version__ = "0.2.0"
__all__ = ["Comparison", "RunResult", "compare", "configure", "report", "runs", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gcfed' has no attribute {name!r}")
    if name == "report":
        return import_module("gcfed.reporting").write_report
    state = random.getstate()
    module = import_module("gcfed.run" if name in ("RunResult", "train") else "gcfed.api")
    random.setstate(state)  # Lightning draws a number while it is imported
    return getattr(module, name)


def __dir__() -> list[str]:
    return [name for name in __all__ if name.islower()]  # without the classes of results
