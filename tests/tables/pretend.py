"""Runs tables whose jobs only pretend to train."""

from functools import cache

import yaml
from conftest import composer
from omegaconf import OmegaConf
from run_folders import accuracies, write_run

from gcfed.folders.folder import SECTIONS
from gcfed.tables import command, running, search

composed = cache(composer)


def whole(overrides):
    """A config with all keys."""
    return composed(tuple(overrides)).copy()


def plain(overrides):
    """A small config with these values. Reading the files of Hydra's config would take long."""
    few = (
        "seed=1 rounds=1 eval_every=1 metrics={} callbacks={} client.optimizer.lr=0.01 tags.data=x"
        " tags.model=y"
    )
    values = []
    for word in [*few.split(), f"paths.log_dir={plain.logs}", *overrides]:
        key, _, value = word.partition("=")
        # a group, whose options are sections
        values.append(f"{key}._target_={value}" if key in SECTIONS else word)
    return OmegaConf.from_dotlist(values)


def finish(folder, overrides, rounds, compose, *, rows=None, **summary):
    """Writes the files of a finished run. By default its rows are equal."""
    cfg = compose([*overrides, f"rounds={rounds}", "paths.output_dir=run"])
    cfg = OmegaConf.to_container(cfg, resolve=True)
    rows = rows or accuracies(*[0.5] * rounds)
    run = write_run(folder, rows, summary={"rounds": min(rounds, len(rows)), **summary}, **cfg)
    (run.folder / "checkpoints").mkdir(exist_ok=True)
    (run.folder / "checkpoints" / "last.ckpt").touch()


class Trainer:
    """Replaces ``running.train``: writes what a run would write, with the accuracy that ``of``
    returns.

    ``of`` takes the job's overrides as a dict and its number. If it returns a string, the run fails
    for that reason. If it returns a list, these are the rows of the metrics.
    """

    def __init__(
        self, of=lambda values, number: 0.5, compose=plain, result=lambda values: "test/acc"
    ):
        self.of = of
        self.compose = compose
        self.result = result
        self.jobs = []
        self.folders = []

    def __call__(self, overrides, folder):
        values = dict(override.split("=", 1) for override in overrides)
        self.jobs.append([*overrides])
        self.folders.append(folder)
        found = self.of(values, len(self.jobs) - 1)
        if isinstance(found, str):
            return found
        rounds = int(values.get("rounds", 1))
        rows = found if isinstance(found, list) else accuracies(*[found] * rounds)
        result = self.result(values)
        finish(folder, overrides, rounds, self.compose, rows=rows, result=result)
        return ""


def go(monkeypatch, tmp_path, trainer, node, *words, name="try"):
    """Runs ``gcfed-table <name>.yaml <words>``; returns the exit code."""
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(node, allow_unicode=True))
    monkeypatch.setattr(running, "train", trainer)
    for module in (command, running, search):
        monkeypatch.setattr(module, "composed", trainer.compose)
    if trainer.compose is not whole:
        monkeypatch.setattr(running, "check_cells", lambda *_: None)
    if trainer.compose is plain:
        monkeypatch.setattr("gcfed.assemble.declared_result", lambda cfg: "")
    return command.main([str(path), *words])
