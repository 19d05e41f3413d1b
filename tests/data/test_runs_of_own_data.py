"""Runs on a user's own data equal plain loops: tables with clients' own tests, several labels for a
sample, and sequences with padding.
"""

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from plain import SETTING, Plain, run
from safetensors.torch import save_file

from gcfed.run import evaluate, train
from gcfed.tasks import Task

ROUNDS = 3


class SeveralLabels(Task):
    """Each sample has several labels of 0 and 1, ``[C]``."""

    columns = ("test/loss", "test/exact")

    def losses(self, outputs, y):
        return F.binary_cross_entropy_with_logits(outputs, y, reduction="none").mean(-1)

    def scores(self, outputs, y):
        is_right = ((outputs > 0) == (y > 0.5)).all(-1)
        return super().scores(outputs, y) | {"test/exact": is_right.float()}


class OwnData(Plain):
    """All clients take part; the server weights them by their samples."""

    def __init__(self, *args):
        self.locals = []  # each round's models of the clients, and the model before
        super().__init__(*args)
        self.cohort = self.n = len(self.clients)

    @staticmethod
    def inputs(x):
        return x

    def sent(self, t, deltas):
        before = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        after = {}
        for k, delta in deltas.items():
            after[k] = {name: before[name] + delta[name] for name in before}
        self.locals.append((before, after))

    def server_step(self, deltas):
        total = sum(len(self.clients[k]) for k in deltas)
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                for k, delta in deltas.items():
                    p += len(self.clients[k]) / total * delta[name]


def finish(case, result, folder):
    """Trains the plain loop, and compares its weights and training losses."""
    for t in range(ROUNDS):
        case.round(t)
    for name, p in result.module.net.named_parameters():
        torch.testing.assert_close(p, dict(case.net.named_parameters())[name], rtol=0, atol=1e-12)
    written = pd.read_csv(folder / "metrics.csv")
    expected = [row["train/loss"] for row in case.rows]
    np.testing.assert_allclose(written["train/loss"], expected, rtol=0, atol=1e-12)
    return written


def of_setting(*overrides):
    """The setting of ``plain.py`` without its partition."""
    words = [word for word in SETTING if "alpha" not in word]
    return (*words, f"rounds={ROUNDS}", "gc=none", "aggregator=weighted_mean", *overrides)


def test_a_table_with_clients_tests(config, tmp_path):
    """No number of a held-out row reaches the scaling; clients are weighted by what they keep."""
    rng = np.random.default_rng(5)
    place = rng.choice(["b", "a", "c"], 90, p=[0.6, 0.3, 0.1])
    rows = pd.DataFrame({"x1": rng.normal(3, 20, 90), "place": place, "x2": rng.normal(size=90)})
    rows["flag"] = rng.integers(0, 2, 90)
    rows["y"] = np.where(rows["x1"] + rng.normal(0, 9, 90) > 3, "high", "low")
    data = tmp_path / "table"
    data.mkdir()
    rows[:70].to_csv(data / "rows.csv", index=False)
    rows[70:].to_csv(data / "test.csv", index=False)
    overrides = of_setting(
        "data=csv",
        f"data.path={data}",
        "data.target=y",
        "partition=natural",
        "partition.by=place",
        "participation.num_clients=null",
        "participation.per_round=3",
        "data.client_test=0.3",
        "data.eval_batch_size=7",
        "model.hidden=[7]",
        "metrics=personal",
        "metrics.personal.every=1",
        "client.stack=2",
    )
    result, first = run(config, tmp_path / "run", *overrides)
    module = result.trainer.datamodule
    groups = np.array(rows["place"][:70])
    kept = [module.client(k) for k in range(3)]
    tests = [module.tests_of_clients.client(k) for k in range(3)]
    for k, name in enumerate("abc"):
        whole = np.flatnonzero(groups == name)
        assert sorted([*kept[k], *tests[k]]) == whole.tolist()
        assert len(tests[k]) == round(0.3 * len(whole))
    names = ["x1", "x2", "flag"]
    values = rows[names].to_numpy(float)
    of_training = values[:70][np.concatenate(kept)]
    for column in (0, 1):
        mean = of_training[:, column].mean()
        values[:, column] = (values[:, column] - mean) / of_training[:, column].std()
    x = torch.from_numpy(values)
    y = torch.from_numpy((rows["y"] == "low").to_numpy(np.int64))
    case = OwnData(first, x[:70], y[:70], kept)
    written = finish(case, result, tmp_path / "run")

    def accuracy(state, samples):
        logits = torch.func.functional_call(case.net, state, (x[samples],))
        return (logits.argmax(1) == y[samples]).double().mean().item()

    for t, (before, after) in enumerate(case.locals):
        shares_of = {
            "global": [accuracy(before, samples) for samples in tests],
            "local": [accuracy(after[k], samples) for k, samples in enumerate(tests)],
        }
        for kind, shares in shares_of.items():
            row = written.loc[t]
            assert row[f"personal/{kind}_acc"] == pytest.approx(np.mean(shares), abs=1e-12)
            assert row[f"personal/{kind}_worst10"] == pytest.approx(min(shares), abs=1e-12)
            assert row[f"personal/{kind}_std"] == pytest.approx(np.std(shares), abs=1e-12)
    state = dict(case.net.named_parameters())
    last = np.arange(70, 90)
    assert written["test/acc"].iloc[-1] == pytest.approx(accuracy(state, last), abs=1e-12)


