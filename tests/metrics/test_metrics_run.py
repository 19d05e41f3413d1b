"""The metrics in real runs: they change no run.

Their files and the gap to full participation are right.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TWO, read_lines, read_rows, refuses
from harness import (
    Cohorts,
    final_weights,
    make_net,
    make_received,
    random_federation,
    sgd,
    train_rounds,
    weights,
)
from omegaconf import open_dict
from recording import Recorder
from torch import nn

from gcfed.aggregators.mean import MeanAggregator
from gcfed.aggregators.norm_clip import NormClip
from gcfed.federated.engine.client import ClientRound
from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.objective.proximal import Proximal
from gcfed.metrics.base import OwnNumbers, ServerMetric
from gcfed.metrics.local_models import Clients, Forgetting
from gcfed.metrics.updates import Drift, Gap, Updates
from gcfed.participation.sampling import PoissonSampler, UniformSampler
from gcfed.run import train

N = 6
TINY = (
    "model.hidden=[12]",
    "rounds=2",
    f"participation.num_clients={N}",
    "participation.per_round=3",
    "client.epochs=2",
    "client.batch_size=8",
    "data.limit_train=150",
    "data.limit_test=40",
    "precision=64-true",
    "data.client_test=0.2",
)
NAMES = (
    "drift",
    "cka",
    "gap",
    "clients",
    "angle",
    "coherence",
    "forgetting",
    "personal",
    "classes",
    "cohorts",
    "updates",
    "gc_share",
)
ALL = (
    f"metrics=[{','.join(NAMES)}]",
    *(f"metrics.{name}.every=1" for name in NAMES),
    "metrics.cka.samples=20",
    "metrics.forgetting.samples=9",
)
GC = ("rho", "share_gradient", "share_update", "share_model")
COLUMNS = {
    "drift": "client_norm relative update_norm divergence cosine",
    "cka": "fc1 fc2",
    "gap": "l2 relative cosine",
    "clients": "acc_before acc_after loss_before loss_after",
    "angle": "server above_90 update",
    "forgetting": "before after own others",
    "gc": " ".join(f"{name}/fc{i}.weight" for name in GC for i in (1, 2)),
    "personal": "global_acc global_worst10 global_std local_acc local_worst10 local_std",
    "classes": "worst_acc mean_acc best_acc",
}
COLUMNS = {f"{metric}/{name}" for metric, names in COLUMNS.items() for name in names.split()}
NOT_FIRST = {"angle/server", "angle/above_90"}  # they need an earlier round


class WithBatchNorm(nn.Module):
    """Clients send its running statistics.

    Measurements use evaluation mode, which must not affect training.
    """

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.fc2 = nn.Linear(8, 10)
        self.dropout = nn.Dropout(0.3)

    def stages(self):
        return {
            "fc1": lambda x: self.norm(self.fc1(x.flatten(1))).relu(),
            "fc2": lambda h: self.fc2(self.dropout(h)),
        }

    def forward(self, x):
        for stage in self.stages().values():
            x = stage(x)
        return x


def run(config, folder, *overrides, model=None):
    cfg = config(
        *(word for word in TINY if not (model and word.startswith(("model", "gc")))),
        *overrides,
        folder=folder,
    )
    if model is not None:
        with open_dict(cfg):
            cfg.model = {"_target_": f"{__name__}.{model}"}
    return train(cfg), read_rows(folder / "metrics.csv")


def numbers(lines):
    """The numbers from the fourth column of a table on."""
    return np.array([[float(x) for x in line[3:]] for line in lines[1:]])


def test_metrics_change_no_run_and_agree_on_one_and_two_processes(
    config, tmp_path, monkeypatch, unrendered
):
    """The run has dropout, BatchNorm and clients' states, and every client is rehearsed in every
    round.
    """
    shown = []
    log_image = "gcfed.loggers.folder.RoundCSVLogger.log_image"  # a logger that accepts pictures
    monkeypatch.setattr(
        log_image, lambda self, _, paths, step: shown.append((Path(*paths), step)), raising=False
    )
    settings = ("algorithm=scaffold", "gc=none", "client.stack=1", "client.last_batch=wrap")
    (without, a), (observed, b), (_, c) = (
        run(config, tmp_path / str(i), *settings, *more, model="WithBatchNorm")
        for i, more in enumerate((("metrics=none",), (*ALL, "extras.figures=true"), (*ALL, *TWO)))
    )
    assert torch.equal(final_weights(observed), final_weights(without))
    assert observed.module.net.norm.running_mean.abs().max() > 0
    for t, (plain, row, of_two) in enumerate(zip(a, b, c, strict=True)):
        same = [name for name in plain if "time" not in name]
        assert [row[name] for name in same] == [plain[name] for name in same]
        measured = COLUMNS if t else COLUMNS - NOT_FIRST
        assert row.keys() - plain.keys() == measured
        assert np.isfinite([row[name] for name in measured]).all()
        assert {name: of_two[name] for name in measured} == pytest.approx(
            {n: row[n] for n in measured}, rel=1e-9
        )
        assert 0 < row["time/train_s"] < row["time/round_s"]
    pictures = [("partition.png", 0), ("confusion.png", 2), ("curves.png", 2)]
    assert [(path.name, number) for path, number in shown] == pictures
    for name in ("cohorts.csv", "classes.csv", "confusion.csv"):
        assert read_lines(tmp_path / "1" / name) == read_lines(tmp_path / "2" / name)
    np.testing.assert_allclose(
        *(numbers(read_lines(tmp_path / i / "updates.csv")) for i in "12"), rtol=1e-4
    )


def test_a_round_without_a_finite_client_has_nothing_to_measure(config, tmp_path):
    diverges = (
        "client.optimizer.lr=1e9",
        "client.optimizer.weight_decay=1e9",
        "client.steps=20",
        "rounds=1",
    )
    # Δ has no entry of a personal tensor
    result, rows = run(config, tmp_path, "algorithm=lgfedavg", *ALL, *diverges)
    assert rows[0]["train/nonfinite_clients"] == 3
    of_the_model = ("classes/", "gc/share_gradient", "gc/share_model")  # the broadcast one
    assert {name for name in rows[0] if name in COLUMNS} == {
        n for n in COLUMNS if n.startswith(of_the_model)
    }
    assert final_weights(result).isfinite().all()


def test_a_round_that_no_client_answers_has_nothing_to_measure():
    drift = Drift()
    drift.rounds = 1
    row = {}
    drift.on_round_end(row, make_received({}, answered=np.array([], int)))
    assert row == {}


def test_a_last_round_without_clients_measures_the_model_and_says_what_it_lacks(
    config, tmp_path, caplog
):
    """Client DP's noise changes the model in that round, too."""
    assert not len(PoissonSampler(2)(1, 5, 14))  # the second round of this seed
    words = (
        *TINY[:-1],
        "seed=14",
        "participation=poisson",
        "participation.num_clients=5",
        "participation.per_round=2",
        "privacy=client_dp",
        "privacy.noise_multiplier=0.5",
        "metrics=[classes,torchmetrics,drift]",
        "metrics.torchmetrics.names=[f1]",
    )
    train(config(*words, folder=tmp_path))
    _, row = read_rows(tmp_path / "metrics.csv")
    assert row["train/clients"] == 0
    header, *lines = read_lines(tmp_path / "classes.csv")
    assert header == ["round", "class", "name", "tested", "acc"]
    last = [line for line in lines if line[0] == "2"]
    right = sum(int(tested) * float(acc) for *_, tested, acc in last)
    assert row["test/acc"] == pytest.approx(right / 40)
    assert row["classes/mean_acc"] == pytest.approx(np.mean([float(line[-1]) for line in last]))
    assert 0 <= row["test/f1"] <= 1
    assert not any(name.startswith("drift/") for name in row)
    said = [record.message for record in caplog.records if "did not measure" in record.message]
    assert said == [
        "metrics: Drift did not measure round 2, the last one, in which no client answered"
    ]


