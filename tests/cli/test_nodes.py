"""A run on several nodes (``torchrun`` agents) equals a run on one machine bit for bit.

All nodes end together.
"""

import gc
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
from contextlib import closing

import kill
import pytest
import torch
from conftest import composer, read_rows, run_script
from harness import final_weights
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gcfed.run import train
from gcfed.utils.machine import cores

SMALL = (
    "gc=gcfed",
    "participation.num_clients=8",
    "participation.per_round=4",
    "client.epochs=1",
    "data.limit_train=80",
    "data.limit_test=30",
    "model.hidden=[8]",
)
NODES = ("trainer=ddp", "trainer.accelerator=cpu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc"),
]


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


def start_agents(work, monkeypatch, folder=None):
    """Starts two agents.

    Each calls a function in a worker, as ``torchrun`` does, but without the imports.
    """
    monkeypatch.undo()  # conftest.py forbids Lightning's own launcher
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # otherwise each process uses all cores
    meeting = f"127.0.0.1:{free_port()}"

    composer(())  # the agents' workers have what it reads

    def agent(rank):
        gc.freeze()
        logging.disable()  # torch would import its compiler to print that a worker failed
        dynamic_rendezvous.get_method_name = lambda *_: ""  # inspects source files for each message
        launch = LaunchConfig(
            min_nodes=2,
            max_nodes=2,
            nproc_per_node=1,
            run_id="nodes",
            start_method="fork",
            monitor_interval=0.05,
            rdzv_backend="c10d",
            rdzv_endpoint=meeting,
            rdzv_configs={"is_host": rank == 1},
            max_restarts=0,
        )
        if folder is not None:
            with (folder / f"printed_{rank}").open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        elastic_launch(launch, work)()

    agents = [
        multiprocessing.get_context("fork").Process(target=agent, args=(rank,)) for rank in range(2)
    ]
    for process in agents:
        process.start()
    return agents


def on_two_nodes(work, monkeypatch):
    """Calls a function on two nodes; returns their exit codes."""

    def in_a_thread():  # as in gcfed.federated.parallel.strategy
        failed = []

        def attempt():
            try:
                work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    agents = start_agents(in_a_thread, monkeypatch)
    for agent in agents:
        agent.join(100)
    return [agent.exitcode for agent in agents]


def test_two_nodes_continue_a_run_bit_for_bit_and_need_a_common_folder_for_states(
    config, tmp_path, monkeypatch
):
    scaffold = (*SMALL, "algorithm=scaffold")
    whole = train(config(*scaffold, "rounds=4", folder=tmp_path / "whole"))
    train(config(*scaffold, "rounds=2", folder=tmp_path / "half"))
    results = tmp_path / "results"
    results.mkdir()

    def work():
        rank = os.environ["RANK"]
        half = train(
            config(*scaffold, *NODES, "rounds=4", "ckpt_path=last", folder=tmp_path / "half")
        )
        assert half.trainer.num_nodes == 2
        cfg = config(*scaffold, *NODES, "rounds=2", folder=tmp_path / "run")
        cfg.client_store.folder = str(tmp_path / f"disk{rank}")
        with pytest.raises(ValueError, match="not the same folder in all processes") as error:
            train(cfg)
        torch.save([final_weights(half), str(error.value)], results / rank)

    assert on_two_nodes(work, monkeypatch) == [0, 0]
    for rank in "01":
        half, message = torch.load(results / rank)
        assert torch.equal(half, final_weights(whole))
        assert f"client_store.folder={tmp_path}" in message
    assert [row["round"] for row in read_rows(tmp_path / "half" / "metrics.csv")] == [1, 2, 3, 4]


def test_a_killed_node_ends_the_other_and_one_machine_resumes_the_run(
    config, tmp_path, monkeypatch
):
    """The processes listen only on the interface that ``GLOO_SOCKET_IFNAME`` names."""
    logs = tmp_path / "logs"
    words = [*SMALL, "algorithm=scaffold"]
    typed = [
        *words,
        *NODES,
        "rounds=900",
        f"paths.log_dir={logs}",
        "+callbacks.listening._target_=harness.Listening",
        f"+callbacks.listening.folder={tmp_path}",
    ]

    def work():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        run_script("train.py", *typed)

    agents = start_agents(work, monkeypatch, tmp_path)
    try:
        end = time.monotonic() + 100
        while kill.rounds(logs) < 2 and agents[0].exitcode is None and time.monotonic() < end:
            time.sleep(0.02)
        agents[0].kill()
        agents[1].join(60)
    finally:
        for agent in agents:
            agent.kill()
    assert agents[1].exitcode not in (0, None)
    for rank in "01":
        assert set((tmp_path / f"listening_{rank}").read_text().split()) <= {"0100007F"}

    (folder,) = (path.parent for path in logs.glob("*/*/config.yaml"))
    done = len(read_rows(folder / "metrics.csv"))
    rounds = f"rounds={done + 2}"
    alone = train(config(*words, rounds, folder=tmp_path / "alone"))
    resumed = train(config(*words, rounds, "ckpt_path=last", folder=folder))
    assert torch.equal(final_weights(resumed), final_weights(alone))


@pytest.mark.parametrize(
    ("environment", "devices", "nodes"),
    [
        (
            {
                "TORCHELASTIC_RUN_ID": "a",
                "WORLD_SIZE": "6",
                "LOCAL_WORLD_SIZE": "3",
                "GROUP_WORLD_SIZE": "2",
            },
            3,
            2,
        ),
        (
            {
                "SLURM_STEP_ID": "0",
                "SLURM_NTASKS": "8",
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_JOB_ID": "1",
            },
            4,
            2,
        ),
        # without srun
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "1"}, None, 1),
        ({}, None, 1),
    ],
)
def test_ddp_uses_the_processes_and_nodes_of_a_launcher(
    config, monkeypatch, environment, devices, nodes
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    trainer = config("trainer=ddp").trainer
    assert trainer.num_nodes == nodes
    assert trainer.devices == (devices or cores())
