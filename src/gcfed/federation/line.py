"""The line from a run to the sites through NVFlare: the job that it submits, and the socket to the job's server."""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from gcfed.federation.sites import Answer

logging.getLogger("nvflare").setLevel(logging.WARNING)
SUBMIT = 120.0  # seconds for NVFlare to start a job's processes
ENDING = 20.0  # and to end them


class FlareLine:
    """Submits the job, and stands for it as long as the run goes on.

    Args:
        kit: the startup kit of the one who submits.
        sites: their names, or how many are connected.

    Raises:
        ConnectionError: no NVFlare server, or it does not start the job; says what it said.
    """

    def __init__(self, kit: Path, sites: int | list[str]) -> None:
        self.kit, self._job = kit, ""
        self._line: Connection | None = None
        there = sorted(self.connected(), key=lambda name: (len(name), name))
        self.sites = there if isinstance(sites, int) else sites
        if set(self.sites) - set(there) or len(self.sites) != (sites if isinstance(sites, int) else len(sites)):
            raise ConnectionError(f"federation.sites={sites}: connected are {', '.join(there) or 'none'}.")
        self._submit()

    @contextmanager
    def _session(self) -> Iterator[Session]:
        """Talks to NVFlare's server; not for long, since an open session keeps a process from ending."""
        try:
            user = json.loads((self.kit / "startup" / "fed_admin.json").read_text())["admin"]["username"]
            with redirect_stdout(StringIO()):
                session = new_secure_session(user, str(self.kit), timeout=30.0)
        except Exception as error:
            raise ConnectionError(f"federation.kit={self.kit} reaches no NVFlare server: {error}") from error
        try:
            yield session
        finally:
            with suppress(Exception):
                session.close()

    def _submit(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="gcfed_"))  # for this user alone
        address, key = str(folder / "run"), secrets.token_hex(32)
        write_job(folder / "job", self.sites, address, key)
        try:
            with Listener(address, "AF_UNIX", authkey=bytes.fromhex(key)) as listener, self._session() as session:
                try:
                    self._job = session.submit_job(str(folder / "job"))
                except Exception as error:
                    raise ConnectionError(f"NVFlare does not take the job: {error}") from error
                self._line = self._accept(listener, session)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        there = json.loads(self._line.recv_bytes())
        if missing := sorted(set(self.sites) - set(there)):
            raise ConnectionError(f"NVFlare could not start the job at {', '.join(missing)}: see their logs.")

    def _accept(self, listener: Listener, session: Session) -> Connection:
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        until = time.monotonic() + SUBMIT
        while True:
            try:
                return listener.accept()
            except TimeoutError:
                status = str(session.get_job_status(self._job))
                if time.monotonic() > until or status.startswith("FINISHED"):
                    with suppress(Exception):
                        session.abort_job(self._job)
                    raise ConnectionError(f"NVFlare has not started the job of the run: {status}.") from None

    def connected(self) -> set[str]:
        """The sites that NVFlare's server has a connection to."""
        with self._session() as session:
            return {client.name for client in session.get_connected_client_list()}

    def send(self, site: str, verb: str, about: Mapping[str, Any], message: bytes) -> None:
        assert self._line is not None
        with self._broken():
            self._line.send_bytes(json.dumps([site, verb, json.dumps(about)]).encode())
            self._line.send_bytes(message)

    def receive(self, seconds: float) -> Answer | None:
        assert self._line is not None
        with self._broken():
            if not self._line.poll(seconds):
                return None
            site, verb, said, failure = json.loads(self._line.recv_bytes())
            message = self._line.recv_bytes()
        about = json.loads(said)
        return Answer(site, verb, about, message, failure or about.get("failure", ""))

    @contextmanager
    def _broken(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionResetError, BrokenPipeError):
            raise ConnectionError(
                f"NVFlare's server has ended the job {self._job}. The same command with ckpt_path=last goes on after "
                "the last finished round."
            ) from None

    def renew(self, vanished: Collection[str]) -> bool:
        if not self.connected() & set(vanished):
            return False
        self.close()
        self._submit()
        return True

    def close(self) -> None:
        """Hangs up, by which the job ends, and waits until it has."""
        if self._line is not None:
            self._line.close()
            self._line = None
        with self._session() as session:
            until = time.monotonic() + ENDING
            while time.monotonic() < until:
                if str(session.get_job_status(self._job)).startswith("FINISHED"):
                    return
                time.sleep(0.5)
            with suppress(Exception):  # it may have ended just now
                session.abort_job(self._job)


_open: dict[str, FlareLine] = {}


def prod_line(kit: Path, sites: int | list[str]) -> FlareLine:
    """The line to provisioned sites, those of these names or so many that are connected."""
    if (line := _open.get(str(kit))) is None:
        line = _open[str(kit)] = FlareLine(kit, sites)
    return line


def write_job(folder: Path, sites: list[str], address: str, key: str) -> None:
    """An NVFlare job of these sites that carries no code: its components are named, and installed where it runs."""
    shutil.rmtree(folder, ignore_errors=True)
    end: dict[str, Any] = {"collab_obj_ids": [], "props": {}}
    collab = "nvflare.collab.runtime"
    server = {
        "workflows": [{
            "id": "controller", "path": f"{collab}.controller.CollabController",
            "args": end | {"server_obj_id": "_server", "sync_task_timeout": 300},
        }],
        "components": [{
            "id": "_server", "path": "gcfed.federation.flare.Relay", "args": {"address": address, "key": key},
        }],
    }  # fmt: skip
    client = {
        "executors": [{
            "tasks": ["*"],
            "executor": {"path": f"{collab}.executor.CollabExecutor", "args": end | {"client_obj_id": "_client"}},
        }],
        "components": [{"id": "_client", "path": "gcfed.federation.flare.SiteEnd", "args": {}}],
    }  # fmt: skip
    meta = {
        "name": "gcfed", "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["server", *sites]},
    }  # fmt: skip
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    filters = {"format_version": 2, "task_data_filters": [], "task_result_filters": []}
    (folder / "meta.json").write_text(json.dumps(meta))
    (config / "config_fed_server.json").write_text(json.dumps(filters | server))
    (config / "config_fed_client.json").write_text(json.dumps(filters | client))
