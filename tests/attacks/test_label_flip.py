"""Flipped labels are those of one run."""

import numpy as np
import torch

from gcfed.assemble import assemble, build_trainer
from gcfed.attacks.byzantine import hostile

SMALL = (
    "model.hidden=[5]",
    "client.epochs=1",
    "data.limit_train=100",
    "data.limit_test=40",
    "participation.num_clients=5",
    "participation.per_round=4",
    "rounds=2",
)


def fit(cfg, data):
    """Trains as configured on a data module that may have served other runs. Returns the model."""
    run = assemble(cfg)
    run.loop.bind(run.callbacks, data, run.module)
    trainer = build_trainer(cfg, run, run.callbacks)
    trainer.fit(run.module, datamodule=data)
    return torch.cat([t.flatten() for t in run.module.net.state_dict().values()])


def test_a_data_module_that_served_an_attack_has_its_own_labels_in_the_next_run(config, tmp_path):
    honest = config(*SMALL, folder=tmp_path / "honest")
    flipped = config(*SMALL, "attack=label_flip", "attack.clients=0.4", folder=tmp_path / "flipped")
    data = assemble(honest).data
    before = data.labels.copy()
    honest_model = fit(honest, data)
    flipped_model = fit(flipped, data)
    owner = data.partition.owners(len(before))
    is_flipped = np.isin(owner, hostile(0.4, 5, 1))
    assert is_flipped.any()
    assert np.array_equal(data.labels, np.where(is_flipped, 9 - before, before))
    assert not torch.equal(flipped_model, honest_model)
    assert torch.equal(fit(honest, data), honest_model)
    assert torch.equal(fit(flipped, data), flipped_model)
