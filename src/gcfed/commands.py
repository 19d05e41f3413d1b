"""The commands ``gcfed-train``, ``gcfed-eval``, ``gcfed-report`` and ``gcfed-table``;
``src/train.py`` and its neighbours call the first three.

A wrong setting, file or combination ends a command with one line, which names the key or the file.
``debug=true`` adds the traceback. Errors in the user's own code always show theirs. A signal ends a
command with one sentence and the exit status 128 plus its number.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gcfed.utils.refusal import Failed
from gcfed.utils.stopped import Stopped, stop
from gcfed.utils.streams import keep_streams

if TYPE_CHECKING:
    from omegaconf import DictConfig

DEBUG = "debug=true"  # the words debug=fast and others are settings of a run

Command = Callable[["DictConfig"], None]


def train() -> None:
    """``gcfed-train``: trains a run, or with ``-m`` those of a sweep or search."""
    _call(partial(_compose_and_call, "train", _train))


def evaluate() -> None:
    """``gcfed-eval``: tests the global model of a run."""
    _call(partial(_compose_and_call, "eval", _evaluate))


def report() -> None:
    """``gcfed-report``: tables, figures and a page of finished runs."""
    _call(partial(_compose_and_call, "report", _report))


def table() -> None:
    """``gcfed-table my.yaml``: trains the cells of a table and compares them."""
    _call(_table)


def _call(command: Callable[[list[str]], int | None]) -> None:
    """Calls a command with its words. An error and a signal end it with a sentence."""
    keep_streams()
    sys.path.append(str(Path.cwd()))  # a user's own networks, data and methods
    before = signal.signal(signal.SIGTERM, stop)
    words = sys.argv[1:]
    debug = DEBUG in words
    code = None
    try:
        code = command([word for word in words if word != DEBUG])
    except (KeyboardInterrupt, Stopped) as signalled:
        _end_stopped(signalled)
    except Failed as failed:
        _end(failed.error, debug)
    except Exception as error:
        _end(error, debug)
    finally:
        signal.signal(signal.SIGTERM, before)
    if code:
        sys.exit(code)


def _compose_and_call(name: str, command: Command, words: list[str]) -> None:
    """Calls the command with the config that Hydra composes from ``configs/<name>.yaml`` and the
    command line. Hydra calls it once for each job of a sweep.
    """
    import hydra

    from gcfed.folders.place import run_config  # its resolvers name the folders of runs
    from gcfed.utils.compose import is_override, refuse_words, shorthand
    from gcfed.utils.hints import COMPOSING_ERRORS, explained
    from gcfed.utils.refusal import Refusal
    from gcfed.utils.resolvers import CONFIGS, VERSION_BASE

    # OpenMP's threads wait for microseconds only: a round beside a busy program then takes 0.28 s
    # instead of 0.58 s.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises its errors
    overrides = [word for word in words if is_override(word)]
    flags = [word for word in words if not is_override(word)]
    if "--version" in flags:
        from gcfed import __version__

        print(f"gcfed {__version__}")
        return
    path = CONFIGS / f"{name}.yaml"
    overrides = shorthand(overrides)
    try:
        config_of_run = run_config(overrides) if name == "eval" else None
        if config_of_run is not None:
            path = config_of_run
            overrides += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"]
        refuse_words(words, path)
        # Hydra's parser refuses an override behind -m if another one stands before it
        sys.argv[1:] = overrides + flags
        compose = hydra.main(config_path=str(path.parent), config_name=path.stem, **VERSION_BASE)
        compose(partial(_guarded, command))()
    except COMPOSING_ERRORS as error:
        raise Refusal(explained(error)) from None


def _guarded(command: Command, cfg: DictConfig) -> None:
    """Calls the command. A sweep goes on after a job that fails, so its error is shown at once."""
    from gcfed.utils.home import expand_home
    from gcfed.utils.machine import in_sweep

    expand_home(cfg)
    try:
        command(cfg)
    except Exception as error:
        if not in_sweep():
            raise Failed(error) from error
        # no log line, because the folder of a refused job is gone, with its log
        print(f"this job has failed: {_in_one_line(error)}", flush=True)
        raise


def _end(error: BaseException, debug: bool) -> NoReturn:
    """Ends the command with the error's message, below its traceback where that helps."""
    from gcfed.utils.refusal import says_all

    sys.stdout.flush()  # the error is the last line, also where both streams are one file
    if says_all(error) and not debug:
        print(_in_one_line(error), file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.exit(1)


def _in_one_line(error: BaseException) -> str:
    from gcfed.folders.failure import headline

    return headline(error)


def _end_stopped(signalled: KeyboardInterrupt | Stopped) -> NoReturn:
    stopped = signalled if isinstance(signalled, Stopped) else Stopped(signal.SIGINT)
    sys.stdout.flush()
    print(stopped, file=sys.stderr)
    sys.exit(stopped.code)


def _train(cfg: DictConfig) -> None:
    """Trains one run: ``python src/train.py experiment=cifar10_cnn_gcfed seed=2``."""
    from hydra.core.hydra_config import HydraConfig

    from gcfed.folders.place import remove_refused
    from gcfed.run import train  # torch and lightning: not needed for --help and --cfg
    from gcfed.utils.idle import refuse_idle
    from gcfed.utils.refusal import Refusal

    try:
        command = HydraConfig.get()
        sweeper = command.runtime.choices.get("hydra/sweeper")
        if sweeper in (None, "basic"):
            # A search has looked at its settings. A trial may draw a key that its other draws make
            # idle.
            refuse_idle(cfg, command.overrides.task, searches=False)
        result = train(cfg)
    finally:
        remove_refused(cfg)
    if not result.loop.run.counted:
        raise Refusal(
            "no client counted in any round, so the model is as it began: the warnings above name"
            f" the reason. The rows are in {result.folder}."
        )


def _evaluate(cfg: DictConfig) -> None:
    """``python src/eval.py ckpt_path=logs/…/checkpoints/last.ckpt``: the global model on the test
    split.
    """
    from gcfed.folders.summary import as_json
    from gcfed.run import evaluate

    print(as_json(evaluate(cfg)))


def _report(cfg: DictConfig) -> None:
    """``python src/report.py 'roots=[logs]' out=logs/report``: tables, figures and a page of
    finished runs.
    """
    from omegaconf import OmegaConf

    from gcfed.reporting import write_report
    from gcfed.utils.checked import NonEmpty, validated

    texts = NonEmpty | Sequence[NonEmpty] | None
    kinds = {"roots": texts, "out": NonEmpty, "measures": texts, "figures": bool}
    given: Any = OmegaConf.to_container(cfg, resolve=True)
    values = {key: validated(key, given[key], kind) for key, kind in kinds.items()}
    roots = values.pop("roots")
    write_report(*([roots] if isinstance(roots, str) else roots or ()), **values)


def _table(words: list[str]) -> int:
    from gcfed.tables.command import main

    return main(words)
