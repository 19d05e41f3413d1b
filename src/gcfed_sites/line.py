"""The line from a run to its sites: the NVFlare job that the run submits, and a socket to the job's
server.

If all sites are on this machine, this module also provisions and starts them, on the loopback
interface only.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, redirect_stdout, suppress
from io import StringIO
from multiprocessing.connection import Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nvflare.lighter
from nvflare.collab.runtime.controller import CollabController
from nvflare.collab.runtime.executor import CollabExecutor
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session
from nvflare.job_config.api import FedJob
from nvflare.lighter.provision import prepare_builders, prepare_packager, prepare_project
from nvflare.lighter.provisioner import Provisioner
from omegaconf import OmegaConf

from gcfed.federated.parallel.strategy import end_with_parent
from gcfed.folders.folder import CONFIG
from gcfed_sites.answers import RESUME, About, Answer
from gcfed_sites.flare import Relay, SiteEnd

logging.getLogger("nvflare").setLevel(logging.WARNING)
# Names in a federation on this machine.
SERVER = "localhost"
ADMIN = "admin@local.net"
START = 120.0  # seconds for its processes to find each other, and for NVFlare to start a job
ENDING = 20.0  # seconds for a job to end
#: The classes that a job may build in addition to NVFlare's.
ALLOWED = [
    f"{kind.__module__}.{kind.__name__}"
    for kind in (Relay, SiteEnd, CollabController, CollabExecutor)
]


def session_of(kit: Path) -> closing[Session]:
    """A session with NVFlare's server.

    It must be closed, because an open one keeps a process from ending.
    """
    try:
        user = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]["username"]
        with redirect_stdout(StringIO()):
            return closing(new_secure_session(user, str(kit), timeout=30.0))
    except Exception as error:
        raise ConnectionError(f"federation.kit={kit} reaches no NVFlare server: {error}") from error


def connected(kit: Path) -> list[str]:
    """The sites that are connected to NVFlare's server."""
    with session_of(kit) as session:
        names = [client.name for client in session.get_connected_client_list()]
        return sorted(names, key=lambda name: (len(name), name))


class FlareLine:
    """Submits a job, which runs as long as the line exists.

    Then passes questions to sites, and their answers back.

    Args:
        kit: the startup kit of an admin.
        sites: names, or the number of all connected sites.

    Attributes:
        sites: their names; the order does not change.
        lost: whether a site, or all of them, can no longer be reached.

    Raises ConnectionError, with the reason, if there is no NVFlare server, or it does not start the
    job.
    """

    def __init__(self, kit: Path, sites: int | Sequence[str]) -> None:
        self.kit = kit
        self.lost = False
        there = connected(kit)
        self.sites = there if isinstance(sites, int) else list(sites)
        is_other_number = isinstance(sites, int) and sites != len(there)
        if is_other_number or not set(self.sites) <= set(there):
            raise ConnectionError(
                f"federation.sites={sites}: connected are {', '.join(there) or 'none'}."
            )
        key = secrets.token_bytes(32)
        with TemporaryDirectory(prefix="gcfed_") as folder:  # which only this user can open
            address = f"{folder}/run"
            job = write_job(folder, self.sites, address, key.hex())
            with (
                Listener(address, "AF_UNIX", authkey=key) as listener,
                session_of(self.kit) as session,
            ):
                self._job = session.submit_job(job)
                listener._listener._socket.settimeout(START)  # type: ignore[attr-defined]
                try:
                    self.pipe = listener.accept()
                except TimeoutError:
                    status = session.get_job_status(self._job)
                    session.abort_job(self._job)
                    raise ConnectionError(
                        f"NVFlare has not started the job in {START:g} s: {status}."
                    ) from None
        missing = sorted(set(self.sites) - set(self.pipe.recv()))
        if missing:
            raise ConnectionError(
                f"NVFlare could not start the job at {', '.join(missing)}: see their logs."
            )

    def send(self, site: str, number: int, verb: str, about: About, message: bytes) -> None:
        with suppress(BrokenPipeError):  # ``receive`` reports it
            self.pipe.send((site, number, verb, json.dumps(about), message))

    def receive(self, seconds: float) -> Answer | None:
        """The next answer; None if there is none within this time.

        Raises ConnectionError if none can come any more.
        """
        try:
            answer = Answer(*self.pipe.recv()) if self.pipe.poll(seconds) else None
            self.lost |= answer is not None and bool(answer.gone)
            return answer
        except (EOFError, ConnectionResetError):
            self.lost = True
            raise ConnectionError(
                f"NVFlare's server has ended the job {self._job}. {RESUME}"
            ) from None

    def close(self) -> None:
        """Closes the pipe, which ends the job, and waits for its end."""
        self.pipe.close()
        # the job may have ended just now
        with session_of(self.kit) as session, suppress(Exception):
            session.monitor_job(self._job, ENDING, poll_interval=0.5)
            session.abort_job(self._job)


