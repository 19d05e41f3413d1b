"""Before each call that changes a file, ``last.ckpt`` and its clients' states are whole: a kill
loses neither.
"""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from harness import PLAIN_SERVER, Cohorts, make_net, random_federation, sgd
from omegaconf import open_dict

from gcfed.aggregators.mean import MeanAggregator
from gcfed.checkpoints.reading import load_checkpoint
from gcfed.checkpoints.writing import RoundCheckpoint
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.state.store import ClientStores
from gcfed.folders.folder import CHECKPOINT
from gcfed.run import train

SETTING = (
    "algorithm=scaffold",
    "rounds=4",
    "participation.num_clients=6",
    "participation.per_round=3",
    "client.epochs=1",
    "data.limit_train=60",
    "data.limit_test=20",
    "model.hidden=[5]",
)


def is_whole(run):
    """Raises ValueError if ``last.ckpt`` is damaged, or if one of its clients' states is damaged or
    lost.
    """
    (versions,) = (
        c["stores"]
        for c in load_checkpoint(run / CHECKPOINT)["callbacks"].values()
        if "stores" in c
    )
    stores = ClientStores(run / "clients")
    stores.load_state_dict(versions)
    return len([stores.get(*key) for key in stores._versions]) > 0


def test_the_last_checkpoint_is_whole_whenever_files_change(config, tmp_path, monkeypatch):
    run = tmp_path / "run"
    seen = {"fsync": 0, "unlink": 0, "replace": 0}
    one_at_a_time = threading.RLock()  # the other thread must not replace a file while it is read

    def look_before(owner, name):
        call = getattr(owner, name)

        def looked(*args, **kwargs):
            with one_at_a_time:
                if (run / CHECKPOINT).exists():
                    seen[name] += 1
                    assert is_whole(run)
                return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, looked)

    cfg = config(*SETTING, folder=run)
    with open_dict(cfg):
        del cfg.logger.csv
    look_before(os, "fsync")
    for name in ("unlink", "replace"):
        look_before(Path, name)
    train(cfg)
    assert min(seen.values()) > 1
    assert is_whole(run)


def test_every_process_keeps_the_states_of_the_last_checkpoint(tmp_path):
    """This process writes no checkpoint itself."""
    stores = ClientStores(folder=tmp_path)
    loop = FederatedLoop(
        sampler=Cohorts(1),
        solver=sgd(),
        aggregator=MeanAggregator(),
        rounds=9,
        seed=1,
        stores=stores,
    )
    loop.bind([], random_federation(), FederatedModule(make_net(), PLAIN_SERVER))
    stores.names = {"c"}
    state = {"w": torch.ones(1, 3)}
    trainer = SimpleNamespace(
        callbacks=[loop],
        global_step=1,
        max_steps=9,
        should_stop=False,
        is_global_zero=False,
        save_checkpoint=lambda *_, **__: loop.state_dict(),
        strategy=SimpleNamespace(),
    )
    checkpoint = RoundCheckpoint(str(tmp_path))
    checkpoint.setup(trainer, None, "fit")
    stores.write("c", np.array([1]), state, 0)
    checkpoint.on_train_batch_end(trainer)
    stores.write("c", np.array([1]), state, 1)
    assert sorted(path.name for path in (tmp_path / "c" / "0").iterdir()) == ["1-0.bin", "1-1.bin"]
