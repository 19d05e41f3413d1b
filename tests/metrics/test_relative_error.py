"""The distance to a known optimum in a run of SSF's experiment, and settings without such a
distance.
"""

import json

import numpy as np
import pytest
from conftest import read_rows
from safetensors.numpy import load_file

from gcfed.data.sets.datasets import matrix_regression
from gcfed.run import evaluate, train

TINY = (
    "experiment=matrix_regression_ssf",
    "participation.num_clients=4",
    "participation.per_round=2",
    "data.num_classes=2",
    "data.dataset.features=6",
    "data.dataset.samples=16",
    "client.batch_size=4",
    "client.steps=3",
    "rounds=5",
    "metrics.relative_error.every=2",
    "precision=64-true",
)


def test_the_relative_error_is_that_of_the_saved_model(config, tmp_path):
    cfg = config(*TINY, "heterogeneity=high", folder=tmp_path / "run")
    result = train(cfg)
    data = matrix_regression(
        num_clients=4, features=6, outputs=2, samples=16, shift=2.0, ridge=0.1, seed=cfg.seed
    )
    best = data.optimum["fc.weight"]
    weight = load_file(tmp_path / "run" / "global_model.safetensors")["fc.weight"]
    expected = np.linalg.norm(weight - best) / np.linalg.norm(best)
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    measured = {
        int(row["round"])
        for row in rows
        if row.get("test/relative_error") == row.get("test/relative_error")
    }
    assert {2, 4, 5} <= measured
    assert rows[-1]["test/relative_error"] == pytest.approx(expected, rel=1e-12)
    assert result.metrics["test/relative_error"] == pytest.approx(expected, rel=1e-12)
    assert 0 < expected < 1  # W = 0 has error 1
    x, y = (
        t.numpy()
        for t in result.trainer.datamodule.fetch_test((0, result.trainer.datamodule.num_test))
    )
    rmse = np.sqrt(np.mean((x @ weight.T - y) ** 2))
    assert rows[-1]["test/rmse"] == pytest.approx(rmse, rel=1e-12)
    assert json.loads((tmp_path / "run/summary.json").read_text())["test/rmse"] == pytest.approx(
        rmse, rel=1e-12
    )
    cfg.ckpt_path = str(tmp_path / "run/checkpoints/last.ckpt")
    assert evaluate(cfg)["test/loss"] == pytest.approx(result.metrics["test/loss"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("metrics=relative_error",), "data=digits has none"),
        ((*TINY, "data.limit_train=20"), r"remove data\.limit_train"),
        ((*TINY, "data.feature_noise=0.1"), r"remove data\.feature_noise"),
        ((*TINY, "data.validation=0.1"), r"remove data\.validation"),
        ((*TINY, "data.client_test=0.1"), r"remove data\.client_test"),
        ((*TINY, "partition=sizes"), "equal weights: take partition=natural with all groups"),
        ((*TINY, "model=mlp"), r"other parameters, fc\.weight.*model=linear"),
    ],
)
def test_settings_without_a_known_optimum_are_refused(config, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        train(config(*overrides, folder=tmp_path / "run"))