def test_several_labels_of_a_sample(config, tmp_path, monkeypatch):
    rng = np.random.default_rng(6)
    x = rng.normal(2, 3, (100, 5))
    y = (x[:, :3] + rng.normal(size=(100, 3)) > 2).astype(float)
    groups = np.sort(rng.choice(4, 80, p=[0.1, 0.2, 0.3, 0.4]))
    np.savez(tmp_path / "own.npz", x=x[:80], y=y[:80], groups=groups, x_test=x[80:], y_test=y[80:])
    overrides = of_setting(
        "data=arrays",
        f"data.path={tmp_path / 'own.npz'}",
        "task._target_=test_runs_of_own_data.SeveralLabels",
        "partition=natural",
        "participation.num_clients=null",
        "participation.per_round=4",
        "data.eval_batch_size=7",
        "model.hidden=[7]",
        "client.last_batch=drop",
        "client.stack=1",
    )
    result, first = run(config, tmp_path / "run", *overrides)
    scaled = torch.from_numpy((x - x[:80].mean(0)) / x[:80].std(0))
    labels = torch.from_numpy(y)

    class Several(OwnData):
        last = "drop"

        def objective(self, w, x, y, k):
            loss = F.binary_cross_entropy_with_logits(w(x), y)
            return loss, loss

        def num_labels(self, y):
            return len(y)

    clients = [np.flatnonzero(groups == k) for k in range(4)]
    case = Several(first, scaled[:80], labels[:80], clients)
    written = finish(case, result, tmp_path / "run")
    outputs = case.net(scaled[80:])
    loss = F.binary_cross_entropy_with_logits(outputs, labels[80:]).item()
    exact = ((outputs > 0) == (labels[80:] > 0)).all(1).double().mean().item()
    assert written["test/loss"].iloc[-1] == pytest.approx(loss, abs=1e-12)
    assert written["test/exact"].iloc[-1] == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("parts", [1, 3])
def test_sequences_with_padding(config, tmp_path, parts):
    """A step's loss is the mean over its real labels, also in parts, and so is the test's."""
    rng = np.random.default_rng(7)
    x = rng.integers(1, 9, (90, 6)).astype(np.int32)
    y = np.where(rng.random((90, 6)) < rng.random(90)[:, None], (x * 2) % 9, -100)
    y[:, 0] = x[:, 0]
    groups = np.sort(rng.choice(3, 70, p=[0.2, 0.3, 0.5]))
    np.savez(tmp_path / "own.npz", x=x[:70], y=y[:70], groups=groups, x_test=x[70:], y_test=y[70:])
    overrides = of_setting(
        "data=arrays",
        f"data.path={tmp_path / 'own.npz'}",
        "model=lstm",
        "+model.last_only=false",
        "model.embedding=4",
        "model.hidden=5",
        "model.vocabulary=9",
        "partition=natural",
        "participation.num_clients=null",
        "participation.per_round=3",
        "data.eval_batch_size=7",
        f"client.accumulate={parts}",
    )
    result, first = run(config, tmp_path / "run", *overrides)
    tokens = torch.from_numpy(x).long()
    labels = torch.from_numpy(y).long()

    class Sequences(OwnData):
        def objective(self, w, x, y, k):
            sums = F.cross_entropy(w(x).flatten(0, 1), y.flatten(), reduction="sum")
            loss = sums / (y >= 0).sum()
            return loss, loss

    clients = [np.flatnonzero(groups == k) for k in range(3)]
    case = Sequences(first, tokens[:70], labels[:70], clients)
    written = finish(case, result, tmp_path / "run")
    outputs = case.net(tokens[70:]).flatten(0, 1)
    loss = F.cross_entropy(outputs, labels[70:].flatten()).item()
    assert written["test/loss"].iloc[-1] == pytest.approx(loss, abs=1e-12)


