"""Whole runs with a composed config in this process: equal results, kills and files."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import config_of, read_rows, refuses
from harness import assert_near, final_weights
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CPUAccelerator
from omegaconf import OmegaConf, open_dict
from safetensors.torch import load_file

from gcfed.assemble import assemble
from gcfed.checkpoints.reading import Weights
from gcfed.checkpoints.record import fingerprint
from gcfed.federated.parts import ServerPart
from gcfed.folders.identity import digest, identity, leaves
from gcfed.run import evaluate, train

FEW = (
    "rounds=4",
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=50",
)
FAST = (*FEW, "model.hidden=[32,16]")
CNN = (*FEW, "precision=64-true", "model=cnn", "rounds=1")


def run(config, tmp_path, name, *overrides):
    return train(config(*overrides, folder=tmp_path / name))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with all its files."""
    more = ("extras.figures=true", "logger=tensorboard", "callbacks.checkpoint.every=2")
    return train(config_of(*FAST, *more, folder=tmp_path_factory.mktemp("finished") / "run"))


# ------------------------------------------------------------------------------------ one code path
def test_the_memory_layout_changes_no_number(config, tmp_path):
    on, off = (
        run(config, tmp_path, str(flag), *CNN, f"channels_last={flag}") for flag in (True, False)
    )
    assert_near(final_weights(on), final_weights(off), 1e-9)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("gc=gcfed", "gc.lam=0"), "gc=global"),
        (("gc=local", "gc.lam=1"), "gc=local"),
        (("gc=gcfed", "gc.local=false", "gc.server=false"), "gc=none"),
    ],
)
def test_equivalent_settings_of_gc_agree_bit_for_bit(config, tmp_path, one, other):
    a = run(config, tmp_path, "a", *FAST, "rounds=1", *one)
    b = run(config, tmp_path, "b", *FAST, "rounds=1", other)
    assert torch.equal(final_weights(a), final_weights(b))


# ----------------------------------------------------------------------------- transactions, resume
def test_a_finished_run_can_be_extended(config, tmp_path, caplog):
    straight = run(config, tmp_path, "straight", *FAST, "rounds=3")
    run(config, tmp_path, "extended", *FAST, "rounds=2")
    extended = run(config, tmp_path, "extended", *FAST, "rounds=3", "ckpt_path=last")
    assert torch.equal(final_weights(extended), final_weights(straight))
    assert [r["round"] for r in read_rows(tmp_path / "extended" / "metrics.csv")] == [1, 2, 3]
    with refuses(r"rounds=2: .*extended/checkpoints/last\.ckpt has 3 already"):
        run(config, tmp_path, "extended", *FAST, "rounds=2", "ckpt_path=last")
    with caplog.at_level("INFO"):
        again = run(config, tmp_path, "extended", *FAST, "rounds=3", "ckpt_path=last")
    assert re.search(r"all 3 rounds of \S*extended are done", caplog.text)
    assert torch.equal(final_weights(again), final_weights(straight))


def test_runs_that_share_a_folder_for_states_do_not_share_states(config, tmp_path):
    settings = ("algorithm=scaffold", f"client_store.folder={tmp_path}/states", *FAST)
    one, other = (
        assemble(config(*settings, folder=tmp_path / name)).loop.run.setup.stores.folder
        for name in ("a", "b")
    )
    assert one.parent == other.parent == tmp_path / "states"
    assert one != other
    train(config(*settings, "rounds=1", folder=tmp_path / "a"))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    longer = train(config(*settings, "rounds=2", "ckpt_path=last", folder=tmp_path / "link"))
    once = train(config(*settings, "rounds=2", folder=tmp_path / "b"))
    assert torch.equal(final_weights(longer), final_weights(once))
    (tmp_path / "a").rename(tmp_path / "c")
    with refuses(r"not there.*client_store\.folder"):
        train(config(*settings, "rounds=3", "ckpt_path=last", folder=tmp_path / "c"))


