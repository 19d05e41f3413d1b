"""Every algorithm trains adapters of a transformer with odd tensors: in stacks, alone, and over a
wire.
"""

from functools import cache

import numpy as np
import pytest
import torch
from conftest import composer, needs
from harness import ALGORITHMS, FEW_INNER_STEPS, BesideSimulation, bytes_per_client
from omegaconf import OmegaConf
from torch import nn
from torch.utils._pytree import tree_map

from gcfed.assemble import build_module
from gcfed.federated.network.probing.probe import probe
from gcfed.models.transformers import ViT
from gcfed.run import train
from gcfed.utils.resolvers import ROOT

pytestmark = needs("peft")
TRANSFORMER = (
    "model=vit_tiny",
    "model._target_=test_contract_adapters.OddViT",
    "model.width=8",
    "model.depth=1",
    "model.heads=2",
    "model.mlp=1",
    "model.lora.rank=2",
    "model.lora.target=[qkv,fc1]",
    "model.lora.modules_to_save=[norm1,fc]",
    "rounds=2",
    "participation.num_clients=4",
    "participation.per_round=3",
    "client.epochs=1",
    "client.batch_size=4",
    "client.steps=2",
    "data.limit_train=60",
    "data.limit_test=40",
    "eval_every=3",
    "precision=64-true",
    "client.stack=2",
)
BITS = ("quantization=fedpaq", "quantization.bits=3")
EXACT = {  # they refuse quantization, or compress uploads themselves
    "fedadamw",
    "fedcurv",
    "feddc",
    "fedgamma",
    "fedlesam_s",
    "fedmuon",
    "fedpaq",
    "fedsmoo",
    "fedwmsam",
    "scaffold",
    "topk",
}


class OddLinear(nn.Linear):
    """Also has a number in float32, a vector of length 0, and a count of its training steps."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.shift = nn.Parameter(torch.zeros((), dtype=torch.float32))
        self.empty = nn.Parameter(torch.zeros(0))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, h):
        if self.training:
            self.steps += 1
        return (super().forward(h) * (1 + self.shift) + self.empty.sum()).to(h.dtype)


class OddViT(ViT):
    def __init__(self, input_shape, num_classes, **settings):
        super().__init__(input_shape=input_shape, num_classes=num_classes, **settings)
        self.fc = OddLinear(self.fc.in_features, self.fc.out_features)


class AloneAndAsBytes(BesideSimulation):
    """Compares stacks of clients in memory with the same clients, which train alone and get
    messages as bytes.
    """

    def __init__(self, stacks, cfg):
        super().__init__(stacks, OmegaConf.merge(cfg, {"client": {"stack": 1}}))

    def fit(self, download, clients, receive, expected):
        uploads = []
        super().fit(download, clients, uploads.append, expected)
        alone = {int(upload.clients[0]): upload for upload in uploads}

        def compare(upload):
            assert len(upload.clients) <= 2
            if expected.sent_bytes.keys() == expected.bits.keys():  # top-k has a test of its own
                assert bytes_per_client(upload) == expected.nbytes
            tree_map(
                equal,
                *(
                    vars(u) | {"notes": {}}
                    for u in (upload, *map(alone.pop, upload.clients.tolist()))
                ),
            )
            receive(upload)

        outcome = self.simulation.fit(download, clients, compare, expected)
        assert not alone
        return outcome


def equal(stacked, *alone):
    if isinstance(stacked, torch.Tensor | np.ndarray):
        rows = torch.cat([torch.as_tensor(row) for row in alone])
        torch.testing.assert_close(
            torch.as_tensor(stacked), rows, rtol=0, atol=1e-9, equal_nan=True
        )
    else:
        assert {stacked} == {*alone}


@cache
def untrained():
    return build_module(composer(TRANSFORMER)).net


traits = {}  # of the network, by client.stack


def probed_once(net, x, y, task, stack, others):
    """All algorithms train the same network."""
    if stack not in traits:
        traits[stack] = probe(net, x, y, task, stack, others)
    return traits[stack]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_adapters_of_a_transformer_give_the_same_uploads_in_every_setting(
    config, tmp_path, monkeypatch, algorithm
):
    """Nothing but adapters and ``modules_to_save`` changes."""
    monkeypatch.setattr("gcfed.federated.network.probing.probe.probe", probed_once)
    words = [*TRANSFORMER, *BITS * (algorithm not in EXACT), *FEW_INNER_STEPS.get(algorithm, [])]
    cfg = config(f"algorithm={algorithm}", "gc=gcfed", *words, folder=tmp_path)
    cfg.callbacks = {}
    cfg.logger = {}
    wire = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/federation/wire.yaml"))
    cfg.federation = wire | {"_target_": f"{__name__}.AloneAndAsBytes"}
    pairs = zip(untrained().named_parameters(), train(cfg).model.parameters(), strict=True)
    moved = {name for (name, before), after in pairs if not torch.equal(before, after)}
    assert any("modules_to_save" in name for name in moved)
    # whose clients keep the body
    assert any("lora_B" in name for name in moved) or algorithm == "lgfedavg"
    assert moved <= {name for name, p in untrained().named_parameters() if p.requires_grad}
