"""What looks at a column of metrics.csv: the best checkpoint, and an end before the last round."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import read_rows
from harness import Spy, final_weights
from omegaconf import open_dict

from gcfed.checkpoints.reading import load_checkpoint
from gcfed.checkpoints.writing import BestCheckpoint
from gcfed.run import evaluate, train
from gcfed.runs.folder import read_run

FAST = (
    "participation.num_clients=4", "participation.per_round=2", "client.epochs=1", "data.limit_train=100",
    "data.limit_test=60", "gc=none", "model.hidden=[8]",
)  # fmt: skip
WAVE = (0.1, 0.5, 0.3, 0.4, 0.7, 0.2, 0.6, 0.1)


class Killed(BaseException): ...


class Wave(Spy):
    """Adds a column that goes up and down; of the clients, say."""

    def on_round_end(self, row, round):
        row["clients/wave"] = WAVE[round.index]
        if round.index == 5 and self.kill:
            raise Killed

    def __init__(self, kill=False):
        self.kill = kill

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 5:
            self.fifth = {name: t.clone() for name, t in pl_module.net.state_dict().items()}


def run(config, folder, *overrides, kill=False):
    cfg = config(*FAST, *overrides, folder=folder)
    with open_dict(cfg):
        cfg.callbacks = {"wave": {"_target_": f"{__name__}.Wave", "kill": kill}, **cfg.callbacks}
    return train(cfg)


def of(folder, name="best.ckpt"):
    return load_checkpoint(folder / "checkpoints" / name)


def test_the_best_checkpoint_is_of_the_round_with_the_best_column(config, tmp_path, caplog):
    best = ("callbacks=best", "callbacks.best.column=clients/wave", "rounds=8")
    with caplog.at_level("INFO"):
        result = run(config, tmp_path / "run", *best)
    assert "best.ckpt is of round 5: clients/wave 0.7" in caplog.text
    assert of(tmp_path / "run")["global_step"] == 5
    (wave,) = (callback for callback in result.trainer.callbacks if isinstance(callback, Wave))
    for name, tensor in wave.fifth.items():
        assert torch.equal(of(tmp_path / "run")["state_dict"][f"net.{name}"], tensor)
    steps = [of(tmp_path / "run", name)["global_step"] for name in ("last.ckpt", "previous.ckpt")]
    assert steps == [8, 7]  # as without it
    least = run(config, tmp_path / "least", *best, "callbacks.best.mode=min", "callbacks.best.column=test/loss")
    rows = read_rows(tmp_path / "least" / "metrics.csv")
    wanted = min(rows, key=lambda row: row["test/loss"])
    tested = evaluate(config(*FAST, f"ckpt_path={tmp_path / 'least/checkpoints/best.ckpt'}"))
    assert tested["round"] == wanted["round"]
    assert tested["test/loss"] == pytest.approx(wanted["test/loss"], rel=1e-6)
    assert least.trainer.global_step == 8
    with pytest.raises(ValueError, match=r"best\.ckpt is to be tested, by src/eval\.py"):
        run(config, tmp_path / "run", *best, f"ckpt_path={tmp_path / 'run/checkpoints/best.ckpt'}")


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_the_first_of_equal_rounds_stays_the_best(tmp_path, mode, sign):
    saved = []
    trainer = SimpleNamespace(callbacks=[], strategy=SimpleNamespace(broadcast=bool))
    trainer.save_checkpoint = lambda path, weights_only: saved.append((path, best.round, best.best))
    best = BestCheckpoint(str(tmp_path), mode=mode)
    for number, value in enumerate((0.5, 0.5, np.nan, 0.7, 0.7, 0.6), start=1):
        best.after_round(trainer, {"round": number, "test/acc": sign * value})
    assert saved == [(tmp_path / "best.ckpt", 1, sign * 0.5), (tmp_path / "best.ckpt", 4, sign * 0.7)]


def test_a_resumed_run_knows_its_best(config, tmp_path):
    """Killed in the sixth round, one after the best."""
    best = ("callbacks=best", "callbacks.best.column=clients/wave", "rounds=8")
    with pytest.raises(Killed):
        run(config, tmp_path, *best, kill=True)
    before = (tmp_path / "checkpoints/best.ckpt").read_bytes()
    run(config, tmp_path, *best, "ckpt_path=last")
    assert of(tmp_path, "last.ckpt")["global_step"] == 8
    assert (tmp_path / "checkpoints/best.ckpt").read_bytes() == before
    states = [state for state in of(tmp_path, "last.ckpt")["callbacks"].values() if "best" in state]
    assert states == [{"best": 0.7, "round": 5, "column": "clients/wave"}]


def test_a_run_that_gets_no_better_ends_and_is_finished(config, tmp_path, caplog):
    stop = ("callbacks=early_stopping", "callbacks.early_stopping.column=clients/wave", "rounds=8")
    with caplog.at_level("INFO"):
        run(config, tmp_path / "run", *stop, "callbacks.early_stopping.patience=2")
    found = read_run(tmp_path / "run")
    assert (found.state, found.rounds, found.planned) == ("finished", 4, 8)  # 0.5 is best, then come 0.3 and 0.4
    assert found.summary["stopped"] == "clients/wave was not better than 0.5 in the last 2 tests"
    assert "stopped early after round 4" in caplog.text
    assert of(tmp_path / "run", "last.ckpt")["global_step"] == 4

    with caplog.at_level("INFO"):
        again = run(config, tmp_path / "run", *stop, "callbacks.early_stopping.patience=2", "ckpt_path=last")
    assert again.trainer.global_step == 4  # nothing is trained
    assert "with more patience or without callbacks.early_stopping it trains on" in caplog.text
    more = run(config, tmp_path / "run", *stop, "callbacks.early_stopping.patience=3", "ckpt_path=last")
    straight = run(config, tmp_path / "straight", *stop, "callbacks.early_stopping.patience=3")
    assert [result.trainer.global_step for result in (more, straight)] == [8, 8]  # 0.7 came in time, its third is last
    assert torch.equal(final_weights(more), final_weights(straight))
    assert read_run(tmp_path / "run").summary["stopped"] == "clients/wave was not better than 0.7 in the last 3 tests"


def test_a_run_is_not_stopped_between_two_tests(config, tmp_path):
    stop = ("callbacks=early_stopping", "callbacks.early_stopping.column=clients/wave", "rounds=8", "eval_every=3")
    run(config, tmp_path, *stop, "callbacks.early_stopping.patience=1")
    rows = read_rows(tmp_path / "metrics.csv")
    assert [row["round"] for row in rows if "test/acc" in row] == [3, 6]  # 0.3, then 0.2
    assert np.isfinite(read_run(tmp_path).summary["test/acc"])


@pytest.mark.parametrize(
    ("name", "column", "hint"),
    [
        ("best", "personal/local_acc", "metrics=personal measures such columns; "),
        ("early_stopping", "test/ac", ""),
        ("early_stopping", "clients/crest", ""),  # there are others of this metric's
    ],
)
def test_a_column_that_no_round_has_is_named_after_the_first_one(config, tmp_path, name, column, hint):
    said = rf"^callbacks\.{name}\.column={column} is no column of this run; {hint}there are round, .*test/acc"
    with pytest.raises(ValueError, match=said):
        run(config, tmp_path, f"callbacks={name}", f"callbacks.{name}.column={column}", "rounds=3")
    assert len(read_rows(tmp_path / "metrics.csv")) == 1


def test_a_column_of_some_rounds_is_waited_for(config, tmp_path):
    both = ("callbacks=[best,early_stopping]", "metrics=gap", "metrics.gap.every=2", "rounds=5")
    columns = ("callbacks.best.column=gap/l2", "callbacks.early_stopping.column=gap/l2", "callbacks.best.mode=min")
    run(config, tmp_path, *both, *columns, "callbacks.early_stopping.patience=1")
    rows = {row["round"]: row["gap/l2"] for row in read_rows(tmp_path / "metrics.csv") if "gap/l2" in row}
    assert of(tmp_path)["global_step"] == min(rows, key=rows.__getitem__)
    assert {2, 4} <= {*rows} <= {2, 4, 5}
