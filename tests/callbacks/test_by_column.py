"""Callbacks that monitor a column of metrics.csv: the best checkpoint and early stopping."""

import pytest
import torch
from conftest import read_rows
from harness import Spy, final_weights
from lightning.pytorch import Callback
from omegaconf import open_dict

from gcfed.checkpoints.reading import load_checkpoint
from gcfed.folders.folder import read_run
from gcfed.run import evaluate, train

FAST = (
    "participation.num_clients=4",
    "participation.per_round=2",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=60",
    "gc=none",
    "model.hidden=[8]",
)
WAVE = (0.1, 0.5, 0.3, 0.4, 0.7, 0.7, 0.6, 0.1)
BEST = ("callbacks=best", "callbacks.best.monitor=clients/wave", "rounds=8")
STOP = ("callbacks=early_stopping", "callbacks.early_stopping.monitor=clients/wave", "rounds=8")


class Killed(BaseException): ...


class Wave(Spy):
    """Adds a column that goes up and down."""

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


def test_the_best_checkpoint_is_of_the_first_round_with_the_best_column(config, tmp_path):
    result = run(config, tmp_path / "run", *BEST)
    assert of(tmp_path / "run")["global_step"] == 5
    (wave,) = (callback for callback in result.trainer.callbacks if isinstance(callback, Wave))
    for name, tensor in wave.fifth.items():
        assert torch.equal(of(tmp_path / "run")["state_dict"][f"net.{name}"], tensor)
    tested = evaluate(config(*FAST, f"ckpt_path={tmp_path / 'run/checkpoints/best.ckpt'}"))
    assert tested["round"] == 5
    assert tested["test/loss"] == pytest.approx(result.frame["test/loss"][5], rel=1e-6)


def test_a_resumed_run_keeps_its_best_checkpoint(config, tmp_path):
    """The kill comes in the round after the best one.

    That round is equally good and must not replace it.
    """
    with pytest.raises(Killed):
        run(config, tmp_path, *BEST, kill=True)
    before = (tmp_path / "checkpoints/best.ckpt").read_bytes()
    run(config, tmp_path, *BEST, "ckpt_path=last")
    assert of(tmp_path, "last.ckpt")["global_step"] == 8
    assert (tmp_path / "checkpoints/best.ckpt").read_bytes() == before


def test_a_run_without_improvement_stops_and_is_finished(config, tmp_path):
    run(config, tmp_path / "run", *STOP, "callbacks.early_stopping.patience=2")
    found = read_run(tmp_path / "run")
    # 0.5 is best, then come 0.3 and 0.4
    assert found.state == "finished"
    assert found.rounds == 4
    assert found.planned == 8
    assert "clients/wave did not improve in the last 2 records" in found.summary["stopped"]
    assert of(tmp_path / "run", "last.ckpt")["global_step"] == 4
    again = run(
        config, tmp_path / "run", *STOP, "callbacks.early_stopping.patience=2", "ckpt_path=last"
    )
    assert again.trainer.global_step == 4  # nothing is trained
    more = run(
        config, tmp_path / "run", *STOP, "callbacks.early_stopping.patience=3", "ckpt_path=last"
    )
    straight = run(config, tmp_path / "straight", *STOP, "callbacks.early_stopping.patience=3")
    # no improvement after round 5
    assert [result.trainer.global_step for result in (more, straight)] == [8, 8]
    assert torch.equal(final_weights(more), final_weights(straight))


def test_a_column_that_no_part_has_written_is_reported_after_the_first_round(config, tmp_path):
    """Wave may write any column, so the run cannot be refused before."""
    with pytest.raises(
        ValueError, match=r"^monitor=test/ac is no column of this run\. There are round, .*test/acc"
    ):
        run(
            config,
            tmp_path,
            "callbacks=early_stopping",
            "callbacks.early_stopping.monitor=test/ac",
            "rounds=3",
        )
    assert len(read_rows(tmp_path / "metrics.csv")) == 1


def test_a_column_may_be_missing_in_some_rounds(config, tmp_path):
    both = ("callbacks=[best,early_stopping]", "metrics=gap", "metrics.gap.every=2", "rounds=5")
    columns = (
        "callbacks.best.monitor=gap/l2",
        "callbacks.early_stopping.monitor=gap/l2",
        "callbacks.best.mode=min",
    )
    run(config, tmp_path, *both, *columns, "callbacks.early_stopping.patience=1")
    rows = {
        row["round"]: row["gap/l2"]
        for row in read_rows(tmp_path / "metrics.csv")
        if "gap/l2" in row
    }
    assert of(tmp_path)["global_step"] == min(rows, key=rows.__getitem__)
    assert {2, 4} <= {*rows} <= {2, 4, 5}


