"""On a GPU: the numbers of the CPU, one stack for the whole cohort, no synchronisation inside local training."""

import pytest
import torch

from gcfed.run import train

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]
SMALL = ("rounds=3", "participation.num_clients=8", "data.limit_train=300", "data.limit_test=100", "model=cnn")


@pytest.mark.parametrize("stack", ["auto", 1])
def test_gpu_equals_cpu_in_float64(config, tmp_path, stack):
    args = (*SMALL, "precision=64-true", "data.transform.crop_padding=1", "data.transform.flip=true")
    gpu = train(config(*args, "trainer=gpu", f"client.stack={stack}", folder=tmp_path / "gpu"))
    cpu = train(config(*args, "trainer=cpu", folder=tmp_path / "cpu"))
    assert gpu.loop.solver.stack_size(gpu.module.net, torch.device("cuda"), 5) == (5 if stack == "auto" else 1)
    for a, b in zip(gpu.module.net.parameters(), cpu.module.net.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=1e-9)


def test_local_training_does_not_wait_for_the_device(config, tmp_path, monkeypatch):
    from gcfed.federated.solver import LocalSolver

    plain = LocalSolver.train

    def watched(*args, **kwargs):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return plain(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(LocalSolver, "train", watched)
    train(config(*SMALL, "trainer=gpu", "precision=bf16-mixed", folder=tmp_path / "run"))
