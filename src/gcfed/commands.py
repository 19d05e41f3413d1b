"""The commands ``gcfed-train``, ``gcfed-eval`` and ``gcfed-report``; ``src/train.py`` and its
neighbours call them.

An error in an override ends a command with one line. Others have a traceback, whose last line names
the key or file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig


class UntrainedError(Exception):
    """A run has ended, and no client ever counted."""


def _run(name: str, task: Callable[[DictConfig], Any]) -> None:
    """Calls the task with the config that Hydra composes from ``configs/<name>.yaml`` and the
    command line.

    ``eval`` reads the ``config.yaml`` of the run's folder instead, unless model or data are named.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from gcfed.runs.folder import run_config  # its resolvers name the folders of runs
    from gcfed.utils.compose import explained, shorthand, undashed
    from gcfed.utils.resolvers import CONFIGS

    # OpenMP's threads wait for microseconds only: a round beside a busy program then takes 0.28 s
    # instead of 0.58 s.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra prints the whole error
    sys.path.append(str(Path.cwd()))  # a user's own networks, data and methods
    words = [
        word
        for word in sys.argv[1:]
        if not word.startswith("-") and ("=" in word or word.startswith("~"))
    ]
    flags = [word for word in sys.argv[1:] if word not in words]
    path = CONFIGS / f"{name}.yaml"
    try:
        words = shorthand(words)
        if name == "eval" and (found := run_config(words)):
            path = found
            words += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"]
        if said := undashed(flags, words, path):
            sys.exit(said)
        # Hydra's parser refuses an override behind -m if another one stands before it
        sys.argv[1:] = words + flags
        hydra.main(version_base=None, config_path=str(path.parent), config_name=path.stem)(task)()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(explained(error, words, path))
    except UntrainedError as error:
        sys.exit(str(error))


def _train(cfg: DictConfig) -> None:
    """Trains one run: ``python src/train.py experiment=cifar10_cnn_gcfed seed=2``."""
    from gcfed.run import train  # torch and lightning: not needed for --help and --cfg

    try:
        result = train(cfg)
    finally:
        with suppress(OSError):  # it is not empty, unless the run was refused
            Path(cfg.paths.output_dir).rmdir()
    if not result.loop.counted:
        raise UntrainedError(
            "no client counted in any round, so the model is as it began: the warnings above name"
            f" the reason. The rows are in {result.folder}."
        )


def _evaluate(cfg: DictConfig) -> None:
    """``python src/eval.py ckpt_path=logs/…/checkpoints/last.ckpt``: the global model on the test
    split.
    """
    from gcfed.run import evaluate

    print(json.dumps(evaluate(cfg)))


def _report(cfg: DictConfig) -> None:
    """``python src/report.py 'roots=[logs]' out=logs/report``: tables, figures and a page of
    finished runs.
    """
    from gcfed.reporting import write_report

    roots = [cfg.roots] if isinstance(cfg.roots, str) else cfg.roots or ()
    write_report(
        *roots, out=cfg.out, measures=cfg.measures and list(cfg.measures), figures=cfg.figures
    )


train, evaluate = partial(_run, "train", _train), partial(_run, "eval", _evaluate)
report = partial(_run, "report", _report)
