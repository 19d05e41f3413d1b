"""What TensorBoard sees of a run: read back with its own readers, and through its hparams tab's own backend."""

import re
import struct

import pytest
from conftest import read_rows
from harness import Spy
from omegaconf import open_dict
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler

from gcfed.loggers.folder import RoundTensorBoardLogger
from gcfed.run import train
from gcfed.runs.identity import hyperparameters
from gcfed.utils.words import show

FAST = (
    "logger=tensorboard", "participation.num_clients=8", "client.epochs=1", "data.limit_train=100",
    "data.limit_test=40", "targets=[0.01,0.999]",
)  # fmt: skip
CURVES = (
    "train/loss", "test/acc", "test/loss", "test/acc_smooth10", "test/acc_ema", "·comm/up_bytes", "·comm/down_bytes",
    "time/round_s",
)  # fmt: skip
LAST = {"test/acc_best", "test/loss_best", "test/rounds_to_0.01", "test/rounds_to_0.01_ema"}


def events(folder):
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    return reader.Reload()


def sessions(root):
    """The rows of the hparams tab, by run: status, hyperparameters, metric → (value, round)."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(root))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(root))
    request = api_pb2.ListSessionGroupsRequest(slice_size=100, allowed_statuses=api_pb2.Status.values())
    context = Context(TBContext(data_provider=provider, logdir=str(root)))
    found = {}
    for group in Handler(RequestContext(), context, "", request).run().session_groups:
        (session,) = group.sessions
        table = {key: getattr(value, value.WhichOneof("kind")) for key, value in group.hparams.items()}
        metrics = {m.name.tag: (m.value, m.training_step) for m in group.metric_values}
        found[session.name] = api_pb2.Status.Name(session.status), table, metrics
    return found


def run(config, folder, *overrides):
    cfg = config(*FAST, *overrides, folder=folder)
    return cfg, train(cfg)


def test_a_run_that_is_continued_is_one_run(config, tmp_path):
    """Ended after three rounds, continued to five: one point a round, one row in the hparams tab, pictures once."""
    settings = ("algorithm=fedacg", "gc.lam=0.5", "extras.figures=true")
    run(config, tmp_path / "run", *settings, "rounds=3")
    cfg, _ = run(config, tmp_path / "run", *settings, "rounds=5", "ckpt_path=last")
    rows = read_rows(tmp_path / "run/metrics.csv")

    reader = events(tmp_path / "run")
    scalars = {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    assert set(CURVES) < set(scalars)
    columns = {name if name >= "test/" else f"·{name}": name for name in rows[0] if name != "round"}
    assert set(scalars) == {*columns} | LAST  # what the last row has, too
    assert min(scalars) == "test/acc"  # TensorBoard sorts by name
    for name in columns:
        steps, values = zip(*scalars[name], strict=True)
        assert steps == (1, 2, 3, 4, 5)
        assert values == pytest.approx([row[columns[name]] for row in rows], rel=1e-6)
    assert all(len(scalars[name]) == 1 and scalars[name][0][0] == 5 for name in LAST)
    for name, step in (("partition", 0), ("curves", 5)):
        (image,) = reader.Images(f"·{name}")
        content = (tmp_path / "run" / f"{name}.png").read_bytes()
        assert (image.step, image.encoded_image_string) == (step, content)
        assert (image.width, image.height) == struct.unpack(">II", content[16:24])

    ((name, (status, table, metrics)),) = sessions(tmp_path).items()
    assert (name, status) == ("run", "STATUS_SUCCESS")
    assert {name.removeprefix("·"): value for name, value in table.items()} == hyperparameters(cfg)
    assert sorted(table)[:4] == ["algorithm", "gc", "gc.boundary", "gc.lam"]  # the tab shows the first five
    assert table["rounds"] == 5
    best = max(row["test/acc"] for row in rows)
    assert metrics["test/acc_best"] == (pytest.approx(best), 5)
    assert metrics["test/rounds_to_0.01"] == (next(row["round"] for row in rows if row["test/acc"] >= 0.01), 5)
    for name in ("test/acc", "test/acc_smooth10", "test/acc_ema", "test/loss"):
        assert metrics[name] == (pytest.approx(rows[-1][name]), 5)
    assert not [name for name in metrics if "0.999" in name]  # a target that was not reached

    run(config, tmp_path / "run", *settings, "rounds=5", "ckpt_path=last")  # nothing is left to do
    again = events(tmp_path / "run")
    for name in scalars:
        assert [e.step for e in again.Scalars(name)] == [step for step, _ in scalars[name]]
    assert [len(again.Images(f"·{name}")) for name in ("partition", "curves")] == [1, 1]
    assert sessions(tmp_path) == {"run": (status, table, metrics)}
    assert len(list((tmp_path / "run").glob("events.out.tfevents.*"))) == 1


class FailLate(Spy):
    """In the third round."""

    def on_aggregate_end(self, update, round):
        if round.index == 2:
            raise RuntimeError("late")


def test_runs_of_all_ends_lie_side_by_side(config, tmp_path):
    """One that diverged, one that an error ended, one of another algorithm."""
    run(config, tmp_path / "diverged", "rounds=2", "gc=none", "server.lr=1e9")
    cfg = config(*FAST, "rounds=4", folder=tmp_path / "failed")
    with open_dict(cfg):
        cfg.callbacks.fail = {"_target_": f"{__name__}.FailLate"}
    with pytest.raises(RuntimeError, match="late"):
        train(cfg)
    run(config, tmp_path / "proximal", "algorithm=fedprox", "rounds=2")
    found = sessions(tmp_path)
    assert {name: status for name, (status, _, _) in found.items()} == {
        "diverged": "STATUS_FAILURE", "failed": "STATUS_FAILURE", "proximal": "STATUS_SUCCESS",
    }  # fmt: skip
    _, table, metrics = found["diverged"]
    assert metrics["test/loss"][0] != metrics["test/loss"][0]
    assert table["server.lr"] == 1e9
    assert not any(name.startswith("gc.") for name in table)
    _, table, metrics = found["failed"]
    assert metrics["test/acc"][1] == 2
    assert not LAST & metrics.keys()
    _, table, metrics = found["proximal"]
    assert (table["algorithm"], table["methods.proximal.mu"]) == ("fedprox", 0.1)
    reader = events(tmp_path / "proximal")
    assert [e.step for e in reader.Scalars("test/acc")] == [1, 2]
    assert reader.Tags()["images"] == []  # extras.figures is false
    assert not (tmp_path / "proximal/partition.png").exists()
    assert not list(tmp_path.glob("*/hparams.yaml"))


def test_a_killed_run_has_its_rounds_and_hyperparameters(tmp_path):
    """Nobody closes the writer; then the run is continued after its checkpoint of round 2."""
    killed = RoundTensorBoardLogger(str(tmp_path / "run"))
    killed.log_hyperparams({"seed": 1, "gc.local": True, "data": "digits", "partition.alpha": 0.1})
    for step in (1, 2, 3):
        killed.log_metrics({"test/acc": step / 10}, step)
    assert sessions(tmp_path) == {
        "run": (
            "STATUS_UNKNOWN",
            {"seed": 1, "gc.local": True, "·data": "digits", "partition.alpha": 0.1},
            {"test/acc": (pytest.approx(0.3), 3)},
        )
    }
    resumed = RoundTensorBoardLogger(str(tmp_path / "run"), resume_round=2)
    resumed.log_hyperparams({"seed": 1})
    resumed.log_metrics({"test/acc": 0.5}, 3)
    assert next(iter(sessions(tmp_path).values()))[:2] == ("STATUS_UNKNOWN", {"seed": 1})
    assert [(e.step, round(e.value, 3)) for e in events(tmp_path / "run").Scalars("test/acc")] == [
        (1, 0.1), (2, 0.2), (3, 0.5),
    ]  # fmt: skip
    (file,) = (tmp_path / "run").iterdir()
    half = file.read_bytes()
    resumed.log_metrics({"test/acc": 0.6}, 4)
    (tmp_path / "run" / "events.out.tfevents.0").write_bytes(half)  # a kill leaves both
    again = RoundTensorBoardLogger(str(tmp_path / "run"), resume_round=4)
    again.log_metrics({"test/acc": 0.7}, 5)
    assert [e.step for e in events(tmp_path / "run").Scalars("test/acc")] == [1, 2, 3, 4, 5]
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_charts_of_several_columns_are_of_columns_that_runs_have(config, tmp_path):
    run(config, tmp_path / "run", "rounds=1", "data.validation=0.1")
    reader = events(tmp_path / "run")
    (config_,) = reader.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(config_.tensor_proto.string_val[0])
    scalars = reader.Tags()["scalars"]
    for chart in layout.category[0].chart:
        assert [[tag for tag in scalars if re.match(wanted, tag)] for wanted in chart.multiline.tag] == [
            [wanted[1:-1]] for wanted in chart.multiline.tag
        ]


def test_before_the_run_begins_nothing_is_written(tmp_path):
    logger = RoundTensorBoardLogger(str(tmp_path))
    logger.log_hyperparams({"seed": 1})
    logger.finalize("failed")
    logger.save()
    assert not list(tmp_path.iterdir())


def test_pictures_go_to_those_who_take_them(tmp_path):
    seen = []

    class Takes:
        def log_image(self, key, images, step=None):
            seen.append((key, images, step))

    show([object(), Takes()], "partition", tmp_path / "a.png", 3)
    assert seen == [("partition", [str(tmp_path / "a.png")], 3)]