def test_a_metric_with_a_wrong_number_of_values_is_refused():
    """Otherwise PyTorch would broadcast a single value to all columns."""

    class Two(OwnNumbers):
        numbers = ("mine/a", "mine/b")

        def measure(self, stack, row, own, download):
            return torch.zeros(1)

    with refuses(r"^Two\.measure returns .* \[1\], not \[2\], for mine/a, mine/b\."):
        train_rounds(rounds=1, methods=[Two()])


class Gives(ServerMetric):
    """Gives its column this value."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def columns(self, round):
        return {"mine/x": self.value}

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.seen = outputs["mine/x"]


@pytest.mark.parametrize("value", ["0.5", None, torch.ones(2)])
def test_a_column_takes_numbers_only(value):
    """Other values would make metrics.csv unreadable."""
    with refuses(
        r"^column mine/x: a row of metrics takes numbers, and a part has given it ",
    ):
        train_rounds(rounds=1, methods=[Gives(value)])


def test_a_tensor_of_one_number_is_a_number():
    gives = Gives(torch.tensor(3.0))
    train_rounds(rounds=1, methods=[gives])
    assert isinstance(gives.seen, float)


@pytest.mark.parametrize(
    ("method", "aggregator", "k"),
    [
        (None, MeanAggregator("samples"), 4),
        (Proximal, NormClip(1e6), 4),
        (Scaffold, MeanAggregator(), 1),
    ],
)
def test_the_gap_is_the_distance_to_a_run_of_all_clients(monkeypatch, method, aggregator, k):
    """Two runs differ only in the last cohort. Their last changes of the model are Δ_S and Δ_all.

    A robust rule has equal weights. The one here clips no update.
    """

    def two_rounds(last):
        cohorts = ([0, 3], last)
        net = make_net()
        seen = []
        monkeypatch.setattr(Cohorts, "__call__", lambda self, t, *_: np.array(cohorts[t]))
        train_rounds(
            net,
            rounds=2,
            methods=[Gap(), *([method()] if method else [])],
            k=k,
            aggregator=aggregator,
            cohort_of=5,
            on_round=lambda _, row: seen.append((weights(net), row)),
        )
        return seen

    (before, first), (few, row) = two_rounds([1, 3])
    _, (everyone, of_all) = two_rounds([0, 1, 2, 3, 4])
    partial = few - before
    full = everyone - before
    assert "gap/l2" not in first
    gap = (partial - full).norm().item()
    norm = full.norm().item()
    assert row["gap/l2"] == pytest.approx(gap, rel=1e-9)
    assert row["gap/relative"] == pytest.approx(gap / norm, rel=1e-9)
    assert row["gap/cosine"] == pytest.approx(
        (partial @ full / norm / partial.norm()).item(), rel=1e-9
    )
    assert of_all["gap/l2"] == of_all["gap/relative"] == 0
    assert of_all["gap/cosine"] == pytest.approx(1)


def test_a_round_without_a_finite_client_leaves_nothing_in_the_gap(monkeypatch):
    """Rehearsed clients have finite updates in that round.

    They must not count in the next measured round.
    """
    data = random_federation()
    last = []
    data.x[data.clients[2]] = float("inf")
    monkeypatch.setattr(Cohorts, "__call__", lambda self, t, *_: np.array([[0], [2], [3]][t]))
    for every in (1, 3):
        rows = []
        train_rounds(
            make_net(),
            data,
            sgd(),
            rounds=3,
            methods=[Gap(every=every)],
            cohort_of=1,
            on_round=lambda _, row, rows=rows: rows.append(row),
        )
        assert rows[1]["train/nonfinite_clients"] == 1
        last.append({name: value for name, value in rows[2].items() if name.startswith("gap/")})
    assert len(last[0]) == 3
    assert last[0] == last[1]


def test_rehearsals_and_measurements_are_no_training_time(config, tmp_path, monkeypatch):
    train_clients = ClientRound.train
    seconds = 0

    def slow(self, *args, sends=True, **kwargs):
        nonlocal seconds
        seconds += 1 if sends else 100
        return train_clients(self, *args, sends=sends, **kwargs)

    def slowly(measure):
        def measured(self, *args):
            nonlocal seconds
            seconds += 1000
            return measure(self, *args)

        return measured

    monkeypatch.setattr(ClientRound, "train", slow)
    for metric in (Clients, Forgetting):  # Personal measures as Clients does
        monkeypatch.setattr(metric, "measure", slowly(metric.measure))
    monkeypatch.setattr(
        "gcfed.federated.engine.round.time", SimpleNamespace(perf_counter=lambda: seconds)
    )
    monkeypatch.setattr(
        "gcfed.federated.engine.bound_run.time", SimpleNamespace(perf_counter=lambda: seconds)
    )
    monkeypatch.setattr("gcfed.metrics.base.perf_counter", lambda: seconds)
    names = ("gap", "clients", "personal", "forgetting")
    more = (f"metrics=[{','.join(names)}]", *(f"metrics.{name}.every=1" for name in names))
    _, rows = run(config, tmp_path, *more, "rounds=2", "client.stack=1")  # three clients rehearse
    assert [row["time/train_s"] for row in rows] == [3, 3]
    assert [row["time/round_s"] for row in rows] == [9303, 9303]


def test_samples_and_steps_are_counted_and_cohorts_are_written(config, tmp_path):
    """Rehearsals do not count.

    A resumed run drops all lines of rounds that it repeats, also incomplete ones.
    """
    settings = ("metrics=[cohorts,gap]", "metrics.gap.every=1", "client.stack=2")
    run(config, tmp_path, *settings, "rounds=2")
    with (tmp_path / "cohorts.csv").open("a") as file:
        file.write("3,1\n3,")
    result, rows = run(config, tmp_path, *settings, "rounds=3", "ckpt_path=last")
    cohorts = [UniformSampler(3)(t, N, 1) for t in range(3)]
    lines = [f"{t + 1},{client}\n" for t, cohort in enumerate(cohorts) for client in cohort]
    assert (tmp_path / "cohorts.csv").read_text() == "round,client\n" + "".join(lines)
    for row, cohort in zip(rows, cohorts, strict=True):
        sizes = result.trainer.datamodule.sizes(cohort)
        assert row["train/samples"] == 2 * sizes.sum()
        assert row["train/steps"] == 2 * np.ceil(sizes / 8).sum()


def test_each_clients_updates_are_written_layer_by_layer(tmp_path):
    """The expected numbers come from copies of the models."""
    recorder = Recorder()
    updates = Updates(str(tmp_path))
    train_rounds(rounds=2, methods=[updates, recorder], k=2)
    lines = (tmp_path / "updates.csv").read_text().splitlines()
    assert lines.pop(0) == "round,client,tensor,norm,removed"
    for t, (start, locals_) in enumerate(recorder.rounds, start=1):
        for client in sorted(locals_):
            for name in ("0.weight", "2.weight"):
                delta = locals_[client][name] - start[name]
                removed = np.broadcast_to(delta.mean(1, keepdims=True), delta.shape)
                number, who, tensor, *numbers = lines.pop(0).split(",")
                assert int(number) == t
                assert int(who) == client
                assert tensor == name
                expected = [np.linalg.norm(delta), np.linalg.norm(removed)]
                np.testing.assert_allclose([float(x) for x in numbers], expected, rtol=1e-5)
    assert not lines
