"""NVFlare's ends: what runs in the processes of its job, on the server and at each site.

The job carries no code: both classes come from this project as it is installed there, so a site need not admit any
that it is sent, but for these classes by their names (docs/federation.md).
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from nvflare.collab import collab

HOLD = 2.0  # seconds that a site holds a call whose question it still works at
ALIVE = 20.0  # seconds after which a site that has not answered a call is gone


class Relay:
    """In the server's job: passes questions and answers between the run, which is a process of its own, and the sites.

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
        sites, context = {site.name: site for site in collab.clients}, collab.context
        calls = ThreadPoolExecutor(len(sites))  # a site is asked one question after the other
        hung_up = suppress(EOFError, ConnectionResetError)  # the second with answers that nobody has read
        with hung_up, Client(self.address, "AF_UNIX", authkey=bytes.fromhex(self.key)) as self.line:
            self.line.send(sorted(sites))
            while not context.is_aborted():
                if self.line.poll(1.0):
                    name, *question = self.line.recv()
                    if name in sites:
                        calls.submit(self._call, sites[name], *question)
                    else:
                        self._send(name, question[0], b"", "is not in this job")
        calls.shutdown(wait=False, cancel_futures=True)

    def _call(self, site: Any, number: int, *question: Any) -> None:
        """Sends what a site answers, or why it is gone. It is called again while it works: one without power does not
        say so, and a call that lasts would keep the job from ending.
        """
        answer, gone = None, ""
        try:
            while answer is None and not self.line.closed:
                answer = site(timeout=ALIVE).answer(number, *question)
                question = ("", "", b"")
        except Exception as error:  # of a killed process NVFlare says that the call has timed out, at once
            gone = "its process has ended, or cannot be reached" if "timed out" in str(error) else str(error)
        self._send(site.name, number, answer if type(answer) is bytes else b"", gone)

    def _send(self, *answer: Any) -> None:
        with self._sending, suppress(OSError):  # nobody reads any more
            self.line.send(answer)


class SiteEnd:
    """In a site's job: hands the server's questions to the site's program, one after the other."""

    def __init__(self) -> None:
        self._site: Any = None
        self._worker = ThreadPoolExecutor(1)
        self._number, self._answer = -1, Future[bytes]()

    @collab.publish
    def answer(self, number: int, verb: str, about: str, message: bytes) -> bytes | None:
        """What :meth:`gcfed.federation.site.Site.answer` says to the question of this number, or None while it works;
        to a site nothing: NVFlare lets it ask, too.
        """
        if collab.caller != "server":
            raise PermissionError(f"{collab.caller} is a site, and the server alone asks.")
        if number != self._number:
            places = collab.workspace.get_root_dir(), collab.workspace.get_site_config_dir()
            self._number = number
            self._answer = self._worker.submit(self._work, collab.site_name, *places, verb, about, message)
        with suppress(TimeoutError):
            return self._answer.result(HOLD)
        return None

    def _work(self, name: str, root: str, local: str, *question: Any) -> bytes:
        if self._site is None:
            from gcfed.federation.site import Site  # torch: not before the job has begun

            settings, home = Path(local).resolve() / "gcfed.yaml", Path(root).resolve() / "gcfed"
            home.mkdir(exist_ok=True)
            os.chdir(home)  # where relative names in its overrides lead: no key lies here
            self._site = Site(name, settings, home)
        return self._site.answer(*question)