def test_a_regression_on_two_targets(config, tmp_path):
    """Targets of different units: losses are of scaled targets, errors in the user's units."""
    rng = np.random.default_rng(8)
    x = rng.normal(5, 2, (90, 4))
    y = np.stack([1000 * x[:, 0] + rng.normal(0, 300, 90), 0.01 * x[:, 1] - 3], 1)
    groups = np.sort(rng.choice(3, 70, p=[0.2, 0.3, 0.5]))
    np.savez(tmp_path / "own.npz", x=x[:70], y=y[:70], groups=groups, x_test=x[70:], y_test=y[70:])
    overrides = of_setting(
        "data=arrays",
        f"data.path={tmp_path / 'own.npz'}",
        "task._target_=gcfed.tasks.SquaredError",
        "partition=natural",
        "participation.num_clients=null",
        "participation.per_round=3",
        "data.eval_batch_size=7",
        "data.client_test=0.25",
        "model.hidden=[7]",
        "client.stack=3",
        "metrics=torchmetrics",
        "metrics.torchmetrics.names=[mean_absolute_error,mean_absolute_percentage_error]",
        "metrics.torchmetrics.every=1",
    )
    result, first = run(config, tmp_path / "run", *overrides)
    module = result.trainer.datamodule
    kept = [module.client(k) for k in range(3)]
    tests = [module.tests_of_clients.client(k) for k in range(3)]
    training = np.concatenate(kept)
    mean = y[training].mean(0)
    deviation = y[training].std(0)
    inputs = torch.from_numpy((x - x[training].mean(0)) / x[training].std(0))
    targets = torch.from_numpy((y - mean) / deviation)

    class Regression(OwnData):
        def objective(self, w, x, y, k):
            loss = (w(x) - y).square().sum(1).mean() / 2
            return loss, loss

        def num_labels(self, y):
            return len(y)

    case = Regression(first, inputs[:70], targets[:70], kept)
    written = finish(case, result, tmp_path / "run").iloc[-1]

    def outputs_of(state, samples):
        outputs = torch.func.functional_call(case.net, state, (inputs[samples],))
        return outputs.detach().numpy() * deviation + mean

    state = dict(case.net.named_parameters())
    test = np.arange(70, 90)
    errors = outputs_of(state, test) - y[test]
    loss = ((errors / deviation) ** 2).sum(1).mean() / 2
    assert written["test/loss"] == pytest.approx(loss, rel=1e-12)
    assert written["test/rmse"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-12)
    mae = np.abs(errors).mean()
    assert written["test/mean_absolute_error"] == pytest.approx(mae, rel=1e-6)
    mape = np.abs(errors / y[test]).mean()
    assert written["test/mean_absolute_percentage_error"] == pytest.approx(mape, rel=1e-6)
    before, after = case.locals[-1]
    for kind, states in (("global", [before] * 3), ("local", [after[k] for k in range(3)])):
        found = [
            np.abs(outputs_of(own, samples) - y[samples]).mean()
            for own, samples in zip(states, tests, strict=True)
        ]
        name = f"personal/{kind}_mean_absolute_error"
        assert written[name] == pytest.approx(np.mean(found), rel=1e-6)