_lines: dict[str, FlareLine] = {}


def line_of(kit: Path, sites: int | list[str]) -> FlareLine:
    """The line of this process to these sites. It is a new one if a site was lost."""
    key = f"{kit} {sites}"
    line = _lines.pop(key, None)
    if line is not None and line.lost:
        line.close()
        line = None
    _lines[key] = line or FlareLine(kit, sites)
    return _lines[key]


def write_job(folder: str, sites: list[str], address: str, key: str) -> str:
    """Writes a job that names its components and contains no code. Returns its folder."""
    job = FedJob("gcfed", min_clients=1)
    # NVFlare would add the code of unknown packages to the job
    job.set_app_packages(["gcfed", "gcfed_sites"])
    job.to_server(CollabController("_server", sync_task_timeout=300), id="controller")
    job.to_server(Relay(address, key), id="_server")
    for site in sites:
        job.to(CollabExecutor("_client"), site, tasks=["*"])
        job.to(SiteEnd(), site, id="_client")
    job.export_job(folder)
    return f"{folder}/gcfed"


class LocalFederation:
    """The processes of a server and its sites, all on this machine.

    They end with this process. The folder has kits, keys and logs.
    """

    def __init__(self, folder: Path, sites: list[str]) -> None:
        self.kits = provision(folder, sites)
        self.processes = {name: _start(self.kits / name) for name in (SERVER, *sites)}
        until = time.monotonic() + START
        there = set[str]()
        while set(sites) - there:
            if time.monotonic() > until:
                raise ConnectionError(
                    f"the sites do not find their server: see the logs in {self.kits}."
                )
            time.sleep(1.0)
            with suppress(ConnectionError):  # not yet
                there = set(connected(self.kits / ADMIN))


def _start(kit: Path) -> subprocess.Popen:
    kind = "server" if kit.name == SERVER else "client"
    program = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{kind}.{kind}_train"]
    files = ["-m", str(kit), "-s", f"fed_{kind}.json"]
    settings = ["secure_train=true", "org=local", f"uid={kit.name}", "config_folder=config"]
    # it imports what this process can
    places = os.pathsep.join(str(Path(path).resolve()) for path in sys.path)
    known = os.environ | {"PYTHONPATH": places, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (kit / "log").open("a") as file:
        return subprocess.Popen(
            [*program, *files, "--set", *settings],
            env=known,
            cwd=kit,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


_federations: dict[str, LocalFederation] = {}


def local_line(output: Path, sites: int | list[str], data_dir: str) -> FlareLine:
    """The line to this process's federation of these sites. It starts with the first run and serves
    later runs too. The clients' states are in the run's folder, ``output``.
    """
    names = [f"site-{i + 1}" for i in range(sites)] if isinstance(sites, int) else sites
    key = " ".join(names)
    if key not in _federations:
        _federations[key] = LocalFederation(output / "federation", names)
    kits = _federations[key].kits
    for site in names:
        settings = {"config": str(output / CONFIG), "data_dir": str(Path(data_dir).resolve())}
        settings["states"] = str(output / "sites" / site)
        OmegaConf.save(OmegaConf.create(settings), kits / site / "local" / "gcfed.yaml")
    return line_of(kits / ADMIN, names)


def provision(folder: Path, sites: list[str]) -> Path:
    """Creates the startup kits of a server, its sites and an admin. Returns their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # private keys
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    example = Path(nvflare.lighter.__file__).with_name("dummy_project.yml")
    project: Any = OmegaConf.to_container(OmegaConf.load(example))
    server = {"name": SERVER, "type": "server", "fed_learn_port": port, "admin_port": port}
    clients = [{"name": site, "type": "client"} for site in sites]
    admin = {"name": ADMIN, "type": "admin", "role": "project_admin"}
    participants = [{"org": "local"} | entry for entry in (server, *clients, admin)]
    project |= {"name": "gcfed", "participants": participants}
    with redirect_stdout(StringIO()):
        maker = Provisioner(str(folder), prepare_builders(project), prepare_packager(project))
        kits = Path(maker.provision(prepare_project(project))["current_prod_dir"])
    for name in (SERVER, *sites):
        local = kits / name / "local"
        text = (local / "resources.json.default").read_text()
        resources = json.loads(text.replace("/tmp/nvflare", str(kits / name / "storage")))
        resources["class_allow_list"] += ALLOWED
        (local / "resources.json").write_text(json.dumps(resources))
    return kits
