"""NVFlare's ends: what runs in the processes of its job, on the server and at each site.

The job carries no code: both classes come from this project as it is installed there, so a site need not admit any
that it is sent, but for these classes by their names (docs/federation.md).
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from nvflare.collab import collab

from gcfed.utils.files import in_words

VANISHED = "vanished"  # as gcfed.federation.sites has it, which imports torch
DAY = 86_400.0  # the sites' deadline is the run's, not the call's
ALIVE = 10.0  # seconds that a site has to say that it is there


class Relay:
    """In the server's job: passes messages between the run, which is a process of its own, and the sites.

    Args:
        address: of the run's socket, a file.
        key: by which the two know each other, in hexadecimal digits.
    """

    def __init__(self, address: str, key: str) -> None:
        self.address, self.key = address, key
        self._sending = threading.Lock()

    @collab.main
    def relay(self) -> None:
        """Until the run hangs up, or the job is aborted."""
        with Client(self.address, "AF_UNIX", authkey=bytes.fromhex(self.key)) as self.line:
            sites = {site.name: site for site in collab.clients}
            self.line.send_bytes(json.dumps(sorted(sites)).encode())
            context = collab.context
            calls = ThreadPoolExecutor(2 * len(sites))
            try:
                while not context.is_aborted():
                    if self.line.poll(1.0):
                        site, verb, about = json.loads(self.line.recv_bytes())
                        calls.submit(self._call, sites[site], verb, about, self.line.recv_bytes())
            except EOFError:
                return
            finally:
                calls.shutdown(wait=False, cancel_futures=True)

    def _call(self, site: Any, verb: str, about: str, message: bytes) -> None:
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(site, verb, done), daemon=True)
        watch.start()
        try:
            said, answer = site(timeout=DAY).answer(verb, about, message)
            failure = ""
        except Exception as error:
            said, answer, failure = "{}", b"", _gone(error)
        if not done.is_set():
            done.set()
            self._send(site.name, verb, said, answer, failure)

    def _watch(self, site: Any, verb: str, done: threading.Event) -> None:
        """Asks a site that works whether it is still there: a machine without power does not say that it is gone."""
        while not done.wait(ALIVE):
            try:
                site(timeout=ALIVE).alive()
            except Exception as error:
                if not done.is_set():
                    done.set()
                    self._send(site.name, verb, "{}", b"", _gone(error))

    def _send(self, site: str, verb: str, said: str, answer: bytes, failure: str) -> None:
        with self._sending:
            self.line.send_bytes(json.dumps([site, verb, said, failure]).encode())
            self.line.send_bytes(answer)


def _gone(error: Exception) -> str:
    """NVFlare says of a process that has been killed that the call has timed out, at once."""
    why = "its process has ended, or cannot be reached" if "timed out" in str(error) else str(error)
    return f"{VANISHED}: {why}"


class SiteEnd:
    """In a site's job: hands the server's messages to the site's program."""

    def __init__(self) -> None:
        self._site: Any = None
        self._lock = threading.Lock()

    @collab.publish
    def alive(self) -> bool:
        return True

    @collab.publish
    def answer(self, verb: str, about: str, message: bytes) -> tuple[str, bytes]:
        """What :meth:`gcfed.federation.site.Site.answer` does; a refusal travels as text."""
        workspace, name = collab.workspace, collab.site_name
        try:
            with self._lock:
                if self._site is None:
                    from gcfed.federation.site import Site  # torch: not before the job has begun

                    local, home = Path(workspace.get_site_config_dir()), Path(workspace.get_root_dir())
                    self._site = Site(name, local / "gcfed.yaml", home / "gcfed")
            said, answer = self._site.answer(verb, json.loads(about), message)
            return json.dumps(said), answer
        except Exception as error:
            return json.dumps({"failure": f"{type(error).__name__}: {in_words(error)}"}), b""
