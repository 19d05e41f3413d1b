"""The forked processes of a CPU run compute the same numbers as one process, and end together."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TWO, refuses
from harness import final_weights
from lightning.pytorch import Callback
from omegaconf import OmegaConf

from gcfed.assemble import build_methods, models_in_memory
from gcfed.federated.parallel import strategy as layout
from gcfed.federated.parallel.strategy import CohortStrategy, ForkLauncher, can_fork
from gcfed.models.vgg import VGG11
from gcfed.run import train

TINY = (
    "rounds=2",
    "data.limit_train=200",
    "data.limit_test=80",
    "precision=64-true",
    "client.epochs=1",
)
linux = pytest.mark.skipif(
    not can_fork(), reason="forks under Linux only, and where torch sees no GPU"
)


@linux
def test_forked_processes_equal_one_process_and_leave_nothing_behind(config, tmp_path):
    """This also holds after an earlier run in the same process, as in a sweep.

    A fork loses that run's threads.
    """
    before = dict(os.environ)
    alone = train(config(*TINY, folder=tmp_path / "one"))
    listening = "+callbacks.listening._target_=harness.Listening"
    words = (*TINY, *TWO, listening, f"+callbacks.listening.folder={tmp_path}")
    together = train(config(*words, folder=tmp_path / "two"))
    assert together.trainer.world_size == 2
    torch.testing.assert_close(final_weights(together), final_weights(alone), rtol=1e-9, atol=1e-12)
    assert together.metrics["test/acc"] == alone.metrics["test/acc"]
    assert together.metrics["comm/up_bytes"] == alone.metrics["comm/up_bytes"]
    assert dict(os.environ) == before
    assert not dist.is_initialized()
    assert torch.get_num_threads() == 1
    assert not multiprocessing.active_children()
    for rank in range(2):  # only this machine can connect
        listening = (tmp_path / f"listening_{rank}").read_text().split()
        assert set(listening) <= {"0100007F", "00000000000000000000000001000000"}
        assert listening


class Trouble(Callback):
    """Kills one process, or raises an error in it, in the second round."""

    def __init__(self, rank: int, what: str) -> None:
        self.rank = rank
        self.what = what

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == self.rank and trainer.global_step == 1:
            if self.what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("an error in one process")


@linux
@pytest.mark.parametrize(
    ("rank", "what", "error", "match"),
    [
        (1, "killed", ChildProcessError, r"process 1 of this run died of signal 9"),
        (0, "raises", ValueError, r"an error in one process"),
    ],
)
def test_a_failure_of_one_process_ends_all(config, tmp_path, rank, what, error, match):
    trouble = ["+callbacks.trouble._target_=test_launch.Trouble"]
    trouble += [f"+callbacks.trouble.rank={rank}", f"+callbacks.trouble.what={what}"]
    with pytest.raises(error, match=match):
        train(config(*TINY, *TWO, *trouble, folder=tmp_path / "run"))
    assert not dist.is_initialized()
    assert not multiprocessing.active_children()  # no process is left


@linux
def test_a_fork_of_a_process_with_openmp_threads_creates_its_own_threads(monkeypatch, tmp_path):
    """The parent's pool of threads does not exist after the fork.

    A process that uses it would wait forever.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    a = torch.randn(700, 700)
    torch.set_num_threads(2)
    expected = a @ a  # creates the pool

    def work():
        same = torch.allclose(a @ a, expected, rtol=1e-3, atol=1e-2)
        (tmp_path / os.environ["LOCAL_RANK"]).write_text(
            f"{same} with {torch.get_num_threads()} threads"
        )

    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the fork hangs"))
    signal.alarm(60)
    try:
        ForkLauncher(2).launch(work)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["True with 2 threads"] * 2


@linux
def test_killing_the_first_process_ends_all(tmp_path):
    def work():
        if os.environ["LOCAL_RANK"] == "0":
            while not (tmp_path / "pid").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        (tmp_path / "new").write_text(str(os.getpid()))
        (tmp_path / "new").rename(tmp_path / "pid")
        time.sleep(60)

    process = multiprocessing.get_context("fork").Process(
        target=lambda: ForkLauncher(2).launch(work)
    )
    process.start()
    process.join()
    second = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    end = time.monotonic() + 5
    while second.exists() and second.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < end, "the second process still runs"


def spread(
    monkeypatch,
    devices="auto",
    *,
    cores=4,
    per_round=5,
    memory=64e9,
    accelerator="cpu",
    tested=100,
    models=10,
    net=None,
    **found,
):
    for key in ("LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_STEP_ID"):
        monkeypatch.delenv(key, raising=False)
    for key, value in found.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(layout, "cores", lambda: cores)
    monkeypatch.setattr(layout, "available_memory", lambda: memory)
    trainer = OmegaConf.create({"devices": devices, "accelerator": accelerator})
    net = net or torch.nn.Linear(1000, 1000)  # of 4 MB
    return layout.spread(trainer, per_round, net, tested, models)


