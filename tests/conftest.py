"""Shared helpers: small federations in memory, and real runs through the composed config."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import LightningDataModule
from omegaconf import DictConfig, open_dict
from torch.utils.data import DataLoader

import gcfed.runs.place  # noqa: F401
from gcfed.runs.reading import read_metrics
from gcfed.utils.compose import Composer
from gcfed.utils.resolvers import ROOT

composer = Composer()  # by which tests compose what differs in values alone once
DATA_DIR = Path(os.environ.get("DATA_DIR", ROOT / "data"))


def pytest_collection_modifyitems(items):
    """The slow ones first, so that no worker ends with one while the others have nothing left."""
    items.sort(key=lambda item: "slow" not in item.keywords)


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors gain nothing from more, and two threads lose much where another program has one of the cores."""
    torch.set_num_threads(1)


def read_rows(path: str | Path) -> list[dict[str, float]]:
    """The rows of a ``metrics.csv``, empty cells left out."""
    rows = read_metrics(Path(path)).reset_index().to_dict("records")
    return [{key: value for key, value in row.items() if value == value} for row in rows]


class ArrayData(LightningDataModule):
    """Clients' data in memory, as the engine sees them: no transform, no test."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, clients: list[np.ndarray]) -> None:
        super().__init__()
        self.x, self.y, self.clients = x, y, clients
        self.num_clients, self.rounds, self.input_shape = len(clients), 1, tuple(x.shape[1:])

    def client(self, client: int) -> np.ndarray:
        return self.clients[client]

    def sizes(self, clients: np.ndarray) -> np.ndarray:
        return np.array([len(self.clients[k]) for k in clients])

    def draw(self, rng, shape):
        return None

    def fetch(self, index, augment):
        return self.x[index], self.y[index]

    def to_device(self, device, dtype, memory_format):
        pass

    def train_dataloader(self):
        return DataLoader(range(self.rounds), batch_size=None)

    def val_dataloader(self):
        return DataLoader([])


def random_federation(sizes=(7, 12, 5, 9, 1), features=6, classes=4, seed=0, dtype=torch.float64) -> ArrayData:
    """Clients of unequal sizes with random inputs and labels."""
    g = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    x = torch.randn(n, features, generator=g, dtype=dtype)
    y = torch.randint(classes, (n,), generator=g)
    return ArrayData(x, y, np.split(np.arange(n), np.cumsum(sizes)[:-1]))


@pytest.fixture
def federation() -> ArrayData:
    return random_federation()


@pytest.fixture
def config(tmp_path):
    """``config("gc=local", rounds=3)``-like: a composed training config that writes to a temporary folder."""

    def make(*overrides: str, folder: Path | None = None) -> DictConfig:
        GlobalHydra.instance().clear()
        cfg = composer(overrides)
        with open_dict(cfg):
            cfg.paths.output_dir = str(folder or tmp_path / "run")
            cfg.extras.figures = "extras.figures=true" in overrides
            if "trainer.devices=auto" not in overrides and cfg.trainer.devices == "auto":
                cfg.trainer.devices = 1  # pytest has a worker on each core
            del cfg.callbacks.progress
            if "tensorboard" in cfg.logger and not any(o.startswith("logger") for o in overrides):
                del cfg.logger.tensorboard
        return cfg

    return make


def pytest_configure(config):
    """The suite is of the CPU, also where there is a GPU; its own tests are ``pytest -m cuda -n 0``."""
    if config.option.markexpr != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True)
def _no_second_pytest(monkeypatch):
    """Where a run cannot fork, Lightning starts the present command again for each process, which is pytest."""
    launcher = "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher"
    end = pytest.fail if sys.platform == "linux" else pytest.skip
    monkeypatch.setattr(f"{launcher}.launch", lambda *_, **__: end("this run did not fork, as runs do under Linux"))


#: Settings of a run over two processes, forked from that of the test.
TWO = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2")


def run_script(script: str, *words: str) -> None:
    """``python src/<script> <words>``, in this process and for its terminal."""
    sys.argv = [script, *words]
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ["COLUMNS"] = "100"
    GlobalHydra.instance().clear()
    runpy.run_path(str(ROOT / "src" / script), run_name="__main__")


def type_command(folder: Path, script: str, *words: str, code: int = 0) -> str:
    """What ``python src/<script> <words>`` prints; in a fork of this process, without the seconds of its imports."""

    def child() -> None:
        with (folder / "printed.txt").open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        run_script(script, *words)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(240)
    printed = (folder / "printed.txt").read_text()
    assert process.exitcode == code, printed[-4000:]
    return printed


@pytest.fixture
def unrendered(monkeypatch):
    """Figures are made, but their files are empty: what they show is read off their artists, in no time."""
    from gcfed.plots import style  # matplotlib: not for all tests

    monkeypatch.setattr(style, "render", lambda figure, path: Path(path).write_bytes(b""))
