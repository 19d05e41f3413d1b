"""A server and sites of NVFlare's on this machine, provisioned and started, on the loopback interface alone."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from nvflare.lighter.provision import prepare_builders, prepare_packager, prepare_project
from nvflare.lighter.provisioner import Provisioner
from omegaconf import OmegaConf

from gcfed.federated.processes.launch import end_with_parent
from gcfed.federation.line import FlareLine

ADMIN = "admin@local.net"
START = 120.0  # seconds for all processes to find each other
#: What sites and server build of a job's config beside NVFlare's own: no more.
ALLOWED = (
    "gcfed.federation.flare.Relay", "gcfed.federation.flare.SiteEnd",
    "nvflare.collab.runtime.controller.CollabController", "nvflare.collab.runtime.executor.CollabExecutor",
)  # fmt: skip


class LocalFederation:
    """The processes of a server and of its sites, each with startup kit and certificate.

    Args:
        folder: where kits and logs lie.
        sites: names.
    """

    def __init__(self, folder: Path, sites: list[str]) -> None:
        self.sites = sites
        self.kits = provision(folder, sites)
        self._running: dict[str, subprocess.Popen] = {}
        atexit.register(self.stop)
        for name in ("localhost", *sites):
            self.start(name)
        self.line = self._connect()

    def start(self, name: str) -> None:
        """Starts the server's or a site's process, which ends with this one."""
        kind = "server" if name == "localhost" else "client"
        kit = self.kits / name
        words = [
            "-m",
            str(kit),
            "-s",
            f"fed_{kind}.json",
            "--set",
            "secure_train=true",
            "org=local",
            "config_folder=config",
        ]
        words += [f"uid={name}"] * (kind == "client")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path),
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }
        with (kit / "log").open("a") as file:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{kind}.{kind}_train", *words], env=environment,
                stdout=file, stderr=file, cwd=kit, start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip

    def process(self, name: str) -> subprocess.Popen:
        """That of the server (``localhost``) or of a site."""
        return self._running[name]

    def _connect(self) -> FlareLine:
        until, error = time.monotonic() + START, "no answer"
        while time.monotonic() < until:
            if ended := [name for name, process in self._running.items() if process.poll() is not None]:
                raise ConnectionError(f"{ended[0]} of the federation has ended: see {self.kits / ended[0] / 'log'}.")
            try:
                return FlareLine(self.kits / ADMIN, len(self.sites))
            except ConnectionError as failed:
                error = str(failed)
                time.sleep(1.0)
        raise ConnectionError(f"{error} See the logs below {self.kits}.")

    def stop(self) -> None:
        """Ends all processes."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running = {}


_federation: LocalFederation | None = None


def local_line(output: Path, sites: int | list[str], data_dir: str) -> FlareLine:
    """The line to the federation of this process, which is begun with its first run and serves those that follow.

    Args:
        output: the run's folder, below which its sites keep their clients' states.
        sites: their names, or how many.
        data_dir: where they find data sets.
    """
    global _federation
    names = [f"site-{i + 1}" for i in range(sites)] if isinstance(sites, int) else sites
    if _federation is None or _federation.sites != names:
        if _federation is not None:
            _federation.stop()
        _federation = LocalFederation(output / "federation", names)
    for site in names:
        states = str(output / "sites" / site)
        own = {"states": states, "data_dir": data_dir, "trust_config": True, "threads": 1}
        (_federation.kits / site / "local" / "gcfed.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(own)))
    return _federation.line


def provision(folder: Path, sites: list[str]) -> Path:
    """Startup kits of a server, its sites and one who submits jobs; the folder in which they lie."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # private keys
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    lighter = "nvflare.lighter.impl"
    project: dict[str, Any] = {
        "api_version": 3, "name": "gcfed", "description": "", "gen_scripts": False,
        "participants": [
            {"name": "localhost", "type": "server", "org": "local", "fed_learn_port": port, "admin_port": port},
            *({"name": site, "type": "client", "org": "local"} for site in sites),
            {"name": ADMIN, "type": "admin", "org": "local", "role": "project_admin"},
        ],
        "builders": [
            {"path": f"{lighter}.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
            {"path": f"{lighter}.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
            {"path": f"{lighter}.cert.CertBuilder"}, {"path": f"{lighter}.signature.SignatureBuilder"},
        ],
    }  # fmt: skip
    with redirect_stdout(StringIO()):
        maker = Provisioner(str(folder), prepare_builders(project), prepare_packager(project))
        made = maker.provision(prepare_project(project))
    kits = Path(made["current_prod_dir"])
    for name in ("localhost", *sites):
        local = kits / name / "local"
        resources = json.loads((local / "resources.json.default").read_text())
        resources["class_allow_list"] += ALLOWED
        if name == "localhost":
            storage = kits / name / "storage"
            resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(storage / "snapshots")
            for component in resources["components"]:
                if component["id"] == "job_manager":
                    component["args"]["uri_root"] = str(storage / "jobs")
        (local / "resources.json").write_text(json.dumps(resources))
    return kits
