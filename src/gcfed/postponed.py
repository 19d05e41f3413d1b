"""Packages that a run imports, but hardly uses: their code runs when somebody needs it.

Lightning imports torchmetrics and the compiler for a class each, and every optimizer step asks the compiler to stay
out. With all that they import, this is half of the time before the first round. ``GCFED_POSTPONE=0`` turns it off.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType, SimpleNamespace
from typing import Any

COMPILER, PLOTS, FLOPS = "torch._dynamo", "torchmetrics.utilities.plot", "torch.utils.flop_counter"
UTILS = f"{COMPILER}.utils"


class _IfLoaded(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return COMPILER not in waiting and isinstance(instance, sys.modules[COMPILER].OptimizedModule)


class OptimizedModule(metaclass=_IfLoaded):
    """Stands for the class of compiled modules. There are none until the compiler's code has run."""


def disable(call: Callable, *args: Any, **kwargs: Any) -> Callable:
    """Stands for the compiler's ``disable``, and calls it as soon as its code has run."""
    inner = call

    def disabled(*a: Any, **k: Any) -> Any:
        nonlocal inner
        if inner is call and COMPILER not in waiting:
            inner = sys.modules[COMPILER].disable(call, *args, **kwargs)
        return inner(*a, **k)

    return disabled


class _Rules:
    """Stands for the compiler's rules. They have nothing to forget when a group of processes begins."""

    def clear_lru_cache(self) -> None: ...

    def __getattr__(self, name: str) -> Any:
        run(sys.modules[COMPILER])
        return getattr(sys.modules[COMPILER].trace_rules, name)


def later(module: str, name: str) -> Callable:
    """Stands for a function or class of a module, whose code runs at the first call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        run(sys.modules[module])
        return getattr(sys.modules[module], name)(*args, **kwargs)

    return call


# module → names that do not need its code: their values, or the submodule that defines them
EARLY: dict[str, dict[str, Any]] = {
    COMPILER: {
        "OptimizedModule": OptimizedModule,
        "compiled_autograd": SimpleNamespace(_disable=nullcontext),  # torch.func.grad asks it to stay out
        "disable": disable,
        "graph_break": lambda msg="": None,
        "trace_rules": _Rules(),
    },
    UTILS: {"is_compile_supported": later(UTILS, "is_compile_supported")},  # torchvision imports it
    "torchmetrics": {
        "Metric": ".utilities.checks",  # imported first, it resolves a circle of imports
        "MetricCollection": ".collections",
        "__version__": ".__about__",
        "_logger": logging.getLogger("torchmetrics"),
    },
    PLOTS: {  # it imports matplotlib
        "_AX_TYPE": object,
        "_PLOT_OUT_TYPE": object,
        "plot_single_or_multi_val": later(PLOTS, "plot_single_or_multi_val"),
    },
    FLOPS: {"FlopCounterMode": later(FLOPS, "FlopCounterMode")},  # it imports triton
}
waiting = dict[str, Loader]()  # modules that were imported, and whose code has not run
_lock = RLock()
_early = False  # whether a submodule is being imported for an early name


def run(module: ModuleType) -> None:
    """Runs the code of a module if it was postponed."""
    with _lock:
        if (package := module.__name__.rpartition(".")[0]) in waiting:
            run(sys.modules[package])
        if loader := waiting.pop(module.__name__, None):
            for name in EARLY[module.__name__]:
                vars(module).pop(name, None)
            loader.exec_module(module)
            del module.__getattr__


def _get(module: ModuleType, name: str) -> Any:
    global _early
    with _lock:
        if module.__name__ in waiting and isinstance(found := EARLY[module.__name__].get(name), str):
            before, _early = _early, True
            try:
                return getattr(import_module(found, module.__name__), name)
            finally:
                _early = before
        if name != "__path__":  # every import asks whether a module is a package
            run(module)
        if name in vars(module):
            return vars(module)[name]
    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")


class Postponing(MetaPathFinder, Loader):
    """Imports the modules of :data:`EARLY` without their code, which runs before other submodules are imported."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, postponed = name.rpartition(".")[0], name in EARLY and name not in sys.modules
        if package in waiting and not _early and not postponed:
            run(sys.modules[package])
        spec = PathFinder.find_spec(name, path) if postponed else None
        if spec:
            spec.loader, spec.loader_state = self, spec.loader
        return spec

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        module.__loader__ = spec.loader = waiting[module.__name__] = spec.loader_state
        vars(module).update({name: v for name, v in EARLY[spec.name].items() if not isinstance(v, str)})
        module.__getattr__ = partial(_get, module)  # type: ignore[method-assign]


def postpone() -> None:
    """Postpones these packages in this process, unless they were imported before."""
    if os.environ.get("GCFED_POSTPONE") != "0":
        sys.meta_path.insert(0, Postponing())
