"""Metrics of torchmetrics, chosen by name, equal their definitions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TWO

import gcfed
from gcfed.assemble import assemble
from gcfed.metrics.base import OwnNumbers
from gcfed.tasks import CLASSIFICATION

SHORT = (
    "rounds=2",
    "client.epochs=1",
    "eval_every=2",
    "extras.figures=false",
    "logger=csv",
    "metrics=torchmetrics",
)


def auroc(scores: np.ndarray, y: np.ndarray) -> float:
    """Mean over the classes of the share of pairs in which the sample of the class has the higher
    score.
    """
    pairs = [scores[y == c, c][:, None] - scores[y != c, c] for c in range(scores.shape[1])]
    return float(np.mean([((d > 0) + (d == 0) / 2).mean() for d in pairs]))


def f1(predicted: np.ndarray, y: np.ndarray) -> float:
    """Mean of 2 · hits / (predicted + true) over the classes that occur."""
    classes = np.union1d(predicted, y)
    hits = [
        (np.sum((predicted == c) & (y == c)), np.sum(predicted == c) + np.sum(y == c))
        for c in classes
    ]
    return float(np.mean([2 * both / either for both, either in hits]))


def value(name, task, outputs, y, classes=None, **data):
    from gcfed.metrics.by_name import ByName, make

    metric = ByName([])
    own = make(name, classes)
    metric.module = SimpleNamespace(task=task)
    metric.data = SimpleNamespace(**data)
    own.update(*metric.pairs(outputs, y, own))
    return float(own.compute())


@torch.inference_mode()
def outputs_of(net, x):
    return net.eval()(x)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Runs on one process and on two."""
    return [
        gcfed.train(gcfed.configure(*SHORT, "data.client_test=0.3", *words, folder=folder))
        for words, folder in (
            ((), tmp_path_factory.mktemp("one")),
            (TWO, tmp_path_factory.mktemp("two")),
        )
    ]


def test_the_global_model_has_the_defined_values(results):
    frame = results[0].frame
    data = results[0].trainer.datamodule
    x, y = data.fetch_test((0, len(data.test_labels)))
    logits = outputs_of(results[0].model, x)
    assert frame["test/auroc"].iloc[-1] == pytest.approx(
        auroc(logits.softmax(-1).numpy(), y.numpy()), abs=1e-6
    )
    assert frame["test/f1"].iloc[-1] == pytest.approx(
        f1(logits.argmax(-1).numpy(), y.numpy()), abs=1e-6
    )
    assert np.isnan(frame["test/auroc"].iloc[0])  # a round without a test


def test_clients_have_the_mean_over_their_own_test_splits(results, tmp_path):
    # the model of the first round
    first = assemble(gcfed.configure(*SHORT, "data.client_test=0.3", folder=tmp_path))
    values = []
    for client in first.loop.sampler(0, first.data.num_clients, 1):
        samples = first.data.tests_of_clients.client(int(client))
        if len(samples):
            x, y = results[0].trainer.datamodule.fetch(torch.as_tensor(samples), None)
            values.append(f1(outputs_of(first.module.net, x).argmax(-1).numpy(), y.numpy()))
    assert results[0].frame["personal/global_f1"].iloc[0] == pytest.approx(
        np.mean(values), abs=1e-6
    )


def test_two_processes_give_the_same_bits(results):
    assert [result.trainer.world_size for result in results] == [1, 2]
    one, two = (result.frame.filter(regex="test/|personal/") for result in results)
    losses = [*one.pop("test/loss")], [*two.pop("test/loss")]
    # each process multiplies half as many rows
    assert losses[0] == pytest.approx(losses[1], nan_ok=True)
    assert one.equals(two)


def test_regressions_have_metrics(tmp_path):
    words = (
        "rounds=2",
        "data=matrix_regression",
        "model=linear",
        "extras.figures=false",
        "logger=csv",
    )
    names = "metrics.torchmetrics.names=[mean_absolute_error,r2]"
    result = gcfed.train(gcfed.configure(*words, "metrics=torchmetrics", names, folder=tmp_path))
    data = result.trainer.datamodule
    x, y = data.fetch_test((0, len(data.test_labels)))
    expected = float((outputs_of(result.model, x) - y).abs().mean())
    assert result.frame["test/mean_absolute_error"].iloc[-1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "auroq",
        "r2",
        "MetricCollection",
        "confusion_matrix",
        "mean_metric",
        "recall_at_fixed_precision",
    ],
)
def test_a_metric_that_the_task_does_not_allow_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=rf"metrics.torchmetrics.names: .*{name}"):
        gcfed.train(
            gcfed.configure(*SHORT, f"metrics.torchmetrics.names=[{name}]", folder=tmp_path)
        )


@pytest.mark.parametrize("odd", [False, True])
def test_a_model_with_an_infinite_output_has_no_value(odd, monkeypatch):
    """The value is NaN. It is not the metric's default, and finite outputs alone do not count."""
    from gcfed.metrics.by_name import ByName, make  # its import takes seconds

    metric = ByName(["f1"])
    metric.metrics = {"f1": make("f1", 3)}
    metric._tested = torch.zeros(2, dtype=torch.float64)
    metric.module = SimpleNamespace(task=CLASSIFICATION)
    metric.numbers = ()
    outputs = torch.eye(3)
    outputs[0, 0] = torch.inf if odd else 1.0
    metric.on_test_batch(outputs, torch.arange(3))
    monkeypatch.setattr(OwnNumbers, "columns", lambda self, round: {})
    found = metric.columns(SimpleNamespace(reduce=list))
    assert found == pytest.approx({"test/f1": np.nan if odd else 1.0}, nan_ok=True)


def test_a_class_without_a_sample_does_not_count_and_small_logits_are_no_probabilities():
    logits = torch.rand(9, 4, generator=torch.Generator().manual_seed(3))
    y = torch.arange(9) % 3
    expected = auroc(logits.softmax(-1)[:, :3].numpy(), y.numpy())
    assert value("auroc", CLASSIFICATION, logits, y, 4) == pytest.approx(expected)
    assert np.isnan(value("auroc", CLASSIFICATION, logits, 0 * y, 4))


def test_standardized_targets_are_measured_in_their_own_units():
    task = SimpleNamespace(has_classes=False)
    data = {"scaling": {"y_std": [10.0], "y_mean": [90.0]}}
    for name, error in (("mean_absolute_error", 15.0), ("mean_absolute_percentage_error", 1 / 6)):
        assert value(
            name, task, torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1), **data
        ) == pytest.approx(error)
