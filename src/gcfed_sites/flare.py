"""The two ends of an NVFlare job: one class runs in the server's process, the other in each site's.

The job contains no code. Both classes are installed with this project, so a site only has to allow
their names (docs/federation.md).
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from nvflare.collab import collab

HOLD = 2.0  # seconds until a call returns while the site still works
ALIVE = 20.0  # seconds until a site that does not return from a call is considered gone


def end_soon_after_parent() -> None:
    """Has this process of a job end within a second of its parent's end.

    NVFlare itself would ask the job to stop. The job then waits for other processes, which may have
    ended too, for half a minute or longer. A signal of Linux at the parent's end is no remedy: it
    comes at the end of the parent's *thread*, and NVFlare starts jobs in threads.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Relay:
    """The server's end: passes questions and answers between the sites and the run, which is
    another process.

    Args:
        address: path of the run's socket.
        key: authenticates both ends of the socket, in hexadecimal digits.
    """

    def __init__(self, address: str, key: str) -> None:
        self.address = address
        self.key = key
        self._sending = threading.Lock()

    @collab.init
    def begin(self) -> None:
        end_soon_after_parent()

    @collab.main
    def relay(self) -> None:
        """Works until the run closes the socket or the job is aborted."""
        sites = {site.name: site for site in collab.clients}
        context = collab.context
        calls = ThreadPoolExecutor(len(sites))  # each site has one question at a time
        # a reset if the run leaves answers unread
        hung_up = suppress(EOFError, ConnectionResetError)
        with hung_up, Client(self.address, "AF_UNIX", authkey=bytes.fromhex(self.key)) as self.line:
            self.line.send(sorted(sites))
            while not context.is_aborted():
                if self.line.poll(1.0):
                    name, *question = self.line.recv()
                    calls.submit(self._call, sites[name], *question)
        calls.shutdown(wait=False, cancel_futures=True)

    def _call(self, site: Any, number: int, *question: Any) -> None:
        """Sends the answer of a site, or why it is gone.

        Repeats short calls while the site works, because a site without power never returns, and a
        long call would keep the job from ending.
        """
        answer = None
        gone = ""
        try:
            while answer is None and not self.line.closed:
                answer = site(timeout=ALIVE).answer(number, *question)
                question = ("", "", b"")
        except Exception as error:  # for a killed process NVFlare reports a timeout at once
            gone = str(error)
            if "timed out" in gone:
                gone = "its process has ended, or cannot be reached"
        with self._sending, suppress(OSError):  # the run has ended
            self.line.send((site.name, number, answer if type(answer) is bytes else b"", gone))


class SiteEnd:
    """A site's end: passes the server's questions to the site's program, one at a time."""

    def __init__(self) -> None:
        self._site: Any = None
        self._worker = ThreadPoolExecutor(1)
        self._number = -1
        self._answer = Future[bytes]()

    @collab.init
    def begin(self) -> None:
        end_soon_after_parent()

    @collab.publish
    def answer(self, number: int, verb: str, about: str, message: bytes) -> bytes | None:
        """The answer of :meth:`gcfed_sites.site.Site.answer` to the question with this number; None
        while it works.

        NVFlare would also let other sites call. They are refused.
        """
        if collab.caller != "server":
            raise PermissionError(f"{collab.caller} is a site, and only the server may ask.")
        if number != self._number:
            root = collab.workspace.get_root_dir()
            local = collab.workspace.get_site_config_dir()
            self._number = number
            self._answer = self._worker.submit(
                self._work, collab.site_name, root, local, verb, about, message
            )
        with suppress(TimeoutError):
            return self._answer.result(HOLD)
        return None

    def _work(self, name: str, root: str, local: str, *question: Any) -> bytes:
        if self._site is None:
            from gcfed_sites.site import Site  # imports torch, after the job has begun

            settings = Path(local).resolve() / "gcfed.yaml"
            home = Path(root).resolve() / "gcfed"
            home.mkdir(exist_ok=True)
            os.chdir(home)  # relative paths in its overrides start here, where no keys are
            self._site = Site(name, settings, home)
        return self._site.answer(*question)
