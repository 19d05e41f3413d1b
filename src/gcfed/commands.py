"""The commands ``gcfed-train``, ``gcfed-eval`` and ``gcfed-report``; ``src/train.py`` and its neighbours call them.

Each ends in one sentence: while it imports, composes, runs, is stopped by a signal, and where nobody reads on. Nothing
heavy is imported above, so that signals are heard from the first line on.
"""

from __future__ import annotations

import json
import logging
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _run(name: str, task: Callable[[DictConfig], Any]) -> None:
    """Calls the task with the config that Hydra composes of ``configs/<name>.yaml`` and the command line.

    ``eval`` takes the ``config.yaml`` of the run's folder instead, unless model and data are named.
    """
    open_streams()
    with stoppable(at_once=True):
        import hydra
        from hydra._internal import utils as hydra_utils
        from hydra.errors import HydraException

        import gcfed.runs.folder  # noqa: F401  (its resolvers name the folders of runs)
        from gcfed.utils.compose import check_groups, check_sweeps, composed, explained, run_config, shorthand
        from gcfed.utils.machine import spin_briefly
        from gcfed.utils.resolvers import CONFIGS

        def explaining(func: Callable[[], Any]) -> Any:
            with one_sentence():
                try:
                    return func()
                except HydraException as error:
                    if _wants_traceback():
                        raise
                    words = [word for word in sys.argv[1:] if _is_override(word)]
                    raise ValueError(explained(error, words, partial(composed, path))) from None

        spin_briefly()
        sys.path.append(str(Path.cwd()))  # where a user's own networks, data and methods lie
        sys.argv[1:] = ordered(shorthand(sys.argv[1:]))
        path = CONFIGS / f"{name}.yaml"
        with one_sentence():
            if name == "eval" and (found := run_config(sys.argv[1:])):
                path = found
                sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none"]
        main = hydra.main(version_base="1.3", config_path=str(path.parent), config_name=path.stem)(task)
        report = hydra_utils.run_and_report
        hydra_utils.run_and_report = lambda func: report(lambda: explaining(func))
        with one_sentence():
            check_groups(sys.argv[1:])
            check_sweeps(sys.argv[1:])
            try:
                main()
            finally:
                sys.stdout.flush()


def _train(cfg: DictConfig) -> None:
    """``python src/train.py experiment=cifar10_cnn_gcfed seed=2``: every key is in ``configs/``."""
    with stoppable(at_once=True):  # torch and lightning: not needed for --help and --cfg
        from lightning.pytorch.utilities.exceptions import SIGTERMException

        from gcfed.run import train
        from gcfed.utils.machine import in_sweep

    logging.raiseExceptions = False  # on a full disk train.log lacks lines, and nobody needs a traceback for each
    with one_sentence(errors=not in_sweep()), stoppable():
        try:
            train(cfg)
        except SIGTERMException as stop:  # Lightning's word for it, from a run of several processes
            raise Stopped(int(str(stop.code)) - 128) from None


def _evaluate(cfg: DictConfig) -> None:
    """``python src/eval.py ckpt_path=logs/…/checkpoints/last.ckpt``: the global model on the test split."""
    with stoppable(at_once=True):
        from gcfed.run import evaluate

    with one_sentence(), stoppable():
        print(json.dumps(evaluate(cfg)))


def _report(cfg: DictConfig) -> None:
    """``python src/report.py 'roots=[logs]' out=logs/report``: tables, figures and a page of finished runs."""
    from omegaconf import OmegaConf

    from gcfed.report import write_report

    with one_sentence():
        settings: Any = OmegaConf.to_container(cfg, resolve=True)
        del settings["paths"]
        roots = settings.pop("roots")
        write_report(*([roots] if isinstance(roots, str) else roots or ()), **settings)


train, evaluate = partial(_run, "train", _train), partial(_run, "eval", _evaluate)
report = partial(_run, "report", _report)