@pytest.mark.parametrize("file", ["global_model.safetensors", "checkpoints/last.ckpt"])
@pytest.mark.parametrize("shape", [(4,), (1, 6, 6)])
def test_a_shared_model_is_not_tested_with_another_scaling_in_silence(
    config, tmp_path, caplog, shape, file
):
    """The means of the training samples depend on which samples clients hold out."""
    rng = np.random.default_rng(9)
    y = rng.integers(0, 2, 60)
    x = rng.normal(5, 2, (60, *shape)) + y.reshape(-1, *[1] * len(shape))
    if len(shape) > 1:
        x = (20 * x).clip(0, 255).astype(np.uint8)
    np.savez(tmp_path / "own.npz", x=x, y=y)
    words = ["data=arrays", f"data.path={tmp_path / 'own.npz'}", "model.hidden=[5]", "gc=none"]
    words += ["participation.num_clients=3", "participation.per_round=2", "partition=iid"]
    result = train(config(*words, "rounds=2", "data.client_test=0.4", folder=tmp_path / "run"))
    model = f"ckpt_path={tmp_path / 'run' / file}"
    same = evaluate(config(*words, model, "data.client_test=0.4"))
    assert same["test/loss"] == result.metrics["test/loss"]
    assert "scaled the inputs" not in caplog.text
    other = evaluate(config(*words, model))
    assert other["test/loss"] != same["test/loss"]
    assert "its run scaled the inputs or targets by other numbers" in caplog.text


@pytest.mark.parametrize("trained", [True, False], ids=["scaled", "raw"])
def test_a_model_is_not_tested_without_its_scaling_in_silence(config, tmp_path, caplog, trained):
    """One of both has no means and deviations at all."""
    words = scaled_words(tmp_path)
    train(config(*words, f"data.standardize={trained}", folder=tmp_path / "run"))
    model = f"ckpt_path={tmp_path / 'run' / 'global_model.safetensors'}"
    evaluate(config(*words, model, f"data.standardize={trained}"))
    assert "scaled the inputs" not in caplog.text
    evaluate(config(*words, model, f"data.standardize={not trained}"))
    assert f"{model}: its run scaled the inputs or targets by other numbers" in caplog.text


@pytest.mark.parametrize("file", ["global_model.safetensors", "checkpoints/last.ckpt"])
def test_a_run_does_not_start_at_a_model_of_another_scaling_in_silence(
    config, tmp_path, caplog, file
):
    words = scaled_words(tmp_path)
    train(config(*words, folder=tmp_path / "run"))
    start = f"model.start={tmp_path / 'run' / file}"
    train(config(*words, start, folder=tmp_path / "same"))
    assert "scaled the inputs" not in caplog.text
    train(config(*words, start, "data.client_test=0.4", folder=tmp_path / "other"))
    assert f"{start}: its run scaled the inputs or targets by other numbers" in caplog.text


def test_a_run_may_start_at_tensors_that_tell_no_scaling(config, tmp_path, caplog):
    words = scaled_words(tmp_path)
    net = train(config(*words, folder=tmp_path / "run")).model
    for name, save in (("a.pt", torch.save), ("a.safetensors", save_file)):
        save(net.state_dict(), tmp_path / name)
        start = f"model.start={tmp_path / name}"
        train(config(*words, start, "data.client_test=0.4", folder=tmp_path / f"from_{name}"))
    assert "scaled the inputs" not in caplog.text


@pytest.mark.parametrize("file", ["global_model.safetensors", "checkpoints/last.ckpt"])
def test_a_model_is_not_tested_on_other_classes_in_silence(config, tmp_path, caplog, file):
    """The names of own data are numbered in their order, so one more name moves the others."""
    words = {}
    for kind, names in (("pets", ["cat", "dog"]), ("farm", ["cat", "cow"])):
        (tmp_path / kind).mkdir()
        words[kind] = scaled_words(tmp_path / kind, names)
    train(config(*words["pets"], folder=tmp_path / "run"))
    model = f"ckpt_path={tmp_path / 'run' / file}"
    evaluate(config(*words["pets"], model))
    assert "output" not in caplog.text
    evaluate(config(*words["farm"], model))
    assert (
        f"{model}: output 1 of the model is the class dog in its run, and cow in these data"
        in caplog.text
    )


def scaled_words(folder, names=("0", "1")):
    """A run of one round on vectors, which are standardised."""
    rng = np.random.default_rng(9)
    y = rng.integers(0, 2, 60)
    x = rng.normal(5, 2, (60, 4)) + y[:, None]
    np.savez(folder / "own.npz", x=x, y=np.array(names)[y])
    words = ["data=arrays", f"data.path={folder / 'own.npz'}", "model.hidden=[5]", "gc=none"]
    words += ["participation.num_clients=3", "participation.per_round=2", "partition=iid"]
    return [*words, "rounds=1"]
