"""The loss surface in whole runs: it changes none, and finds what they find."""

import matplotlib.image
import numpy as np
import pytest
import torch
from conftest import read_rows
from harness import final_weights
from omegaconf import open_dict
from torch import nn

from gcfed.run import train

GRID = 5
TINY = (
    "model.hidden=[12]", "gc.boundary=fc2", "rounds=3", "participation.num_clients=5", "participation.per_round=3",
    "client.epochs=1", "client.batch_size=8", "data.limit_train=120", "data.limit_test=40", "precision=64-true",
)  # fmt: skip
SURFACE = ("metrics=surface", "metrics.surface.every=2", f"metrics.surface.grid={GRID}")


class WithBatchNorm(nn.Sequential):
    """Statistics travel with the models."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 10))


def run(config, folder, *overrides, model=None):
    cfg = config(*TINY, *overrides, folder=folder)
    if model is not None:
        with open_dict(cfg):
            cfg.model = {"_target_": f"{__name__}.{model}"}
    return train(cfg), read_rows(folder / "metrics.csv")


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (None, ("algorithm=fedacg", "client.stack=2")),
        ("WithBatchNorm", ("gc=none", "client.stack=1", "client.last_batch=wrap")),
    ],
)
def test_no_run_notices_it_and_it_finds_what_the_run_finds(config, tmp_path, model, settings):
    """The global model's loss and accuracy are those of the round's own test, on the same samples."""
    without, plain = run(config, tmp_path / "without", *settings, model=model)
    more = (
        *SURFACE,
        "metrics.surface.samples=null",
        "metrics.surface.split=test",
        f"metrics.surface.figures={model is None}",
    )
    observed, rows = run(config, tmp_path / "with", *settings, *more, model=model)
    assert torch.equal(final_weights(observed), final_weights(without))
    for row, other in zip(rows, plain, strict=True):
        assert {k: v for k, v in row.items() if "time" not in k} == {k: v for k, v in other.items() if "time" not in k}
    for number in (2, 3):  # every second round and the last
        found = np.load(tmp_path / "with" / f"surface_round_{number}.npz")
        assert found["point_loss"][5] == pytest.approx(rows[number - 1]["test/loss"], rel=1e-5)
        assert found["point_acc"][5] == pytest.approx(rows[number - 1]["test/acc"])
        ahead = "algorithm=fedacg" in settings  # the broadcast is not the last round's global model
        assert (found["point_loss"][4] == pytest.approx(rows[number - 2]["test/loss"], rel=1e-5)) is not ahead
        assert np.isfinite(found["loss"]).all()
        if model is None:
            assert matplotlib.image.imread(tmp_path / "with" / f"surface_round_{number}.png").std() > 0.02
    assert not (tmp_path / "with" / "surface_round_1.npz").exists()


def test_a_cohort_of_two_is_refused_before_the_first_round(config, tmp_path):
    with pytest.raises(ValueError, match=r"metrics=surface .* participation\.per_round=2"):
        run(config, tmp_path / "run", "metrics=surface", "participation.per_round=2")
    assert not (tmp_path / "run").exists()
