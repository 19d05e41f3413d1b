"""Shared helpers for real runs with a composed config.

This file does not import torch at its top, because the process that distributes the tests imports
it, too.
"""

import csv
import gc
import importlib.metadata
import multiprocessing
import os
import pickle
import runpy
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from copy import copy, deepcopy
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import omegaconf
import pytest
import yaml
from hydra import version
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.base import Box

import gcfed.folders.place  # noqa: F401
from gcfed.folders.reading import read_metrics
from gcfed.utils.compose import composed as composer
from gcfed.utils.compose import shorthand
from gcfed.utils.refusal import Refusal
from gcfed.utils.resolvers import CONFIGS, ROOT


def copied(deep: Callable) -> Callable:
    """Copies a whole config with pickle, in a tenth of the time."""
    return lambda self, memo: (
        pickle.loads(pickle.dumps(self)) if self._get_parent() is None else deep(self, memo)
    )


DictConfig.__deepcopy__ = copied(DictConfig.__deepcopy__)  # a run copies its config four times


def read_once(load: Callable) -> Callable:
    """Makes Hydra read each config file once. It returns copies."""
    read = {}

    def load_config(self, config_path):
        key = (*(source.path for source in self.sources), config_path)
        if key not in read:
            read[key] = pickle.dumps(load(self, config_path))
        return pickle.loads(read[key])  # faster than a deep copy

    return load_config


def with_parents(compose: Callable, set_parents: Callable = Box._re_parent) -> Callable:
    """Sets the parents of all nodes once, instead of after each of the 35 files."""

    def compose_from_defaults_list(self, *args, **kwargs):
        Box._re_parent = lambda self: None
        try:
            cfg = compose(self, *args, **kwargs)
        finally:
            Box._re_parent = set_parents
        cfg._re_parent()
        return cfg

    return compose_from_defaults_list


def beginnings_once(compose: Callable, load: Callable) -> tuple[Callable, Callable]:
    """Merges the first 9, 18, … files of a defaults list once, because most lists begin with the
    same files.
    """
    merged = {}

    def compose_from_defaults_list(self, defaults, repo):
        before = []
        n = 0
        sources = tuple(source.path for source in repo.get_sources())
        for n in range(9, len(defaults), 9):
            key = (sources, *map(repr, defaults[:n]))
            if key not in merged:
                merged[key] = pickle.dumps(compose(self, [*before, *defaults[n - 9 : n]], repo))
            before = [key]
        return compose(self, [*before, *defaults[n:]], repo)

    def load_single_config(self, default, repo):
        # else another conftest.py has patched Hydra before
        if isinstance(default, tuple) and default in merged:
            return SimpleNamespace(config=pickle.loads(merged[default]))
        return load(self, default, repo)

    return compose_from_defaults_list, load_single_config


def parse_once(parse: Callable) -> Callable:
    """Makes Hydra parse each word of a command once, because its grammar takes a millisecond."""
    parsed = {}

    def parse_rule(self, text, rule):
        if rule != "override":
            return parse(self, text, rule)
        if text not in parsed:
            parsed[text] = parse(self, text, rule)
        return copy(parsed[text])  # Hydra sets an attribute

    return parse_rule


# These patches take two thirds off the time of Hydra's composition. Our defaults lists have no
# interpolations, so they need no table of them. Parsing interpolations, and reading the packages'
# entry points for Lightning's Trainer, take a tenth of a small run.
ConfigRepository.load_config = read_once(ConfigRepository.load_config)
ConfigLoaderImpl._compose_config_from_defaults_list = with_parents(
    ConfigLoaderImpl._compose_config_from_defaults_list
)
ConfigLoaderImpl._compose_config_from_defaults_list, ConfigLoaderImpl._load_single_config = (
    beginnings_once(
        ConfigLoaderImpl._compose_config_from_defaults_list, ConfigLoaderImpl._load_single_config
    )
)
defaults_list._create_interpolation_map = lambda *_: None
OverridesParser.parse_rule = parse_once(OverridesParser.parse_rule)
version._get_version = cache(version._get_version)
omegaconf.base.parse = cache(omegaconf.base.parse)
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)


class Dumper(yaml.CDumper):
    """Writes the same text as OmegaConf's dumper in half the time."""

    yaml_representers = get_omega_conf_dumper().yaml_representers


omegaconf.omegaconf.get_omega_conf_dumper = lambda: Dumper
yaml.SafeLoader = yaml.CSafeLoader
DATA_DIR = Path(os.environ.get("DATA_DIR", ROOT / "data"))


def pytest_collection_modifyitems(items):
    """Runs the slow tests first, so that no worker waits for a slow test at the end."""
    items.sort(key=lambda item: "slow" not in item.keywords)


def pytest_collection_finish():
    """Python's garbage collector need not look at the imported packages again and again."""
    gc.collect()
    gc.freeze()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # for the fixtures of modules, which come before _one_thread
        # else the first comparison imports 500 modules
        torch.testing._comparison._HAS_DTENSOR = False


def pytest_unconfigure():
    gc.unfreeze()  # else a package complains about leaks


