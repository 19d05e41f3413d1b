"""NVFlare's ends: what runs in the processes of its job, on the server and at each site.

The job carries no code: both classes come from this project as it is installed there, so a site need not admit any
that it is sent, but for these classes by their names (docs/federation.md).
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from nvflare.collab import collab

WEEK = 604_800.0  # the sites' deadline is the run's, of at most a day, and not the call's
ALIVE = 10.0  # seconds that a site has to say that it is there


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
        self.calls = ThreadPoolExecutor(100 * len(sites))  # one to a machine without power does not come back
        hung_up = suppress(EOFError, ConnectionResetError)  # the second with answers that nobody has read
        with hung_up, Client(self.address, "AF_UNIX", authkey=bytes.fromhex(self.key)) as self.line:
            self.line.send(sorted(sites))
            while not context.is_aborted():
                if self.line.poll(1.0):
                    site, number, *question = self.line.recv()
                    if site in sites:
                        self.calls.submit(self._call, sites[site], number, *question)
                    else:
                        self._send(site, number, {}, "is not in this job")
        self.calls.shutdown(wait=False, cancel_futures=True)

    def _call(self, site: Any, number: int, *question: Any) -> None:
        """Sends what a site answers, or why it is gone: a machine without power does not say so, and is asked."""
        call = self.calls.submit(lambda: site(timeout=WEEK).answer(*question))
        try:
            while not wait([call], ALIVE).done:
                site(timeout=ALIVE).alive()
            answer = call.result(), ""
        except Exception as error:  # of a killed process NVFlare says that the call has timed out, at once
            ended = "timed out" in str(error)
            answer = {}, "its process has ended, or cannot be reached" if ended else str(error)
        self._send(site.name, number, *answer)

    def _send(self, *answer: Any) -> None:
        with self._sending:
            self.line.send(answer)


class SiteEnd:
    """In a site's job: hands the server's questions to the site's program, one after the other."""

    def __init__(self) -> None:
        self._site: Any = None
        self._lock = threading.Lock()

    @collab.publish
    def alive(self) -> bool:
        return True

    @collab.publish
    def answer(self, verb: str, about: dict[str, Any]) -> dict[str, Any]:
        """What :meth:`gcfed.federation.site.Site.answer` says; to a site nothing: NVFlare lets it ask, too."""
        if collab.caller != "server":
            raise PermissionError(f"{collab.caller} is a site, and the server alone asks.")
        workspace, name = collab.workspace, collab.site_name
        with self._lock:
            if self._site is None:
                from gcfed.federation.site import Site  # torch: not before the job has begun

                local, home = (
                    Path(place()).resolve() for place in (workspace.get_site_config_dir, workspace.get_root_dir)
                )
                (home / "gcfed").mkdir(exist_ok=True)
                os.chdir(home / "gcfed")  # where relative names in its overrides lead: no key lies here
                self._site = Site(name, local / "gcfed.yaml", home / "gcfed")
            return self._site.answer(verb, about)
