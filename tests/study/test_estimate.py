"""What a study will cost: the arithmetic, and that a few steps of every kind of model can be timed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gcfed.report.runs import Run

import gcfed.study.calibrate as calibrate
from gcfed.data.datasets import digits
from gcfed.study.calibrate import Speed
from gcfed.study.estimate import (
    JOB_S,
    ROUND_S,
    STATES,
    STEPS,
    Left,
    Measured,
    calibrated,
    disk,
    duration,
    estimate,
    typical,
)
from gcfed.study.state import as_run, made_of
from gcfed.study.work import SAMPLES, SAMPLES_A_CLIENT, Task, task_of
from gcfed.utils.resolvers import ROOT
from gcfed.utils.words import size

# 100 clients of 500 samples: 10 batches, 5 epochs, so 50 steps each, 5 a round.
TASK = Task("cnn", "fedavg", 30, eval_every=2, num_clients=100, per_round=5, client_steps=50, test_samples=10_000)


def by(algorithm, task=TASK):
    return replace(task, algorithm=algorithm)


def run_of(seconds, folder=Path("nowhere")):
    return Run(folder, {}, (), {}, {"time/round_s": np.array(seconds, dtype=float)}, "finished", "")


def test_a_round_costs_its_steps_by_turns_and_its_share_of_the_tests():
    speed = Speed(step_s=0.1, test_s=0.001, at_once=1, processes=2, model_bytes=8)
    # 3 turns of 50 steps of 0.1 s; 10,000 tests of 1 ms over 2 processes, every second round
    assert calibrated(TASK, speed) == pytest.approx(3 * 50 * 0.1 + 10_000 * 0.001 / 2 / 2 + ROUND_S)
    side_by_side = Speed(step_s=0.1, test_s=0.0, at_once=5, processes=1, model_bytes=8)
    assert calibrated(TASK, side_by_side) == pytest.approx(50 * 0.1 + ROUND_S)
    more = calibrated(by("fedsam"), side_by_side) - ROUND_S
    assert more == pytest.approx(50 * 0.1 * STEPS["fedsam"])
    assert calibrated(replace(TASK, client_steps=None), speed) is None


def test_a_typical_round_is_the_mean_but_for_nights_in_between():
    assert typical(np.array([1.0, 3.0])) == 2.0
    assert typical(np.array([1.0, 1.0, 1.0, 1.0, 1e6])) == pytest.approx(9 / 5)
    assert typical(np.array([np.nan, 2.0])) == 2.0  # a row that was damaged


def test_measured_rounds_come_before_calibration_and_serve_other_methods():
    runs = [(TASK, run_of([2.0, 4.0])), (TASK, run_of([5.0])), (by("fedsam"), run_of([20.0])), (TASK, run_of([]))]
    measured = Measured(runs)
    assert measured.seconds(TASK) == 4.0
    assert measured.seconds(by("fedsam")) == 20.0
    as_fedavg = np.median([3.0, 5.0, 20.0 / STEPS["fedsam"]])
    assert measured.seconds(by("moon")) == pytest.approx(as_fedavg * STEPS["moon"])
    assert measured.seconds(replace(TASK, kind="mlp")) is None


def test_an_estimate_adds_up_what_is_left(tmp_path):
    (tmp_path / "global_model.safetensors").write_bytes(b"x" * 100)
    asked = []

    def speed_of(job):
        asked.append(job.name)
        return Speed(0.1, 0.0, 1, 5, model_bytes=1000)

    other = replace(by("scaffold"), kind="mlp", rounds=10, eval_every=1)
    strange = replace(TASK, kind="strange", client_steps=None)
    left = [
        Left("begun", TASK, rounds=10, fresh=False),
        Left("new", TASK, rounds=30, fresh=True),
        Left("other", other, rounds=10, fresh=True),
        Left("another", other, rounds=5, fresh=True),
        Left("strange", strange, rounds=5, fresh=False),
    ]
    found = estimate(left, Measured([(TASK, run_of([2.0], tmp_path))]), speed_of)
    assert asked == ["other", "strange"]  # once for a kind of work that nothing has measured
    assert np.isnan(found.seconds.pop("strange"))
    assert found.unknown == 0
    a_round = 50 * 0.1 * STEPS.get("scaffold", 1) + ROUND_S
    assert found.seconds == {
        "begun": JOB_S + 20, "new": JOB_S + 60, "other": pytest.approx(JOB_S + 10 * a_round),
        "another": pytest.approx(JOB_S + 5 * a_round),
    }  # fmt: skip
    assert found.total == pytest.approx(sum(found.seconds.values()))
    assert found.bytes == pytest.approx(200 + 2 * disk(other, 1000))
    assert "for 2 of 4 jobs" in found.basis
    touched = 100 * (1 - 0.95**10)
    assert disk(other, 1000) == pytest.approx(1000 * (2 + touched))  # checkpoint, model, a control variate a client


def task(config, *overrides):
    from omegaconf import OmegaConf

    cfg = config(*overrides)
    return task_of(made_of(as_run(cfg)), lambda key: OmegaConf.select(cfg, key))


def test_a_task_is_read_from_a_composed_config(config):
    found = task(config, "experiment=cifar10_cnn_gcfed", "algorithm=fedlc", "rounds=30", "eval_every=50")
    assert replace(found, kind="") == replace(TASK, kind="", algorithm="fedlc", eval_every=30)
    assert task(config, "data=digits", "data.limit_train=100", "client.batch_size=10").client_steps == pytest.approx(
        5 * 5 / 10
    )
    assert task(config, "data=matrix_regression", "model=linear").client_steps > 0
    assert task(config, "client.steps=7").client_steps == 7  # wins over epochs
    own = task(config, "data=digits", "tags.data=mine")
    assert (own.client_steps, own.test_samples) == (None, None)


def test_rounds_of_the_same_work_are_of_one_kind_whatever_the_method(config):
    kind = task(config).kind
    for same in ("algorithm=fedadam", "gc=none", "seed=3", "partition.alpha=3", "rounds=7", "client.optimizer.lr=1.0"):
        assert task(config, same).kind == kind, same
    for other in (
        "model=cnn", "client.epochs=1", "trainer.accelerator=cpu", "trainer.devices=3", "precision=64-true",
        "metrics=drift", "eval_every=5", "data.limit_test=5",
    ):  # fmt: skip
        assert task(config, other).kind != kind, other


def test_tables_name_what_there_is():
    data = {path.stem for path in (ROOT / "configs" / "data").glob("*.yaml")}
    assert data - {"synthetic", "matrix_regression"} == SAMPLES.keys() | SAMPLES_A_CLIENT.keys()
    found = digits()
    assert SAMPLES["digits"] == (len(found.train.y), len(found.test.y))
    assert STEPS.keys() | STATES.keys() <= {path.stem for path in (ROOT / "configs" / "algorithm").glob("*.yaml")}


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=cnn", "client.batch_size=2", "precision=bf16-mixed"],
        ["data=shakespeare", "model=lstm", "model.hidden=4", "client.batch_size=2"],
        ["data=tiny_shakespeare", "model=lstm", "model.hidden=4", "client.batch_size=2"],
        ["data=matrix_regression", "model=linear", "client.batch_size=2", "client.stack=5"],
    ],
)
def test_a_few_steps_of_any_kind_can_be_timed(config, monkeypatch, overrides):
    monkeypatch.setattr(calibrate, "SECONDS", 0.0)
    cfg = config(*overrides, "trainer.accelerator=cpu")
    speed = calibrate.measure(cfg)
    net = calibrate.build_module(cfg).net
    assert speed.model_bytes == sum(p.nbytes for p in net.parameters())
    assert speed.processes == 1  # trainer.devices=1
    assert speed.at_once == (5 if "client.stack=5" in overrides else 1)
    assert speed.step_s > 0
    assert speed.test_s > 0


def test_durations_and_sizes_are_short():
    seconds = [40, 89, 100, 3600, 4330, 36000, 110_000, 1_000_000]
    assert list(map(duration, seconds)) == [
        "40 s", "89 s", "2 min", "1 h 0 min", "1 h 12 min", "10 h", "31 h", "12 days",
    ]  # fmt: skip
    assert duration(float("nan")) == "unknown"
    assert list(map(size, [12, 3400, 2.5e9, 4e13])) == ["12 B", "3.4 kB", "2.5 GB", "40 TB"]
