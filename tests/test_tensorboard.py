"""TensorBoard's own readers, and the backend of its HParams tab, read the files of a run."""

import io

import numpy as np
import pytest
from conftest import read_rows
from lightning.pytorch import Callback
from omegaconf import open_dict
from PIL import Image
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler
from tensorboard.summary.writer import event_file_writer

from gcfed.folders.identity import hyperparameters
from gcfed.loggers.folder import FIRST, RoundTensorBoardLogger
from gcfed.run import train

FAST = (
    "logger=tensorboard",
    "participation.num_clients=8",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=40",
    "model.hidden=[8]",
)


def events(folder):
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def sessions(root):
    """The rows of the HParams tab by run: its hyperparameters, and {metric: (value, round)}."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(root))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(root))
    request = api_pb2.ListSessionGroupsRequest(
        slice_size=100, allowed_statuses=api_pb2.Status.values()
    )
    context = Context(TBContext(data_provider=provider, logdir=str(root)))
    found = {}
    for group in Handler(RequestContext(), context, "", request).run().session_groups:
        (session,) = group.sessions
        table = {
            key: getattr(value, value.WhichOneof("kind")) for key, value in group.hparams.items()
        }
        found[session.name] = (
            table,
            {m.name.tag: (m.value, m.training_step) for m in group.metric_values},
        )
    return found


def test_a_continued_run_is_one_run(config, tmp_path):
    """One of two runs ended after one round and was continued to three.

    It has one point per round.
    """
    settings = (
        *FAST,
        "algorithm=fedacg",
        "gc=gcfed",
        "gc.lam=0.5",
        "attack=sign_flip",
        "quantization=fedpaq",
    )
    train(config(*settings, "rounds=1", folder=tmp_path / "run"))
    cfg = config(*settings, "rounds=3", "ckpt_path=last", folder=tmp_path / "run")
    train(cfg)
    train(config(*FAST, "gc=none", "server.lr=1e9", "rounds=1", folder=tmp_path / "diverged"))
    rows = read_rows(tmp_path / "run/metrics.csv")

    reader = events(tmp_path / "run")
    scalars = {
        tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]
    }
    columns = {name if name >= "test/" else f"·{name}": name for name in rows[0] if name != "round"}
    assert set(scalars) == {*columns}
    assert min(scalars) == "test/acc"  # TensorBoard sorts by name
    for name in columns:
        steps, values = zip(*scalars[name], strict=True)
        assert steps == (1, 2, 3)
        assert values == pytest.approx([row[columns[name]] for row in rows], rel=1e-6)

    found = sessions(tmp_path)
    assert {*found} == {"run", "diverged"}
    table, metrics = found["run"]
    assert {name.removeprefix("·"): value for name, value in table.items()} == hyperparameters(
        cfg
    ) | {"rounds": 1}
    assert tuple(sorted(table)[:5]) == FIRST  # the tab shows the first five
    chosen = [table[f"·{key}"] for key in ("attack", "quantization", "aggregator", "task")]
    assert chosen == ["Scale", "Quantization", "MeanAggregator", "Classification"]
    assert metrics["test/acc"] == (pytest.approx(rows[-1]["test/acc"]), 3)
    assert found["diverged"][0]["·server.lr"] == 1e9
    assert not list(tmp_path.glob("*/hparams.yaml"))


def test_the_settings_are_among_the_texts_once(config, tmp_path):
    folder = tmp_path / "run"
    train(config(*FAST, "rounds=1", folder=folder))
    lines = (folder / "config.yaml").read_text().splitlines()
    train(config(*FAST, "rounds=2", "ckpt_path=last", folder=folder))
    (event,) = events(folder).Tensors("·config/text_summary")
    (shown,) = event.tensor_proto.string_val
    assert shown.decode().splitlines() == [f"    {line}" for line in lines]
    assert lines[0].startswith("# ")


def test_a_killed_run_keeps_its_rounds_and_hyperparameters(tmp_path):
    """A kill leaves the writer open. Then the run continues after its checkpoint of round 2."""
    killed = RoundTensorBoardLogger(str(tmp_path / "run"))
    killed.log_hyperparams({"seed": 1, "gc.local": True, "data": "digits"})
    for step in (1, 2, 3):
        killed.log_metrics({"test/acc": step / 10}, step)
    table = {"seed": 1, "·gc.local": True, "·data": "digits"}
    assert sessions(tmp_path) == {"run": (table, {"test/acc": (pytest.approx(0.3), 3)})}
    resumed = RoundTensorBoardLogger(str(tmp_path / "run"), resume_round=2)
    resumed.log_hyperparams({"seed": 1})
    resumed.log_metrics({"test/acc": 0.5}, 3)
    assert sessions(tmp_path)["run"][0] == table
    assert [(e.step, round(e.value, 3)) for e in events(tmp_path / "run").Scalars("test/acc")] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.5),
    ]


def test_the_events_of_a_continued_run_come_after_those_before(tmp_path, monkeypatch):
    """Also in the same second, where a counter orders the files by its digits."""
    for resume_round, count in ((0, 9), (1, 10)):
        counter = event_file_writer.AtomicCounter(count)
        monkeypatch.setattr(event_file_writer, "_global_uid", counter)
        logger = RoundTensorBoardLogger(str(tmp_path), resume_round)
        logger.log_metrics({"test/acc": 0.5}, resume_round + 1)
        logger.experiment.close()
    assert [event.step for event in events(tmp_path).Scalars("test/acc")] == [1, 2]


def pixels(picture):
    return np.asarray(Image.open(picture))


def images(folder):
    """The images of a run by tag: {tag: [(round, pixels)]}."""
    reader = events(folder)
    found = {}
    for tag in reader.Tags()["images"]:
        found[tag] = [
            (image.step, pixels(io.BytesIO(image.encoded_image_string)))
            for image in reader.Images(tag)
        ]
    return found


def test_partition_and_curves_are_among_the_images(config, tmp_path):
    """The partition is there from the start; the curves are there at the end, and again at the
    end of a continued run.
    """
    folder = tmp_path / "run"
    settings = (*FAST, "extras.figures=true")
    train(config(*settings, "rounds=1", folder=folder))
    first = pixels(folder / "curves.png")
    train(config(*settings, "rounds=2", "ckpt_path=last", folder=folder))
    last = pixels(folder / "curves.png")
    assert not np.array_equal(first, last)
    shown = images(folder)
    assert {tag: [step for step, _ in found] for tag, found in shown.items()} == {
        "·partition": [0],
        "·curves": [1, 2],
    }
    ((_, partition),) = shown["·partition"]
    assert np.array_equal(partition, pixels(folder / "partition.png"))
    (_, first_shown), (_, last_shown) = shown["·curves"]
    assert np.array_equal(first_shown, first)
    assert np.array_equal(last_shown, last)


@pytest.mark.parametrize(
    ("figures", "logger", "is_drawn"),
    [("false", "tensorboard", False), ("true", "csv", True), ("true", "none", False)],
)
def test_a_run_without_figures_or_tensorboard_shows_no_pictures(
    config, tmp_path, figures, logger, is_drawn
):
    folder = tmp_path / "run"
    train(config(*FAST, "rounds=1", f"extras.figures={figures}", f"logger={logger}", folder=folder))
    assert (folder / "curves.png").is_file() == is_drawn
    assert images(folder) == {}


def test_a_run_that_failed_shows_no_curves(config, tmp_path):
    cfg = config(*FAST, "extras.figures=true", "rounds=2", folder=tmp_path / "run")
    with open_dict(cfg):
        cfg.callbacks.fail = {"_target_": f"{__name__}.Fails"}
    with pytest.raises(RuntimeError, match="stop here"):
        train(cfg)
    assert [*images(tmp_path / "run")] == ["·partition"]
    assert not (tmp_path / "run/curves.png").exists()


class Fails(Callback):
    def on_train_batch_end(self, *args):
        raise RuntimeError("stop here")
