"""A GPU computes the numbers of the CPU, and local training does not wait for the device."""

from functools import partial

import numpy as np
import pytest
import torch
from harness import ALGORITHMS, ArrayData, assert_near, final_weights, make_download

from gcfed.federated.network.lent_network import travelling_state
from gcfed.federated.network.stack import ClientStack, StackStart
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.hooks import StepHooks
from gcfed.federated.training.local_training import LocalTraining
from gcfed.federated.training.solver import LocalSolver
from gcfed.models.lstm import CharLSTM
from gcfed.run import train

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]
SMALL = (
    "rounds=3",
    "participation.num_clients=8",
    "data.limit_train=300",
    "data.limit_test=100",
    "model=cnn",
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("layout", "padded"),
    [
        (("model=cnn", "client.stack=auto", "client.last_batch=wrap"), False),
        (("model.hidden=[12,8]", "client.stack=2"), True),
    ],
)
def test_graphs_compute_the_same_as_launched_steps_and_the_cpu(
    config, tmp_path, monkeypatch, algorithm, layout, padded
):
    """The bits are equal if no batch is padded.

    In four rounds, each stream replays recordings of earlier rounds.
    """
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    tiny = (
        f"algorithm={algorithm}",
        "rounds=4",
        "participation.num_clients=7",
        "participation.per_round=5",
        "client.epochs=3",
        "client.batch_size=8",
        "data.limit_train=100",
        "data.limit_test=20",
        "precision=64-true",
        "data.transform.crop_padding=1",
    )
    kinds = {
        "graphs": ("trainer=gpu",),
        "launched": ("trainer=gpu", "client.graphs=false"),
        "cpu": ("trainer=cpu",),
    }
    runs = {
        name: train(config(*tiny, *layout, *more, folder=tmp_path / name))
        for name, more in kinds.items()
    }
    assert runs["graphs"].loop.run.simulation.layout.k == (2 if "client.stack=2" in layout else 1)
    graphs, launched, cpu = (final_weights(run).cpu() for run in runs.values())
    assert_near(graphs, launched, 1e-9 if padded else 0)
    if algorithm != "fedpaq":  # it draws random numbers on the device
        assert_near(graphs, cpu, 1e-6)


def test_a_recurrent_network_trains_on_a_gpu_as_on_the_cpu():
    """cuDNN moves a recurrent layer's weights to its own memory in the first forward pass."""
    torch.manual_seed(0)
    net = CharLSTM(input_shape=(5,), num_classes=7, hidden=6).double()
    x, y = torch.randint(0, 7, (2, 9, 5))
    ends = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        net.to(device)
        data = ArrayData(x.to(device), y.to(device), [np.arange(9)])
        solver = LocalSolver(partial(torch.optim.SGD, lr=0.5), epochs=2, batch_size=4)
        download = make_download(travelling_state(net), lr=0.5, cohort=[0])
        plan = solver.plan(data, download.cohort, download, device)
        stack = ClientStack(
            net, StackStart(download.broadcast_model, download.cohort, np.array([9]), plan.steps)
        )
        training = LocalTraining(stack, plan, solver.optimizer(stack.leaves.values()))
        solver.train(training, data, download.lr, StepHooks())
        ends.append({name: t.cpu() for name, t in stack.delta().items()})
    for name, delta in ends[0].items():
        assert delta.abs().sum() > 0
        assert_near(ends[1][name], delta, 1e-9)


def test_states_of_clients_stay_on_the_gpu_during_a_run(config, tmp_path, monkeypatch):
    args = (*SMALL, "algorithm=scaffold", "precision=64-true")
    cpu = train(config(*args, "trainer=cpu", folder=tmp_path / "cpu"))
    train(config(*args, "trainer=gpu", "rounds=2", folder=tmp_path / "gpu"))
    held = []
    release = ClientStores.release
    monkeypatch.setattr(
        ClientStores,
        "release",
        lambda stores: (held.extend(stores._gpu_states._vectors.values()), release(stores)),
    )
    gpu = train(config(*args, "trainer=gpu", "ckpt_path=last", folder=tmp_path / "gpu"))
    assert held
    assert all(vector.is_cuda for vector in held)
    assert not gpu.loop.run.setup.stores._gpu_states._vectors
    for a, b in zip(gpu.module.net.parameters(), cpu.module.net.parameters(), strict=True):
        assert_near(a.cpu(), b.cpu(), 1e-9)


def test_local_training_does_not_wait_for_the_device(config, tmp_path, monkeypatch):
    plain = LocalSolver.train

    def watched(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return plain(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(LocalSolver, "train", watched)
    train(config(*SMALL, "trainer=gpu", "precision=bf16-mixed", folder=tmp_path / "run"))
