"""The metrics in real runs: the gap to full participation, switches, and that no algorithm notices them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TWO, read_rows
from harness import Cohorts, final_weights, make_net, random_federation, sgd, train_rounds, weights
from omegaconf import open_dict
from recording import Recorder

from gcfed.aggregators.norm_clip import NormClip
from gcfed.data.sampling import UniformSampler
from gcfed.federated.aggregate import MeanAggregator
from gcfed.federated.client import ClientProgram
from gcfed.methods.proximal import Proximal
from gcfed.methods.scaffold import Scaffold
from gcfed.metrics.local_models import Clients, Forgetting
from gcfed.metrics.updates import Gap, Updates
from gcfed.run import train

N = 6
TINY = (
    "model.hidden=[12]", "gc.boundary=fc2", "rounds=3", f"participation.num_clients={N}", "participation.per_round=3",
    "client.epochs=2", "client.batch_size=8", "data.limit_train=150", "data.limit_test=40", "precision=64-true",
)  # fmt: skip
EVERY_ROUND = (
    "metrics.cka.every=1", "metrics.gap.every=1", "metrics.clients.every=1", "metrics.forgetting.every=1",
    "metrics.cka.samples=20", "metrics.forgetting.samples=9",
)  # fmt: skip
COLUMNS = {
    "drift/client_norm", "drift/relative", "drift/update_norm", "drift/divergence", "drift/cosine",
    "cka/fc1", "cka/fc2", "gap/l2", "gap/relative", "gap/cosine",
    "clients/acc_before", "clients/acc_after", "clients/loss_before", "clients/loss_after",
    "angle/server", "angle/above_90", "angle/update",
    "forgetting/before", "forgetting/after", "forgetting/own", "forgetting/others",
}  # fmt: skip
NOT_FIRST = {"angle/server", "angle/above_90"}  # there is no round before the first


def columns(row):
    return {name: row[name] for name in COLUMNS & row.keys()}


def run(config, folder, *overrides):
    return train(config(*TINY, *overrides, folder=folder)), read_rows(folder / "metrics.csv")


def test_a_run_that_is_measured_is_the_same_and_has_every_column(config, tmp_path):
    """Bit for bit, with every client rehearsed in every round; of all algorithms this is said in test_contract.

    Two processes measure in stacks of one client what one process does in stacks of two.
    """
    (without, a), (observed, b), (_, c) = (
        run(config, tmp_path / str(i), f"metrics={name}", *more)
        for i, (name, *more) in enumerate(
            (("none", "client.stack=2"), ("all", "client.stack=2", *EVERY_ROUND), ("all", *EVERY_ROUND, *TWO))
        )
    )
    assert torch.equal(final_weights(observed), final_weights(without))
    for t, (plain, row, of_two) in enumerate(zip(a, b, c, strict=True)):
        assert {k: v for k, v in row.items() if k in plain and "time" not in k} == {
            k: v for k, v in plain.items() if "time" not in k
        }
        measured = COLUMNS if t else COLUMNS - NOT_FIRST
        assert row.keys() - plain.keys() == measured
        assert np.isfinite([row[name] for name in measured]).all()
        assert columns(of_two) == pytest.approx(columns(row), rel=1e-9)


@pytest.mark.parametrize(
    ("method", "aggregator", "k"),
    [(None, MeanAggregator(), 1), (None, MeanAggregator("samples"), 4), (Proximal, NormClip(1e6), 4),
     (Scaffold, MeanAggregator(), 1)],
)  # fmt: skip
def test_the_gap_is_that_to_a_run_of_all_clients(monkeypatch, method, aggregator, k):
    """Runs that differ in the last cohort alone: what they then do to the model is Δ_S and Δ_all.

    A rule other than the mean, here one that cuts nothing, has no weights: they are alike then.
    """

    def two_rounds(last):
        cohorts, net, seen = ([0, 3], last), make_net(), []
        monkeypatch.setattr(Cohorts, "__call__", lambda self, t, *_: np.array(cohorts[t]))
        train_rounds(
            net, random_federation(), sgd(), rounds=2, methods=[Gap(), *([method()] if method else [])], k=k,
            aggregator=aggregator, cohort_of=5, on_round=lambda _, row: seen.append((weights(net), row)),
        )  # fmt: skip
        return seen

    (before, first), (few, row) = two_rounds([1, 3])
    _, (everyone, of_all) = two_rounds([0, 1, 2, 3, 4])
    partial, full = few - before, everyone - before
    assert "gap/l2" not in first
    gap, norm = (partial - full).norm().item(), full.norm().item()
    assert row["gap/l2"] == pytest.approx(gap, rel=1e-9)
    assert row["gap/relative"] == pytest.approx(gap / norm, rel=1e-9)
    assert row["gap/cosine"] == pytest.approx((partial @ full / norm / partial.norm()).item(), rel=1e-9)
    assert of_all["gap/l2"] == of_all["gap/relative"] == 0
    assert of_all["gap/cosine"] == pytest.approx(1)


def test_a_round_without_a_finite_client_leaves_nothing_in_the_gap(monkeypatch):
    """Those that rehearse it have finite updates: they are of that round, and not of the next that is measured."""
    data, last = random_federation(), []
    data.x[data.clients[2]] = float("inf")
    monkeypatch.setattr(Cohorts, "__call__", lambda self, t, *_: np.array([[0], [2], [3]][t]))
    for every in (1, 3):
        rows = []
        train_rounds(
            make_net(), data, sgd(), rounds=3, methods=[Gap(every=every)], cohort_of=1,
            on_round=lambda _, row, rows=rows: rows.append(row),
        )  # fmt: skip
        assert rows[1]["train/nonfinite_clients"] == 1
        last.append({name: value for name, value in rows[2].items() if name.startswith("gap/")})
    assert len(last[0]) == 3
    assert last[0] == last[1]


def test_rehearsals_and_measurements_are_no_training_time(config, tmp_path, monkeypatch):
    train_clients, seconds = ClientProgram.train, 0

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

    monkeypatch.setattr(ClientProgram, "train", slow)
    for metric in (Clients, Forgetting):  # Personal measures as Clients does
        monkeypatch.setattr(metric, "measure", slowly(metric.measure))
    monkeypatch.setattr("gcfed.federated.round.time", SimpleNamespace(perf_counter=lambda: seconds))
    monkeypatch.setattr("gcfed.federated.loop.time", SimpleNamespace(perf_counter=lambda: seconds))
    monkeypatch.setattr("gcfed.metrics.base.perf_counter", lambda: seconds)
    names = ("gap", "clients", "personal", "forgetting")
    more = (f"metrics=[{','.join(names)}]", "data.client_test=0.3", *(f"metrics.{name}.every=1" for name in names))
    _, rows = run(config, tmp_path, *more, "rounds=2", "client.stack=1")  # three clients rehearse
    assert [row["time/train_s"] for row in rows] == [3, 3]
    assert [row["time/round_s"] for row in rows] == [9303, 9303]


def test_what_was_trained_is_counted_and_by_whom_is_written(config, tmp_path):
    """Rehearsals count for nothing; a resumed run drops the lines of rounds that it repeats, whole or not."""
    settings = ("metrics=[cohorts,gap]", "metrics.gap.every=1", "client.stack=2")
    run(config, tmp_path, *settings, "rounds=2")
    with (tmp_path / "cohorts.csv").open("a") as file:
        file.write("3,1\n3,")
    result, rows = run(config, tmp_path, *settings, "rounds=3", "ckpt_path=last")
    cohorts = [UniformSampler(3)(t, N, 1) for t in range(3)]
    lines = [f"{t + 1},{client}\n" for t, cohort in enumerate(cohorts) for client in cohort]
    assert (tmp_path / "cohorts.csv").read_text() == "round,client\n" + "".join(lines)
    for row, cohort in zip(rows, cohorts, strict=True):
        sizes = result.loop.data.sizes(cohort)
        assert row["train/samples"] == 2 * sizes.sum()
        assert row["train/steps"] == 2 * np.ceil(sizes / 8).sum()


def test_each_clients_updates_are_written_layer_by_layer(config, tmp_path):
    """From plain copies of the models, on one process and on two."""
    recorder = Recorder()
    updates = Updates(str(tmp_path))
    train_rounds(make_net(), random_federation(), sgd(), rounds=2, methods=[updates, recorder], k=2)
    lines = (tmp_path / "updates.csv").read_text().splitlines()
    assert lines.pop(0) == "round,client,tensor,norm,removed"
    for t, (start, locals_) in enumerate(recorder.rounds, start=1):
        for client in sorted(locals_):
            for name in ("0.weight", "2.weight"):
                delta = locals_[client][name] - start[name]
                removed = np.broadcast_to(delta.mean(1, keepdims=True), delta.shape)
                number, who, tensor, *numbers = lines.pop(0).split(",")
                assert (int(number), int(who), tensor) == (t, client, name)
                expected = [np.linalg.norm(delta), np.linalg.norm(removed)]
                np.testing.assert_allclose([float(x) for x in numbers], expected, rtol=1e-5)
    assert not lines
    train_rounds(make_net(), random_federation(), sgd(), rounds=2, methods=[Updates(str(tmp_path / "two"))], world=2)
    one, two = (
        [line.split(",") for line in (folder / "updates.csv").read_text().splitlines()[1:]]
        for folder in (tmp_path, tmp_path / "two")
    )
    assert [line[:3] for line in one] == [line[:3] for line in two]
    np.testing.assert_allclose(*(np.array([line[3:] for line in table], float) for table in (one, two)), rtol=1e-4)


def test_a_round_without_a_finite_client_has_nothing_to_measure(config, tmp_path):
    result, rows = run(
        config,
        tmp_path,
        "metrics=all",
        *EVERY_ROUND,
        "client.optimizer.lr=1e9",
        "client.optimizer.weight_decay=1e9",
        "client.steps=60",
        "rounds=2",
    )
    assert [row["train/nonfinite_clients"] for row in rows] == [3, 3]
    assert not COLUMNS & {name for row in rows for name in row}
    assert final_weights(result).isfinite().all()


def test_smoothed_accuracies_are_the_same_in_the_rows_and_in_the_summary(config, tmp_path):
    _, rows = run(config, tmp_path, "rounds=14", "eval_every=3", "callbacks.checkpoint.every=14")
    summary = json.loads((tmp_path / "summary.json").read_text())
    last_ten = pytest.approx(np.mean([rows[t - 1]["test/acc"] for t in (6, 9, 12, 14)]))
    assert rows[-1]["test/acc_smooth10"] == last_ten
    assert summary["test/acc_smooth10"] == last_ten
    assert summary["test/acc_ema"] == pytest.approx(rows[-1]["test/acc_ema"])


def test_a_network_with_batch_statistics(config, tmp_path):
    """ResNet-like buffers: measured in evaluation mode, which must not reach the run."""
    nets = {}
    for metrics in ("none", "all"):
        cfg = config(*TINY[2:], f"metrics={metrics}", "gc=none", "client.stack=1", folder=tmp_path / metrics)
        with open_dict(cfg):
            cfg.model = {"_target_": f"{__name__}.WithBatchNorm"}
            if metrics == "all":
                for name in ("gap", "cka", "clients", "forgetting"):
                    cfg.metrics[name].every = 1
        nets[metrics] = train(cfg).module.net.state_dict()
    for name, tensor in nets["none"].items():
        assert torch.equal(nets["all"][name], tensor), name
    assert nets["all"]["norm.running_mean"].abs().max() > 0


class WithBatchNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 10)
        self.dropout = torch.nn.Dropout(0.3)

    def stages(self):
        return {"fc1": lambda x: self.norm(self.fc1(x.flatten(1))).relu(), "fc2": lambda h: self.fc2(self.dropout(h))}

    def forward(self, x):
        for stage in self.stages().values():
            x = stage(x)
        return x
