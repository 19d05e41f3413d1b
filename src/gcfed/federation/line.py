"""The line from a run to sites through NVFlare: the job that it submits, and the socket to the job's server.

Where all sites are on this machine, it first provisions and starts them, on the loopback interface alone.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import nvflare.lighter
from nvflare.collab.runtime.controller import CollabController
from nvflare.collab.runtime.executor import CollabExecutor
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session
from nvflare.job_config.api import FedJob
from nvflare.lighter.provision import prepare_builders, prepare_packager, prepare_project
from nvflare.lighter.provisioner import Provisioner
from omegaconf import OmegaConf

from gcfed.federation.flare import Relay, SiteEnd
from gcfed.federation.wire import Line, python, write_settings
from gcfed.runs.folder import CONFIG
from gcfed.utils.files import scratch

log = logging.getLogger(__name__)
logging.getLogger("nvflare").setLevel(logging.WARNING)
SERVER, ADMIN = "localhost", "admin@local.net"  # of a federation on this machine
START = 120.0  # seconds for its processes to find each other
SUBMIT = 120.0  # and for NVFlare to start a job's
ENDING = 20.0  # and to end them
AGAIN = 300.0  # until a site is tried again: one without power seems connected for long, one may die in every round
#: What sites and server build of a job's config beside NVFlare's own: no more.
ALLOWED = [f"{kind.__module__}.{kind.__name__}" for kind in (Relay, SiteEnd, CollabController, CollabExecutor)]


@contextmanager
def session_of(kit: Path) -> Iterator[Session]:
    """Talks to NVFlare's server; not for long, since an open session keeps a process from ending.

    Raises:
        ConnectionError: it cannot be reached by this startup kit.
    """
    try:
        user = json.loads((kit / "startup" / "fed_admin.json").read_text())["admin"]["username"]
        with redirect_stdout(StringIO()):
            session = new_secure_session(user, str(kit), timeout=30.0)
    except Exception as error:
        raise ConnectionError(f"federation.kit={kit} reaches no NVFlare server: {error}") from error
    try:
        yield session
    finally:
        with suppress(Exception):
            session.close()


def connected(kit: Path) -> list[str]:
    """The sites that NVFlare's server has a connection to."""
    with session_of(kit) as session:
        return sorted((c.name for c in session.get_connected_client_list()), key=lambda name: (len(name), name))


class FlareLine(Line):
    """Submits the job, and stands for it as long as the run goes on.

    Args:
        kit: the startup kit of the one who submits.
        sites: their names, or how many are connected.

    Raises:
        ConnectionError: no NVFlare server, or it does not start the job; says what it said.
    """

    def __init__(self, kit: Path, sites: int | Sequence[str]) -> None:
        self.kit, there = kit, connected(kit)
        self.sites = there if isinstance(sites, int) else list(sites)
        if set(self.sites) - set(there) or (isinstance(sites, int) and sites != len(there)):
            asked = sites if isinstance(sites, int) else self.sites
            raise ConnectionError(f"federation.sites={asked}: connected are {', '.join(there) or 'none'}.")
        self._tried: dict[str, float] = {}  # when the job was begun anew for a site
        if missing := self._submit():
            raise ConnectionError(f"NVFlare could not start the job at {', '.join(sorted(missing))}: see their logs.")

    def _submit(self) -> set[str]:
        """Submits the job; the sites at which it could not be started."""
        key = secrets.token_bytes(32)
        with scratch() as folder:  # for this user alone
            address = f"{folder}/run"
            job = write_job(folder, self.sites, address, key.hex())
            with Listener(address, "AF_UNIX", authkey=key) as listener, session_of(self.kit) as session:
                try:
                    self._job = session.submit_job(job)
                except Exception as error:
                    raise ConnectionError(f"NVFlare does not take the job: {error}") from error
                self.pipe = self._accept(listener, session)
        self.ended = (
            f"NVFlare's server has ended the job {self._job}. The same command with ckpt_path=last goes on after the "
            "last finished round."
        )
        return set(self.sites) - set(self.pipe.recv())

    def _accept(self, listener: Listener, session: Session) -> Connection:
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        until = time.monotonic() + SUBMIT
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                status = str(session.get_job_status(self._job))
                if time.monotonic() > until or status.startswith("FINISHED"):
                    self._abort(session)
                    raise ConnectionError(f"NVFlare has not started the job of the run: {status}.") from None

    def _abort(self, session: Session) -> None:
        with suppress(Exception):  # it may have ended just now
            session.abort_job(self._job)

    def renew(self, vanished: Collection[str]) -> Collection[str] | None:
        try:
            there, now = set(connected(self.kit)) & set(vanished), time.monotonic()
        except Exception as error:  # the job goes on, whatever becomes of an admin's session
            log.warning("sites that may be back are not asked for: %s", error)
            return None
        if not any(now - self._tried.get(site, -AGAIN) >= AGAIN for site in there):
            return None
        self.close()
        missing = self._submit()
        self._tried |= dict.fromkeys(there, now)
        self.lost = bool(missing)
        return missing

    def close(self) -> None:
        """Hangs up, by which the job ends, and waits until it has."""
        self.pipe.close()
        with session_of(self.kit) as session:
            session.monitor_job(self._job, ENDING, poll_interval=0.5)
            self._abort(session)


