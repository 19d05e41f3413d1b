"""In whole runs, accuracy by class and the confusion matrix equal a plain loop
over the test split.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TWO, read_lines, read_rows
from harness import make_download, make_round, make_setup
from lightning.pytorch import Callback

from gcfed.federated.network.lent_network import travelling_state
from gcfed.metrics.global_model import Classes
from gcfed.plots.pictures import plot_confusion
from gcfed.run import train

TINY = (
    "model.hidden=[12]",
    "gc.boundary=fc2",
    "rounds=3",
    "participation.num_clients=5",
    "participation.per_round=3",
    "client.epochs=1",
    "data.limit_train=150",
    "data.limit_test=90",
    "metrics=classes",
)
COLUMNS = ("classes/worst_acc", "classes/mean_acc", "classes/best_acc")


def confusion(result):
    """The confusion matrix of the global model, counted sample by sample on the test split."""
    data = result.trainer.datamodule
    x, y = result.trainer.datamodule.fetch_test((0, result.trainer.datamodule.num_test))
    counts = np.zeros((data.num_classes, data.num_classes), int)
    with torch.no_grad():
        for label, guess in zip(y.tolist(), result.module.net(x).argmax(1).tolist(), strict=True):
            counts[label, guess] += 1
    return counts


def test_the_confusion_matrix_counts_the_last_model(config, tmp_path):
    """Two processes test in batches of 40, also on a validation split, in every second round and
    the last.
    """
    settings = ("data.eval_batch_size=40", "data.validation=0.1", *TWO)
    counts = confusion(
        train(config(*TINY, *settings, "metrics.classes.every=2", folder=tmp_path / "run"))
    )
    names = [str(i) for i in range(10)]
    head, *rows = read_lines(tmp_path / "run" / "confusion.csv")
    assert head == ["class", *names]
    assert rows == [
        [name, *map(str, line)] for name, line in zip(names, counts.tolist(), strict=True)
    ]
    head, *lines = read_lines(tmp_path / "run" / "classes.csv")
    assert head == ["round", "class", "name", "tested", "acc"]
    assert {line[0] for line in lines} == {"2", "3"}
    last = [line[1:] for line in lines if line[0] == "3"]
    acc = counts.diagonal() / counts.sum(1)
    assert [line[:3] for line in last] == [
        [n, n, str(t)] for n, t in zip(names, counts.sum(1), strict=True)
    ]
    assert [float(line[3]) for line in last] == pytest.approx(acc)
    first, _, row = read_rows(tmp_path / "run" / "metrics.csv")
    assert [row[name] for name in COLUMNS] == pytest.approx([acc.min(), acc.mean(), acc.max()])
    assert row["test/acc"] == pytest.approx(counts.trace() / counts.sum())
    assert not {*COLUMNS} & first.keys()
    # extras.figures is false in these tests
    assert not (tmp_path / "run" / "confusion.png").exists()


def test_padding_and_classes_without_samples_do_not_count(tmp_path):
    """Samples are sequences in two batches. Class 3 is predicted but has no sample."""
    net = torch.nn.Linear(5, 4)
    g = torch.Generator().manual_seed(0)
    dataset = SimpleNamespace(name="pets", class_names=("a cat", "dog, hound", "a\npond", "none"))
    data = SimpleNamespace(num_classes=4, dataset=dataset)
    metric = Classes(str(tmp_path), figures=False)
    round = make_round(travelling_state(net))
    metric.bind(make_setup(net, data=data))
    logits = torch.randn(6, 5, 4, generator=g)
    y = torch.randint(3, (6, 5), generator=g)
    y[torch.rand(6, 5, generator=g) < 0.4] = -100
    metric.begin(make_download(round.broadcast_model), round)
    for batch in (slice(0, 2), slice(2, 6)):
        metric.on_test_batch(logits[batch], y[batch])
    acc = [(logits.argmax(-1) == c)[y == c].double().mean().item() for c in range(3)]
    found = metric.columns(round)
    assert found == pytest.approx(
        dict(zip(COLUMNS, (min(acc), np.mean(acc), max(acc)), strict=True))
    )
    lines = read_lines(tmp_path / "classes.csv")[1:]
    assert [line[2] for line in lines] == ["a cat", "dog, hound", "a pond"]
    assert [int(line[3]) for line in lines] == [int((y == c).sum()) for c in range(3)]


class Stops(Callback):
    """Ends a run after its second round."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= 1


def test_a_run_that_stops_early_has_a_confusion_matrix(config, tmp_path, monkeypatch):
    """The run stops after round 2 of 3. Round 1 has no test."""
    shown = []
    drawn = []
    log_image = "gcfed.loggers.folder.RoundCSVLogger.log_image"  # a logger that accepts pictures
    monkeypatch.setattr(
        log_image, lambda self, *about, step: shown.append((*about, step)), raising=False
    )
    monkeypatch.setattr("gcfed.plots.pictures.plot_confusion", lambda *about: drawn.append(about))
    words = ("eval_every=2", "metrics.classes.figures=true")
    stops = f"+callbacks.stops._target_={__name__}.Stops"
    result = train(config(*TINY, *words, stops, folder=tmp_path / "run"))
    ((counts, names, path, title),) = drawn
    assert (counts == confusion(result)).all()
    assert len(names) == 10
    assert title == "digits: the test split after round 2"
    assert shown == [("confusion", [str(path)], 2)]
    assert len(read_lines(tmp_path / "run/confusion.csv")) == 11
    assert {line[0] for line in read_lines(tmp_path / "run/classes.csv")[1:]} == {"2"}


def test_the_picture_shows_shares_of_each_class(tmp_path, unrendered):
    counts = [[30, 10, 0], [1, 0, 3], [0, 0, 0]]
    axes, _ = plot_confusion(
        counts, ["rose", "tulip", "x" * 30], tmp_path / "confusion.png", "flowers"
    ).axes
    np.testing.assert_allclose(
        axes.images[0].get_array(), [[0.75, 0.25, 0], [0.25, 0, 0.75], [0, 0, 0]]
    )
    assert axes.images[0].get_array().mask.all(1).tolist() == [False, False, True]  # no samples
    assert {t.get_text() for t in axes.texts} == {"75", "25"}
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "rose",
        "tulip",
        "x" * 17 + "…",
    ]
    assert axes.get_title() == "flowers\naccuracy 68.2%"