@linux
@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ({}, 4),
        ({"per_round": 3}, 3),
        ({"cores": 1}, 1),
        ({"tested": 3}, 3),
        ({"accelerator": "gpu"}, 1),
        ({"memory": 170e6}, 2),  # half of it is enough for two processes with 10 models each
        ({"memory": 170e6, "models": 18}, 1),
        ({"devices": 9}, 5),
        ({"devices": 2}, 2),
        ({"devices": 1}, 1),
        ({"devices": -1}, 4),
        ({"devices": "-1"}, 4),
        ({"LOCAL_RANK": "0"}, 1),
        ({"SLURM_NTASKS": "2"}, 1),  # a batch script
    ],
)
def test_the_number_of_processes_of_a_round(monkeypatch, settings, processes):
    found = spread(monkeypatch, **settings)
    assert found.pop("devices") == processes
    assert [type(strategy) for strategy in found.values()] == [CohortStrategy] * (processes > 1)


@linux
@pytest.mark.parametrize(
    ("overrides", "models"),
    [((), 10), (("algorithm=feddyn",), 13), (("algorithm=scaffold",), 18)],
)
def test_two_processes_of_vgg11_fit_into_24_gigabytes(config, monkeypatch, overrides, models):
    """Half of 22 GB that are free are enough for two processes without states."""
    with torch.device("meta"):
        net = VGG11(input_shape=(3, 64, 64), num_classes=200)
    assert sum(parameter.numel() for parameter in net.parameters()) > 129e6
    cfg = config(*overrides)
    found = models_in_memory(build_methods(cfg))
    assert found == models
    found = spread(monkeypatch, cores=2, memory=22e9, models=found, net=net)
    assert found["devices"] == (2 if models == 10 else 1)


def test_gpus_that_the_user_names_are_used(monkeypatch):
    assert spread(monkeypatch, [3], accelerator="gpu") == {}
    assert [*spread(monkeypatch, 2, accelerator="gpu")] == ["strategy"]


@pytest.mark.parametrize("devices", [[0], [0, 1], "0,1"])
def test_gpus_are_refused_where_the_run_trains_on_the_cpu(monkeypatch, devices):
    with refuses(r"^trainer\.devices=.* names GPUs, and this run trains on the CPU: set the num"):
        spread(monkeypatch, devices)


@linux
@pytest.mark.parametrize(
    "found",
    [
        {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1"},
    ],
)
def test_several_processes_of_a_job_need_trainer_ddp(monkeypatch, found):
    with pytest.raises(ValueError, match="trainer=ddp"):
        spread(monkeypatch, **found)


@linux
def test_a_signal_to_end_ends_all_processes_at_once():
    launcher = ForkLauncher(3)

    def work():
        if os.environ["LOCAL_RANK"] == "0":
            launcher.kill(signal.SIGTERM)  # as Lightning's handler does
        # schedulers signal every process; only the first must react
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    started = time.time()
    with pytest.raises(SystemExit) as ended:
        launcher.launch(work)
    assert ended.value.code == 128 + signal.SIGTERM  # as shells report it
    assert time.time() - started < 30
    assert not launcher.children
    assert "LOCAL_RANK" not in os.environ


@linux
def test_the_error_of_several_failures_names_the_cause():
    """The killed process is the cause. The others fail because it is gone."""
    reader, writer = os.pipe()

    def work():
        rank = os.environ["LOCAL_RANK"]
        if rank == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(writer)
        os.read(reader, 1)  # returns when the last process that can write is gone
        raise RuntimeError("another process is gone")

    with pytest.raises(ChildProcessError, match="process 2 of this run died of signal 9"):
        ForkLauncher(4).launch(work)
    os.close(reader)


@linux
def test_an_error_of_all_processes_keeps_the_line_that_names_its_code():
    """Also if the other process fails first."""
    reader, writer = os.pipe()

    def work():
        if os.environ["LOCAL_RANK"] == "0":
            os.close(writer)
            os.read(reader, 1)  # returns when the other process is gone
        error = RuntimeError("wrong")
        error.add_note("model: Net fails in round 2.")
        raise error

    with pytest.raises(ChildProcessError, match="process 1 of this run failed") as caught:
        ForkLauncher(2).launch(work)
    os.close(reader)
    assert caught.value.__notes__ == ["model: Net fails in round 2."]