def test_lightnings_own_callbacks_see_each_test(config, tmp_path):
    """``wave`` has its first peak in round 2; no later test is better before patience ends."""
    cfg = config(*FAST, "rounds=8", folder=tmp_path)
    lightnings = "lightning.pytorch.callbacks"
    watched = {"monitor": "clients/wave", "mode": "max"}
    with open_dict(cfg):
        cfg.callbacks = {"wave": {"_target_": f"{__name__}.Wave"}, **cfg.callbacks}
        cfg.callbacks.stop = {"_target_": f"{lightnings}.EarlyStopping", "patience": 2, **watched}
        cfg.callbacks.keep = {
            "_target_": f"{lightnings}.ModelCheckpoint",
            "filename": "peak",
            **watched,
        }
        cfg.callbacks.keep.dirpath = str(tmp_path / "kept")
    assert train(cfg).trainer.global_step == 4
    cfg.ckpt_path = "last"
    assert train(cfg).trainer.global_step == 4  # nothing is trained
    assert load_checkpoint(tmp_path / "kept/peak.ckpt")["global_step"] == 2
    assert read_run(tmp_path).state == "finished"


class Timer(Callback):
    """Ends a run after round 4, as Lightning's ``Timer`` may."""

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.should_stop or trainer.global_step == 4


TIMER = f"+callbacks.timer._target_={__name__}.Timer"


def test_a_run_that_a_callback_ends_has_all_measurements_in_its_last_row(config, tmp_path):
    """Round 4 has no test, so round 5 is the last one. Every row of a test has the same columns."""
    words = (*FAST, "rounds=8", "eval_every=3", "metrics=classes")
    result = train(config(*words, TIMER, folder=tmp_path))
    rows = read_rows(tmp_path / "metrics.csv")
    tested = [row for row in rows if "test/loss" in row]
    assert len(rows) == 5
    assert [row["round"] for row in tested] == [3, 5]
    assert tested[0].keys() == tested[1].keys()
    assert {"test/acc_smooth10", "classes/mean_acc"} <= tested[1].keys()
    assert result.metrics == rows[-1]
    again = evaluate(config(*FAST, f"ckpt_path={tmp_path / 'global_model.safetensors'}"))
    assert again["test/loss"] == result.frame["test/loss"][5]
    found = read_run(tmp_path)
    assert found.summary["rounds"] == 5
    assert found.summary["test/acc"] == pytest.approx(again["test/acc"])
    assert found.state == "unfinished"  # ckpt_path=last continues it


def test_a_run_that_a_callback_ended_continues_with_all_of_its_tests(config, tmp_path):
    words = (*FAST, "rounds=8", "eval_every=3")
    train(config(*words, TIMER, folder=tmp_path))
    train(config(*words, "ckpt_path=last", folder=tmp_path))
    rows = read_rows(tmp_path / "metrics.csv")
    tests = [row["test/acc"] for row in rows if "test/acc" in row]
    assert len(rows) == 8
    assert len(tests) == 4  # rounds 3, 5, 6 and 8
    assert rows[-1]["test/acc_smooth10"] == pytest.approx(sum(tests) / 4, rel=1e-12)


def test_a_callback_ends_a_run_at_once_after_a_test(config, tmp_path):
    words = (*FAST, "rounds=8", "eval_every=2")
    assert train(config(*words, TIMER, folder=tmp_path)).trainer.global_step == 4


@pytest.mark.parametrize(
    ("every", "last"),
    [(3, "Its last values are those of round 3"), (6, "It has no values"), (4, "")],
)
def test_a_run_that_ends_early_says_what_its_last_round_lacks(
    config, tmp_path, caplog, every, last
):
    """One more round would measure, and change the run."""
    words = (*FAST, "rounds=8", "metrics=drift", f"metrics.drift.every={every}")
    result = train(config(*words, TIMER, folder=tmp_path))
    assert result.trainer.global_step == 4
    rows = read_rows(tmp_path / "metrics.csv")
    measured = [row["round"] for row in rows if "drift/cosine" in row]
    assert measured == [number for number in range(1, 5) if number % every == 0]
    said = [record.message for record in caplog.records if "ended early" in record.message]
    assert len(said) == bool(last)
    assert all(text.startswith("metrics: Drift did not measure round 4") for text in said)
    assert last in "".join(said)