def open_streams() -> None:
    """Lets a standard stream that the caller has closed (``>&-``) lead nowhere: print() and flush() work, and no file
    that is opened later takes its number.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def ordered(words: Sequence[str]) -> list[str]:
    """Overrides before flags: Hydra's parser knows no override behind ``-m`` once one stood before it."""
    return sorted(words, key=lambda word: not _is_override(word))


def _is_override(word: str) -> bool:
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def _wants_traceback() -> bool:
    return os.environ.get("HYDRA_FULL_ERROR") == "1"


class Stopped(BaseException):
    """A signal asked the process to end. No error: what catches errors must let it through."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"asked to end by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum  # as a shell says it


@contextmanager
def stoppable(*, at_once: bool = False) -> Iterator[None]:
    """Within the block, SIGINT, SIGTERM and SIGHUP raise :class:`Stopped`, so that everything is left as it should be.

    A second signal is not waited for: it ends the process at once.

    Args:
        at_once: the process says so and ends where it is: while modules are imported, which may turn an exception into
            another or swallow it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        for each in ENDING:
            signal.signal(each, signal.SIG_DFL)
        stopped = Stopped(signum)
        if not at_once:
            raise stopped
        try:
            os.write(2, f"Stopped: {stopped}.\n".encode())
            _drop_unused()
        finally:  # whatever half-imported modules have against it
            os._exit(stopped.exit_code)

    before = {signum: signal.signal(signum, stop) for signum in ENDING if signal.getsignal(signum) != signal.SIG_IGN}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def one_sentence(*, errors: bool = True) -> Iterator[None]:
    """Ends the process with the sentence of an error that names its key or file, without the frames that led to it.

    A signal that :func:`stoppable` turned into an exception ends it with its number. Where the reader of a pipe has
    gone, as behind ``| head``, nothing is said.

    Args:
        errors: False in a sweep's job: the others go on, and the sweep says how each ended. HYDRA_FULL_ERROR=1 shows
            where.
    """
    from omegaconf.errors import OmegaConfBaseException

    from gcfed.utils.files import in_words

    try:
        yield
    except Stopped as stop:
        folder = _drop_unused()
        goes_on = folder is not None and (folder / "checkpoints" / "last.ckpt").is_file()
        hint = " The same command with ckpt_path=last goes on after the last finished round." * goes_on
        _say(f"Stopped: {stop}.{hint}")
        raise SystemExit(stop.exit_code) from None
    except (ValueError, OSError, OmegaConfBaseException) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            raise SystemExit(128 + signal.SIGPIPE) from None
        if not errors or _wants_traceback():
            raise
        hidden = error.__cause__ if str(error).startswith("Unable to configure handler") else None  # that of the log
        _say(f"{in_words(hidden or error, _run_folder())} (HYDRA_FULL_ERROR=1 shows where)")
        _drop_unused()
        raise SystemExit(1) from None


def _nobody_reads() -> bool:
    """Whether what this process prints has no reader any more; if so, the rest goes nowhere."""
    printed = select.poll()
    printed.register(1, 0)
    if not any(event & select.POLLERR for _, event in printed.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def _say(sentence: str) -> None:
    if _run_folder() in (None, Path.cwd()):
        sys.stderr.write(f"{sentence}\n")
    else:
        log.error("%s", sentence)


def _run_folder() -> Path | None:
    """That of the job that is running, which is the present folder for all commands but a run."""
    config = getattr(sys.modules.get("hydra.core.hydra_config"), "HydraConfig", None)
    folder = config.get().runtime.get("output_dir") if config is not None and config.initialized() else None
    return None if folder is None else Path(folder)


def _drop_unused() -> Path | None:
    """Deletes the folder that Hydra made for a run that has not begun; it, or the run's folder."""
    folder = _run_folder()
    with suppress(OSError):
        if folder is not None and folder != Path.cwd() and [path.name for path in folder.iterdir()] == ["train.log"]:
            shutil.rmtree(folder)
            folder.parent.rmdir()  # logs/<name>/ too, unless other runs are in it
    return folder