# ---------------------------------------------------------------------------------- files and tests
class Second(ServerPart):
    """Measures in the second round only."""

    def on_round_end(self, row, round):
        if row["round"] == 2:
            row["second/value"] = 7


class Foreign(Callback):
    """Writes a value of its own to Lightning's metrics, in each round."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        trainer.callback_metrics["test/foreign"] = torch.tensor(3.0)


@pytest.mark.parametrize("logger", ["csv", "none"])
def test_the_metrics_of_a_result_are_the_last_row(config, tmp_path, logger):
    """Lightning's metrics also hold values of earlier rounds and of other callbacks."""
    cfg = config(*FAST, "rounds=3", "eval_every=2", f"logger={logger}", folder=tmp_path)
    with open_dict(cfg):
        for part in (Second, Foreign):
            cfg.callbacks[part.__name__] = {"_target_": f"{__name__}.{part.__name__}"}
    result = train(cfg)
    rows = read_rows(tmp_path / "metrics.csv")
    assert {"second/value", "test/foreign"} <= result.trainer.callback_metrics.keys()
    assert not {"second/value", "test/foreign"} & result.metrics.keys()
    assert result.metrics["round"] == 3
    if logger == "csv":
        assert result.metrics == rows[-1]
    last = result.metrics
    result.module.net.fc1.weight.data.zero_()
    result.trainer.validate(result.module, datamodule=result.trainer.datamodule, verbose=False)
    assert result.metrics == last
    cfg.ckpt_path = "last"
    again = train(cfg)  # trains nothing
    assert again.loop.run.last_row == {}
    assert again.metrics == (rows[-1] if rows else {})


def test_the_run_folder(finished):
    result = finished
    folder = finished.folder
    # without callbacks.progress, Lightning adds no bar
    assert result.trainer.progress_bar_callback is None
    written = ("metrics.csv", "config.yaml", "summary.json", "curves.png", "partition.png")
    for name in (*written, "partition.npz"):
        assert (folder / name).stat().st_size > 100, name
    assert list(folder.glob("events.out.tfevents.*"))
    rows = read_rows(folder / "metrics.csv")
    bytes_ = 5 * 4 * sum(p.numel() for p in result.module.parameters())
    assert all(row["comm/up_bytes"] == row["comm/down_bytes"] == bytes_ for row in rows)
    assert all(row["time/round_s"] >= row["time/train_s"] > 0 for row in rows)
    summary = json.loads((folder / "summary.json").read_text())
    data = result.trainer.datamodule
    assert summary["data"] == digest(fingerprint(data))
    about = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["gcfed"]
    config_ = OmegaConf.load(folder / "config.yaml")
    for key, value in (
        ("identity", identity(config_)),
        ("setting", digest(leaves(config_), "seed")),
    ):
        assert about[key] == summary[key] == value
    assert summary["test/acc"] == rows[-1]["test/acc"] == pytest.approx(result.metrics["test/acc"])
    assert summary["comm/up_bytes"] == 4 * bytes_
    assert config_.participation.per_round == 5
    assert np.array_equal(np.load(folder / "partition.npz")["indices"], data.partition.indices)
    exported = load_file(folder / "global_model.safetensors")
    assert all(
        torch.equal(exported[name], tensor)
        for name, tensor in result.module.net.state_dict().items()
    )
    assert not list(folder.rglob(".*"))


def test_eval_reproduces_the_last_test(config, finished, tmp_path):
    rounded = run(
        config,
        tmp_path,
        "run",
        *FAST,
        "rounds=1",
        "precision=bf16-mixed",
        "callbacks.checkpoint=null",
    )
    assert [*tmp_path.rglob("*.ckpt")] == []  # Lightning writes no checkpoint either
    for result, file in (
        (finished, "checkpoints/last.ckpt"),
        (finished, "global_model.safetensors"),
        (rounded, "global_model.safetensors"),
    ):
        metrics = evaluate(
            config(
                *FAST, f"precision={result.trainer.precision}", f"ckpt_path={result.folder / file}"
            )
        )
        assert metrics["round"] == result.metrics["round"]
        assert metrics["test/loss"] == pytest.approx(result.metrics["test/loss"], rel=1e-7)