def needs(package: str) -> pytest.MarkDecorator:
    """For modules that need a package.

    The first test imports it, because an import takes seconds in every worker.
    """
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors need only one thread. Two threads are slow if another program uses a core."""
    import torch

    torch.set_num_threads(1)


def read_rows(path: str | Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.csv``, without empty cells."""
    rows = read_metrics(Path(path)).reset_index().to_dict("records")
    return [{key: value for key, value in row.items() if value == value} for row in rows]


def read_lines(path: Path) -> list[list[str]]:
    """The lines of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.reader(file))


def options(group: str) -> list[str]:
    """The choices of a group of configs. base.yaml is a part of other files and no choice."""
    stems = {path.stem for path in (CONFIGS / group).glob("*.yaml")}
    return sorted(stems - {"base"})


def refuses(sentence: str) -> AbstractContextManager[pytest.ExceptionInfo[Refusal]]:
    """Expects an error that is meant for a user, whose message matches this pattern."""
    return pytest.raises(Refusal, match=sentence)


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[str]:
    """A list that gets the name of this function or method at each call, which is made as usual."""
    calls: list[str] = []
    usual = getattr(owner, name)

    def noted(*args: object, **kwargs: object) -> object:
        calls.append(name)
        return usual(*args, **kwargs)

    monkeypatch.setattr(owner, name, noted)
    return calls


def contents(folder: Path) -> dict[Path, bytes]:
    """The bytes of each file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def federation():
    from harness import random_federation

    return random_federation()


#: Parsing the overrides again would take five times as long as a copy.
composed_once = lru_cache(64)(composer)


def config_of(*overrides: str, folder: Path) -> DictConfig:
    """A training config whose run writes to a folder."""
    GlobalHydra.instance().clear()
    cfg = deepcopy(composed_once(overrides))
    with open_dict(cfg):
        cfg.paths.output_dir = str(folder)
        cfg.extras.figures = "extras.figures=true" in overrides
        if "trainer.devices=auto" not in overrides and cfg.trainer.devices == "auto":
            cfg.trainer.devices = 1  # each core has a pytest worker
        del cfg.callbacks.progress
        if "tensorboard" in cfg.logger and not any(o.startswith("logger") for o in overrides):
            del cfg.logger.tensorboard
    return cfg


@pytest.fixture
def config(tmp_path):
    """``config("gc=local", folder=…)`` composes a training config whose run writes to a temporary
    folder.
    """

    def make(*overrides: str, folder: Path | None = None) -> DictConfig:
        return config_of(*overrides, folder=folder or tmp_path / "run")

    return make


def pytest_configure(config):
    """Hides GPUs from all tests but those of ``pytest -m cuda -n 0``.

    Puts temporary folders into memory if there is enough, because each round would wait for a disk.
    """
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    memory = Path("/dev/shm")
    if memory.is_dir() and shutil.disk_usage(memory).free > 8 * 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


@pytest.fixture(autouse=True)
def _no_second_pytest(monkeypatch):
    """If a run cannot fork, Lightning would start the present command, which is pytest, again."""
    launcher = "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher"
    end = pytest.fail if sys.platform == "linux" else pytest.skip
    monkeypatch.setattr(
        f"{launcher}.launch", lambda *_, **__: end("this run did not fork, as runs do under Linux")
    )


#: Settings of a run with two processes, which are forks of the test's process.
TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")


def run_script(script: str, *words: str) -> None:
    """Runs ``python src/<script> <words>`` in this process and its terminal."""
    sys.argv = [script, *words]
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ["COLUMNS"] = "100"
    GlobalHydra.instance().clear()
    runpy.run_path(str(ROOT / "src" / script), run_name="__main__")


def forked(call: Callable[[], object], printed: Path) -> int | None:
    """Runs ``call`` in a fork of this process, which prints to a file. Returns the exit code.

    This process first imports what a run needs and reads the config, so that the fork starts
    quickly.
    """
    import torch.utils.tensorboard  # noqa: F401

    import gcfed.run  # noqa: F401

    def child() -> None:
        gc.freeze()  # the garbage collector need not look at what is here already
        with printed.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        call()

    composer(())
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(240)
    return process.exitcode


def type_command(folder: Path, script: str, *words: str, code: int = 0) -> str:
    """Returns what ``python src/<script> <words>`` prints."""
    ended = forked(lambda: run_script(script, *words), folder / "printed.txt")
    printed = (folder / "printed.txt").read_text()
    assert ended == code, printed[-4000:]
    return printed


def first_values(words: Iterable[str]) -> list[str]:
    """The overrides of a command on a page: of a sweep the first value, without the words that are
    about folders.
    """
    found = []
    for override in OverridesParser.create().parse_overrides(shorthand(words)):
        if override.is_sweep_override():
            value = next(override.sweep_string_iterator())
        else:
            value = override.get_value_element_as_str()
        word = f"{override.input_line.partition('=')[0]}={value}"
        if not word.startswith(("ckpt_path=", "hydra.", "hydra/launcher")):
            found.append(word)
    return found


@pytest.fixture
def unrendered(monkeypatch):
    """Figures are not rendered: each file has one pixel. Tests inspect the artists instead."""
    from matplotlib.figure import Figure  # few tests need these
    from PIL import Image

    def save_one_pixel(figure: Figure, path: str | Path, **options: object) -> None:
        Image.new("RGBA", (1, 1)).save(path, format="png")

    monkeypatch.setattr(Figure, "savefig", save_one_pixel)
