"""Federations with NVFlare itself: processes, certificates and sockets (``make test-federation``).

Most tests share one federation of five sites. test_sites.py tests the code that does not depend on
NVFlare.
"""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import read_rows
from harness import final_weights, listening
from kill import finish, rounds, start
from omegaconf import OmegaConf
from safetensors.torch import load_file

pytest.importorskip("nvflare")

from nvflare.collab.api.app import ClientApp
from nvflare.collab.runtime.dispatch import make_participant_map

from gcfed.participation.schedule import Schedule
from gcfed.run import train
from gcfed_sites import line
from gcfed_sites.flare import SiteEnd
from gcfed_sites.line import FlareLine

SMALL = (
    "participation.num_clients=5",
    "participation.per_round=5",
    "rounds=5",
    "client.epochs=1",
    "data.limit_train=400",
    "data.limit_test=100",
    "gc=gcfed",
    "federation=nvflare",
)
SITES = [f"site-{i}" for i in range(1, 6)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """The processes of five sites and their server. All runs of this module share them."""
    folder = tmp_path_factory.mktemp("federation")
    line.local_line(folder, 5, str(folder))
    (federation,) = line._federations.values()
    yield federation
    for process in federation.processes.values():
        process.kill()
        process.wait()
    line._federations.clear()


@pytest.fixture
def run(config, federation, tmp_path):
    def run(*words, folder="run"):
        return train(config(*SMALL, *words, folder=tmp_path / folder))

    return run


class Connected(str):
    """A site as NVFlare's server represents it."""

    name = property(str)
    get_fqcn = str.__str__


def test_only_its_server_can_call_a_site():
    """NVFlare lets every participant of a job call a site, and names the caller."""
    app = ClientApp(SiteEnd())
    (server, site) = make_participant_map("server.job", "job", [Connected("site-2")]).values()
    app.name = "site-1"
    with (
        app.new_context(site, app.name),
        pytest.raises(PermissionError, match="site-2 is a site, and only the server"),
    ):
        SiteEnd().answer(0, "fit", "{}", b"")
    assert server == "server"


def descendants(pid):
    """A process and all its descendants."""
    table = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = {int(child): int(parent) for child, parent in map(str.split, table.splitlines())}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def alive(processes):
    """The command lines of those that have not ended; a zombie has none."""
    commands = {}
    for pid in processes:
        with suppress(FileNotFoundError, ProcessLookupError):
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return {pid: command for pid, command in commands.items() if command}


def job_of(federation, site):
    """The process in which a site trains."""
    (job,) = [
        pid
        for pid in descendants(federation.processes[site].pid)[1:]
        if b"worker_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return job


@pytest.mark.parametrize("algorithm", ["scaffold", "fedvarp", "fedgc", "fedpaq"])
def test_real_sites_equal_the_simulation_bit_for_bit(run, config, tmp_path, algorithm):
    words = (f"algorithm={algorithm}", "gc=gcfed")
    result = run(*words)
    simulated = train(config(*SMALL, *words, "federation=none", folder=tmp_path / "simulated"))
    assert torch.equal(final_weights(simulated), final_weights(result))
    assert [row["train/dropped_clients"] for row in read_rows(tmp_path / "run/metrics.csv")] == [
        0
    ] * 5


def test_processes_listen_only_on_the_loopback_interface(federation):
    processes = [federation.processes[name].pid for name in ("localhost", *SITES)]
    running = [os.getpid(), *(pid for process in processes for pid in descendants(process))]
    places = {
        place for pid in running if Path(f"/proc/{pid}/fd").exists() for place in listening(pid)
    }
    assert len(places) > 5, "the server and the sites listen somewhere"
    loopback = {"0100007F", "0" * 24 + "01000000"}
    assert {place.split(":")[0] for place in places} <= loopback


def handshake(kit, ca, port):
    """Connects with this kit's certificate, verifies the server with the authority ``ca``, returns
    the first byte.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED if ca else ssl.CERT_NONE
    if ca:
        context.load_verify_locations(ca / "startup/rootCA.pem")
    context.load_cert_chain(kit / "startup/client.crt", kit / "startup/client.key")
    plain = socket.create_connection(("127.0.0.1", port), timeout=10.0)
    with context.wrap_socket(plain, suppress_ragged_eofs=False) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return line.recv(1)


def test_a_foreign_certificate_is_refused_on_both_sides(federation, tmp_path):
    own = federation.kits / "site-1"
    (server,) = json.loads((own / "startup/fed_client.json").read_text())["servers"]
    port = int(server["service"]["target"].split(":")[1])
    foreign = line.provision(tmp_path / "foreign", ["site-1"]) / "site-1"
    assert handshake(own, own, port) == b"H"  # an HTTP answer
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(foreign, foreign, port)  # a foreign site does not trust this server
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        handshake(foreign, None, port)  # the server does not trust a foreign site


def settle(federation, folder, own):
    """Writes the ``gcfed.yaml`` of the first two sites for a run with a kit."""
    for site in ("site-1", "site-2"):
        states = {"states": str(folder / site)}
        (federation.kits / site / "local/gcfed.yaml").write_text(
            OmegaConf.to_yaml(OmegaConf.create(own | states))
        )


def test_a_run_reaches_a_provisioned_federation_with_its_kit(config, federation, run, tmp_path):
    """Its sites compose their own config."""
    kit = federation.kits / line.ADMIN
    words = ("algorithm=scaffold",)
    reference = run(*words, folder="local")
    prod = (f"federation.kit={kit}", "federation.sites=[site-1,site-2]")
    own = {"overrides": [*SMALL, *words, "client.optimizer.lr=3"]}
    settle(federation, tmp_path, own)
    result = train(config(*SMALL, *words, *prod, folder=tmp_path / "prod"))
    line.line_of(kit, ("site-1", "site-2")).close()
    assert torch.equal(final_weights(reference), final_weights(result))
    assert result.metrics["test/acc"] == pytest.approx(reference.metrics["test/acc"], abs=1e-6)


def test_a_missing_site_is_named(federation):
    with pytest.raises(
        ConnectionError, match=r"federation.sites=\['site-9'\]: connected are site-1, site-2"
    ):
        FlareLine(federation.kits / line.ADMIN, ["site-9"])


def without_client(config, monkeypatch, tmp_path, client, *lost, rounds=5):
    """The weights of a simulation of SCAFFOLD in which a client drops out of these rounds."""
    monkeypatch.setattr(
        Schedule,
        "ask",
        lambda self, clients, t: ((clients != client) | (t not in lost), np.zeros(len(clients))),
    )
    words = (*SMALL, "algorithm=scaffold", "federation=none", f"rounds={rounds}")
    return final_weights(train(config(*words, folder=tmp_path / "simulated")))


def test_a_killed_site_drops_out_and_returns_when_the_run_resumes(
    run, config, federation, tmp_path, monkeypatch
):
    """The kill comes while the site trains in the third of three rounds.

    The round continues without it.
    """
    words = ("algorithm=scaffold", "federation.least=3")
    send = FlareLine.send
    victim = job_of(federation, "site-3")

    def kill(self, site, number, verb, about, message):
        send(self, site, number, verb, about, message)
        with suppress(ProcessLookupError):
            # site-3, asked before, trains now
            if (site, verb, about["round"]) == ("site-5", "fit", 2):
                os.kill(victim, signal.SIGKILL)

    monkeypatch.setattr(FlareLine, "send", kill)
    run(*words, "rounds=3")
    result = run(*words, "ckpt_path=last")
    assert [row["train/dropped_clients"] for row in read_rows(tmp_path / "run/metrics.csv")] == [
        0,
        0,
        1,
        0,
        0,
    ]
    assert torch.equal(without_client(config, monkeypatch, tmp_path, 2, 2), final_weights(result))
    assert job_of(federation, "site-3") != victim


def jobs(federation):
    """The processes of all jobs at the server and the sites."""
    found = {
        pid for process in federation.processes.values() for pid in descendants(process.pid)[1:]
    }
    return found - {process.pid for process in federation.processes.values()}


def test_a_site_that_hangs_costs_one_deadline_and_its_job_ends_with_the_run(
    federation, monkeypatch, tmp_path
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    before = jobs(federation)
    folder = tmp_path / "run"
    stuck = "+methods.stuck._target_=stuck.Stuck"
    settle(federation, tmp_path, {"overrides": [*SMALL, stuck]})
    words = (f"federation.kit={federation.kits / line.ADMIN}", "federation.least=3")
    words += ("federation.sites=[site-1,site-2]", "federation.deadline=8", stuck)
    process = start(*SMALL, *words, "extras.figures=false", f"hydra.run.dir={folder}")
    printed = finish(process)
    assert process.returncode == 0, printed[-3000:]
    rows = read_rows(folder / "metrics.csv")
    assert [row["train/dropped_clients"] for row in rows] == [0, 2, 2, 2, 2]
    assert [row["time/round_s"] > 8 for row in rows] == [False, True, False, False, False]
    until = time.monotonic() + 30.0
    while time.monotonic() < until and jobs(federation) - before:
        time.sleep(0.5)
    assert not jobs(federation) - before


JOB = """
import time
from gcfed_sites.flare import end_soon_after_parent
end_soon_after_parent()
print("watching", flush=True)
time.sleep(600)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_process_of_a_job_ends_although_it_never_returns():
    """NVFlare asks a job to stop. One that waits for others did not hear it for half a minute."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, JOB], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "watching\n"
    (job,) = descendants(parent.pid)[1:]
    parent.kill()
    parent.wait()
    until = time.monotonic() + 30.0
    while time.monotonic() < until and alive([job]):
        time.sleep(0.1)
    assert not alive([job])


def test_a_killed_server_resumes_bit_for_bit_and_leaves_no_process(config, tmp_path):
    words = [*SMALL, "algorithm=feddyn", "rounds=12"]
    begun = [
        *words,
        "federation.sites=2",
        "extras.figures=false",
        f"hydra.run.dir={tmp_path}/logs/one/run",
    ]
    process = start(*begun)
    while process.poll() is None and rounds(tmp_path / "logs") < 4:
        time.sleep(0.01)
    assert process.poll() is None, f"it ended by itself: {finish(process)[-3000:]}"
    below = descendants(process.pid)[1:]
    process.kill()
    finish(process)
    assert len(below) >= 6  # a server, two sites, and a process of the job at each
    until = time.monotonic() + 30.0
    while time.monotonic() < until and alive(below):
        time.sleep(0.5)
    assert not alive(below)
    again = start(*begun, "ckpt_path=last")
    printed = finish(again)
    assert again.returncode == 0, printed[-3000:]
    rows = read_rows(tmp_path / "logs/one/run/metrics.csv")
    assert [row["round"] for row in rows] == list(range(1, 13))
    simulated = train(config(*words, "federation=none", folder=tmp_path / "simulated"))
    state = load_file(tmp_path / "logs/one/run/global_model.safetensors")
    assert all(torch.equal(t, state[name]) for name, t in simulated.module.net.state_dict().items())
