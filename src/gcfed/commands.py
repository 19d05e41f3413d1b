"""The commands ``gcfed-train``, ``gcfed-eval`` and ``gcfed-report``; ``src/train.py`` and its neighbours call them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcfed.utils.command import one_sentence, run_command, say_stop
from gcfed.utils.signals import Stopped, stoppable

if TYPE_CHECKING:
    from omegaconf import DictConfig


def train() -> None:
    """``python src/train.py experiment=cifar10_cnn_gcfed seed=2``: every key is in ``configs/``."""
    _run("train", _train)


def evaluate() -> None:
    """``python src/eval.py ckpt_path=logs/…/checkpoints/last.ckpt``: the global model on the test split."""
    _run("eval", _evaluate)


def report() -> None:
    """``python src/report.py 'roots=[logs]' out=logs/report``: tables, figures and a page of finished runs."""
    _run("report", _report)


def _run(name: str, task: Callable[[DictConfig], float | None]) -> None:
    with stoppable(say_stop):
        import hydra

        import gcfed.runs.place  # noqa: F401  (its resolvers name the folders of runs)
        from gcfed.utils.compose import shorthand
        from gcfed.utils.resolvers import CONFIGS

        sys.path.append(str(Path.cwd()))  # where a user's own networks, data and methods lie
        sys.argv[1:] = shorthand(sys.argv[1:])
        run_command(hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=name)(task), name)


def _train(cfg: DictConfig) -> float | None:
    with stoppable(say_stop):  # torch and lightning: not needed for --help and --cfg
        from gcfed.utils.cpu import spin_briefly

        spin_briefly()
        from lightning.pytorch.utilities.exceptions import SIGTERMException

        from gcfed.run import train
        from gcfed.utils.processes import in_sweep

    with one_sentence(errors=not in_sweep()), stoppable():
        try:
            result = train(cfg)
        except SIGTERMException as stop:  # Lightning's word for it, from a run of several processes
            raise Stopped(int(str(stop.code)) - 128) from None
    return result.metrics.get(cfg.optimized_metric) if cfg.optimized_metric else None


def _evaluate(cfg: DictConfig) -> None:
    with stoppable(say_stop):
        from gcfed.utils.cpu import spin_briefly

        spin_briefly()
        from gcfed.run import evaluate

    with one_sentence(), stoppable():
        print(json.dumps(evaluate(cfg)))


def _report(cfg: DictConfig) -> None:
    from omegaconf import OmegaConf

    from gcfed.report import write_report

    with one_sentence():
        settings: Any = OmegaConf.to_container(cfg, resolve=True)
        roots = settings.pop("roots")
        write_report(*([roots] if isinstance(roots, str) else roots or ()), **settings)