def test_a_refused_setting_of_the_data_has_the_typed_key_in_eval_too(config, monkeypatch):
    monkeypatch.setattr("gcfed.run.load_weights", lambda path: Weights({}, 1, {}, []))
    with refuses("^data.ignore=id must be a list"):
        evaluate(config("data=csv", "data.ignore=id", "ckpt_path=last.ckpt"))


def test_eval_precision_changes_only_tests(config, tmp_path):
    """Tests in bfloat16 equal those of eval.py in bfloat16. Training keeps the run's precision."""
    full, half = (
        run(config, tmp_path, f"{p}", *FAST, "rounds=2", f"eval_precision={p}")
        for p in ("null", "bf16-mixed")
    )
    assert torch.equal(final_weights(full), final_weights(half))
    loss = half.metrics["test/loss"]
    file = f"ckpt_path={half.folder / 'global_model.safetensors'}"
    assert 0 < abs(loss - full.metrics["test/loss"]) < 0.02
    for key in ("precision", "eval_precision"):
        assert evaluate(config(*FAST, f"{key}=bf16-mixed", file))["test/loss"] == pytest.approx(
            loss, rel=1e-7
        )


# ---------------------------------------------------------------------------------------- behaviour
def test_a_run_can_overfit(config, tmp_path, monkeypatch):
    """It uses the CPU on a Mac. Lightning's auto would take the GPU, which has no float64."""
    monkeypatch.setattr(
        "lightning.fabric.accelerators.mps.MPSAccelerator.is_available", lambda: True
    )
    result = run(
        config,
        tmp_path,
        "run",
        "debug=overfit",
        "rounds=20",
        "model.hidden=[64]",
        "client.optimizer.lr=0.2",
    )
    assert isinstance(result.trainer.accelerator, CPUAccelerator)
    rows = read_rows(tmp_path / "run/metrics.csv")
    assert rows[-1]["train/loss"] < 0.02
    assert [r["round"] for r in rows if "test/acc" in r] == [10, 20]


class Listener(Callback):
    """Counts local steps with Lightning's ``on_after_backward``, which sees the
    clients' gradients.
    """

    heard = 0

    def on_after_backward(self, trainer, pl_module):
        assert trainer.lightning_module is pl_module
        assert all(
            grad.shape[0] == pl_module.clients.active for grad in pl_module.clients.with_grads()[0]
        )
        self.heard += 1


NOTED = []


def note(trainer, pl_module):
    """A hook that only the object of a callback has, and not its class."""
    NOTED.append(1)


def test_every_callback_is_called_in_each_local_step(config, tmp_path, caplog):
    listeners = (
        f"+callbacks.listener._target_={__name__}.Listener",
        "+callbacks.own._target_=lightning.pytorch.callbacks.LambdaCallback",
        f"+callbacks.own.on_after_backward._target_={__name__}.note",
        "+callbacks.own.on_after_backward._partial_=true",
    )
    NOTED.clear()
    result = train(config(*FAST, "rounds=1", *listeners, folder=tmp_path))
    cohort = result.loop.run.server.schedule.turn(0).clients
    steps = result.loop.solver.num_steps(result.trainer.datamodule.sizes(cohort)).sum()
    heard = next(c for c in result.trainer.callbacks if isinstance(c, Listener)).heard
    assert heard == len(NOTED) == steps > 0
    # a callback that trains does not count in the identity
    warned = [text.split()[1] for text in caplog.messages if "takes part in local" in text]
    assert warned == ["Listener", "LambdaCallback"]