_lines: dict[tuple[Path, int | tuple[str, ...]], FlareLine] = {}


def line_of(kit: Path, sites: int | tuple[str, ...]) -> FlareLine:
    """The line that serves all runs of this process, or a new one where a site has been lost to it."""
    line = _lines.pop((kit, sites), None)
    if line is not None and line.lost:
        line.close()
        line = None
    _lines[kit, sites] = line = line or FlareLine(kit, sites)
    return line


def write_job(folder: str, sites: list[str], address: str, key: str) -> str:
    """An NVFlare job that carries no code: its components are named, and installed where it runs; where it lies."""
    job = FedJob("gcfed", min_clients=1)
    job.set_app_packages(["gcfed"])  # whose code would travel with it
    job.to_server(CollabController("_server", sync_task_timeout=300), id="controller")
    job.to_server(Relay(address, key), id="_server")
    for site in sites:
        job.to(CollabExecutor("_client"), site, tasks=["*"])
        job.to(SiteEnd(), site, id="_client")
    job.export_job(folder)
    return f"{folder}/gcfed"


# ------------------------------------------------------------------------------------ all of them on this machine
class LocalFederation:
    """The processes of a server and of its sites, whose kits, certificates and logs lie in a folder; they end with this
    one.

    Raises:
        ConnectionError: they do not find each other.
    """

    def __init__(self, folder: Path, sites: list[str]) -> None:
        self.sites, self.kits = sites, provision(folder, sites)
        self.processes: dict[str, subprocess.Popen] = {}
        atexit.register(self.stop)
        for name in (SERVER, *sites):
            self.processes[name] = self._start(self.kits / name)
        until, there = time.monotonic() + START, set[str]()
        while set(sites) - there:
            if self.ended:
                place = self.kits / self.ended[0] / "log"
                raise ConnectionError(f"{self.ended[0]} of the federation has ended: see {place}.")
            if time.monotonic() > until:
                raise ConnectionError(f"the sites do not find their server: see the logs below {self.kits}.")
            time.sleep(1.0)
            with suppress(ConnectionError):  # not yet
                there = set(connected(self.kits / ADMIN))

    @property
    def ended(self) -> list[str]:
        """Those of its processes that have ended."""
        return [name for name, process in self.processes.items() if process.poll() is not None]

    def _start(self, kit: Path) -> subprocess.Popen:
        kind = "server" if kit.name == SERVER else "client"
        words = ["-u", "-m", f"nvflare.private.fed.app.{kind}.{kind}_train", "-m", str(kit), "-s", f"fed_{kind}.json"]
        settings = ["--set", "secure_train=true", "org=local", f"uid={kit.name}", "config_folder=config"]
        devices = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")}
        with (kit / "log").open("a") as file:
            return python(*words, *settings, environment=devices, cwd=kit, stdout=file, stderr=file)

    def stop(self) -> None:
        """Ends all processes."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
            process.wait()


_federation: LocalFederation | None = None


def local_line(output: Path, sites: int | list[str], data_dir: str) -> FlareLine:
    """The line to the federation of this process, which is begun with its first run and serves those that follow.

    The sites, so many or of these names, keep their clients' states below ``output``, the run's folder.
    """
    global _federation
    names = [f"site-{i + 1}" for i in range(sites)] if isinstance(sites, int) else sites
    if _federation is not None and (_federation.sites != names or _federation.ended):
        _federation.stop()
        _federation = None
    _federation = _federation or LocalFederation(output / "federation", names)
    for site in names:
        settings, states = _federation.kits / site / "local" / "gcfed.yaml", str(output / "sites" / site)
        write_settings(settings, output / CONFIG, data_dir, states=states, threads=1)
    return line_of(_federation.kits / ADMIN, tuple(names))


def provision(folder: Path, sites: list[str]) -> Path:
    """Startup kits of a server, its sites and one who submits jobs; the folder in which they lie."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # private keys
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    example = Path(nvflare.lighter.__file__).with_name("dummy_project.yml")
    project: Any = OmegaConf.to_container(OmegaConf.load(example))
    project |= {"name": "gcfed", "participants": [
        {"name": SERVER, "type": "server", "org": "local", "fed_learn_port": port, "admin_port": port},
        *({"name": site, "type": "client", "org": "local"} for site in sites),
        {"name": ADMIN, "type": "admin", "org": "local", "role": "project_admin"},
    ]}  # fmt: skip
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
