"""A client whose weights become infinite: nothing of it stays with the server or with the client."""

import pytest
import torch
from conftest import read_rows
from harness import Spy, final_weights
from omegaconf import open_dict

from gcfed.federated.faults import Faults
from gcfed.federated.method import Order
from gcfed.run import train


class Diverges(Spy):
    """A client whose weights become infinite in the second round."""

    order = Order.MEASURES

    def on_clients_start(self, stack, download):
        if download.round == 1:
            next(iter(stack.full.values()))[stack.clients == 2] = torch.inf


KEEPS = ("scaffold", "feddyn", "feddc", "fedvarp", "fedsub", "moon", "fedcurv", "fedcm", "fedgc", "fedacg")


@pytest.mark.parametrize("algorithm", KEEPS)
def test_who_diverges_is_as_one_who_drops_out(config, tmp_path, monkeypatch, algorithm):
    """Nothing of it stays with the server or with the client, whose next round is as it would have been."""
    cfg = [
        config(
            "precision=64-true", "rounds=4", "participation.num_clients=4", "participation.per_round=4",
            "model.hidden=[7,6]", "client.epochs=1", "data.limit_train=60", "data.limit_test=20", "partition=iid",
            f"algorithm={algorithm}", folder=tmp_path / name,
        )
        for name in ("diverged", "dropped")
    ]  # fmt: skip
    with open_dict(cfg[0]):
        cfg[0].callbacks.diverges = {"_target_": f"{__name__}.Diverges"}
    diverged = train(cfg[0])
    monkeypatch.setattr(Faults, "survivors", lambda self, drawn, steps, t, seed: drawn[(t != 1) | (drawn != 2)])
    dropped = train(cfg[1])
    torch.testing.assert_close(final_weights(diverged), final_weights(dropped), rtol=0, atol=1e-12)
    rows = [read_rows(tmp_path / name / "metrics.csv") for name in ("diverged", "dropped")]
    assert [row["train/nonfinite_clients"] for row in rows[0]] == [0, 1, 0, 0]
    assert [row["train/loss"] for row in rows[0]] == pytest.approx([row["train/loss"] for row in rows[1]], abs=1e-12)
