"""Clients at sites: the transport of a real federation, by whatever line reaches the sites."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from omegaconf import DictConfig

from gcfed import __version__
from gcfed.assemble import described
from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, Upload
from gcfed.federated.stacks import Stacks
from gcfed.federated.transport import Shapes, Transport
from gcfed.federation.clients import clients_config
from gcfed.federation.packing import MessageError, pack, pack_download, pack_reply, unpack_upload
from gcfed.runs.identity import digest, identity
from gcfed.utils.checked import Count, Positive, checked
from gcfed.utils.instantiate import installed

log = logging.getLogger(__name__)
BEGIN = 300.0  # seconds in which a site must have built what it needs for a run
VANISHED = "vanished"  # how the failure of a site begins that cannot be reached any more


class Answer(NamedTuple):
    """What came from a site: what it says, or why it says nothing."""

    site: str
    verb: str
    about: dict[str, Any]
    message: bytes
    failure: str = ""


class Line(Protocol):
    """What reaches the sites; a call of one waits for no other."""

    sites: list[str]
    """Their names, in an order that does not change."""

    def send(self, site: str, verb: str, about: Mapping[str, Any], message: bytes) -> None:
        """Asks a site something; its answer comes by :meth:`receive`."""

    def receive(self, seconds: float) -> Answer | None:
        """The next answer; None where none has come after so many seconds."""

    def renew(self, vanished: Collection[str]) -> bool:
        """Begins anew with all sites that are there, if one of those that had vanished is; whether it has."""


class Sites(Transport):
    """The server's side: asks the sites whose clients are in the cohort, and waits for them until a deadline.

    Args:
        stacks: the simulation's, whose faults and stores are the run's.
        shapes: what a client sends in the present round.
        cfg: the run's config, of which the sites get what is the clients'.
        env: ``local``: a server and sites on this machine; ``prod``: those that were provisioned.
        sites: how many, or their names.
        kit: the startup kit by which jobs are submitted; for ``prod``.
        deadline: seconds that a site has, in which its clients train.
        least: clients that must have come by then, or the run stops; None: the whole cohort.
        evaluate: who tests the global model, ``server`` or ``clients``.

    Raises:
        ValueError: a setting that cannot work; names the key.
    """

    remote = True

    @checked
    def __init__(
        self,
        stacks: Stacks,
        shapes: Shapes,
        cfg: DictConfig,
        *,
        env: Literal["local", "prod"] = "local",
        sites: Count | list[str] = 5,
        kit: str | None = None,
        deadline: Positive = 600.0,
        least: Count | None = None,
        evaluate: Literal["server", "clients"] = "server",
    ) -> None:
        self.stacks, self.shapes, self.cfg = stacks, shapes, cfg
        if (env == "prod") != (kit is not None):
            raise ValueError(f"federation.kit={kit}: federation.env=prod needs the admin's startup kit, and only that.")
        self.sites, self.kit = sites, kit
        self.deadline, self.least, self.evaluate = deadline, least, evaluate
        if evaluate == "clients" and cfg.data.get("client_test") is None:
            raise ValueError("federation.evaluate=clients tests on samples of the clients' own: set data.client_test.")
        folder = str(Path(cfg.paths.output_dir).resolve())
        self.run = f"{identity(cfg)}-{digest({'': folder})}"  # where states lie at the sites
        self._held: dict[str, list[int]] = {}  # site → its clients
        self._busy: dict[str, tuple[str, int]] = {}  # site → what it was asked, and in which round
        self._vanished: set[str] = set()
        self._states: dict[str, dict[str, Any]] = {}  # site → its clients' states before the present round

    # ------------------------------------------------------------------------------------------------ the beginning
    def start(self) -> None:
        module = self.stacks.program.module
        if module.trainer.world_size > 1:
            raise ValueError("federation=nvflare needs trainer.devices=1: the sites train, the server only adds up.")
        self.line = self.open_line()
        self._configure(resumed=self.cfg.ckpt_path is not None)

    def open_line(self) -> Line:
        """By NVFlare; the processes of a local federation serve one run of this process after the other."""
        installed("nvflare", "federation=nvflare")
        from gcfed.federation.line import prod_line
        from gcfed.federation.local import local_line

        if self.kit is not None:
            return prod_line(Path(self.kit), self.sites)
        output = Path(self.cfg.paths.output_dir).resolve()
        return local_line(output, self.sites, str(self.cfg.paths.data_dir))

    def _configure(self, resumed: bool) -> None:
        """Tells every site what run this is, and learns which clients it holds.

        Raises:
            ValueError: a site refuses, or a client is held by two sites or by none; with the reasons.
        """
        data, module = self.stacks.program.data, self.stacks.program.module
        names, config = self.line.sites, clients_config(described(self.cfg, data), paths=False)
        transform, classes = data.transform, data.dataset.class_names
        about = {
            "version": __version__, "run": self.run, "num_clients": data.num_clients, "resumed": resumed,
            "shapes": {name: list(t.shape) for name, t in module.broadcast_state().items()},
            "classes": classes or [str(c) for c in range(data.num_classes)] if module.task.has_classes else None,
            "transform": {key: list(getattr(transform, key)) for key in ("mean", "std") if hasattr(transform, key)},
        }  # fmt: skip
        for i, site in enumerate(names):
            share = list(range(i, data.num_clients, len(names)))
            self._ask(site, "configure", about | {"share": share}, config)
        self._held, self._sizes = {}, np.zeros(data.num_clients, dtype=np.int64)
        for answer in self._answers(set(names)):
            if answer.failure:
                raise ValueError(f"federation: {answer.site} refuses this run: {answer.failure}")
            if answer.about["version"] != __version__:
                raise ValueError(f"federation: {answer.site} has gcfed {answer.about['version']}, not {__version__}.")
            clients = answer.about["clients"]
            for other, theirs in self._held.items():
                if both := sorted(set(clients) & set(theirs)):
                    raise ValueError(f"federation: {answer.site} and {other} both hold the clients {both}.")
            self._held[answer.site] = clients
            self._sizes[clients] = answer.about["sizes"]
            for name in answer.about["stores"]:
                self.stacks.stores.open(name).elsewhere = True
        if silent := sorted(set(names) - set(self._held)):
            raise ValueError(f"federation: {', '.join(silent)} did not begin within {BEGIN:g} s.")
        nobodys = sorted(set(range(data.num_clients)) - {k for held in self._held.values() for k in held})
        if nobodys:
            raise ValueError(f"federation: no site holds the clients {nobodys}: see clients in the sites' gcfed.yaml.")

    # ------------------------------------------------------------------------------------------------------ a round
    def steps(self, clients: np.ndarray, round: int, seed: int) -> np.ndarray:
        planned = self.stacks.program.solver.num_steps(self._sizes[clients])
        return self.stacks.faults.steps(planned, clients, round, seed)

    def arrivals(self, drawn: np.ndarray, round: int, seed: int) -> np.ndarray:
        return self.stacks.faults.survivors(drawn, self.steps(drawn, round, seed), round, seed)

    def fit(self, download: Download, clients: np.ndarray) -> Iterator[Upload]:
        """The uploads of these clients as they come.

        Raises:
            ConnectionError: fewer clients than ``least`` have come until the deadline; says who failed, and why.
        """
        if self._vanished and self.line.renew(self._vanished):
            log.info("round %d: sites are back; all have been told anew what run this is", download.round + 1)
            self._vanished, self._busy = set(), {}
            self._configure(resumed=True)
        message, shapes, missing, reasons = pack_download(download), self.shapes(), list[int](), list[str]()
        tasks = {site: self._task(site, download, clients) for site in self._held}
        tasks = {site: task for site, task in tasks.items() if task["clients"]}
        for answer in self._answers(set(tasks), "fit", tasks, message):
            try:
                uploads = list(self._opened(answer, download, tasks[answer.site]["clients"], shapes))
            except MessageError as error:
                missing += tasks.pop(answer.site)["clients"]
                reasons.append(f"{answer.site} failed: {error}")
                continue
            self._states[answer.site] = tasks.pop(answer.site)["states"]
            self._note(answer.about["states"])
            yield from (uploads.pop(0).to(self.stacks.program.module.device) for _ in range(len(uploads)))
        reasons += [f"{site} did not answer" for site in tasks]
        missing += [client for task in tasks.values() for client in task["clients"]]
        self.missing = np.array(sorted(missing), dtype=np.int64)
        for reason in reasons:
            log.warning("round %d: %s", download.round + 1, reason)
        came, least = len(clients) - len(missing), min(self.least or len(clients), len(clients))
        if came < least:
            raise ConnectionError(
                f"round {download.round + 1}: {came} of {len(clients)} clients came within federation.deadline="
                f"{self.deadline:g} s, and federation.least is {least}. {'; '.join(reasons)}. The same command with "
                "ckpt_path=last goes on after the last finished round."
            )

    def _task(self, site: str, download: Download, clients: np.ndarray) -> dict[str, Any]:
        """What a site needs beside the download: who of its clients trains, and from which states."""
        own = sorted(set(self._held[site]) & set(clients.tolist()))
        stores = self.stacks.stores
        states = {n: stores.open(n).references(own) for n in stores.names if stores.open(n).elsewhere}
        return {"run": self.run, "round": download.round, "clients": own, "states": states}

    def _opened(self, answer: Answer, download: Download, clients: list[int], shapes: Any) -> Iterator[Upload]:
        """The uploads of a site's answer."""
        if answer.failure:
            raise MessageError(answer.failure)
        start = 0
        for length in answer.about["lengths"]:
            part = answer.message[start : start + length]
            yield unpack_upload(part, download.round, shapes, clients)
            start += length

    def _note(self, states: Mapping[str, Any]) -> None:
        for name, references in states.items():
            self.stacks.stores.open(name).note(references)

    def rehearse(self, *_: Any, **__: Any) -> Iterator[Upload]:
        raise ValueError("federation=nvflare: no site tells what its clients would send.")

    def reply(self, reply: Mapping[str, Params], download: Download) -> None:
        """Tells the clients that came; those of a site that does not hear it keep what they had before the round."""
        came = set(download.cohort.tolist()) - set(self.missing.tolist())
        tasks = {
            site: {"run": self.run, "round": download.round, "clients": sorted(came & set(held))}
            for site, held in self._held.items() if came & set(held)
        }  # fmt: skip
        deaf = set(tasks)
        for answer in self._answers(set(tasks), "reply", tasks, pack_reply(reply, download.round)):
            if not answer.failure:
                deaf.discard(answer.site)
                self._note(answer.about["states"])
        for site in sorted(deaf):
            log.warning("round %d: %s did not hear how it ended", download.round + 1, site)
            self._note(self._states[site])

    def test(self, model: Callable[[], Params]) -> Mapping[str, tuple[float, float]] | None:
        if self.evaluate == "server":
            return None
        round = self.stacks.program.module.trainer.global_step
        tasks = {site: {"run": self.run, "round": round} for site in self._held if site not in self._busy}
        found: dict[str, list[tuple[float, float]]] = {}
        for answer in self._answers(set(tasks), "test", tasks, pack("model", model(), {})):
            if answer.failure:
                log.warning("round %d: %s did not test the model: %s", round, answer.site, answer.failure)
            for column, score in answer.about.get("scores", {}).items():
                found.setdefault(column, []).append(score)
        if not found:
            raise ConnectionError(f"round {round}: no site has tested the model within federation.deadline.")
        return {column: _weighted(scores) for column, scores in found.items()}

    # -------------------------------------------------------------------------------------------- calls and answers
    def _ask(self, site: str, verb: str, about: Mapping[str, Any], message: bytes) -> None:
        self._busy[site] = verb, about.get("round", -1)
        self.line.send(site, verb, about, message)

    def _answers(
        self, sites: set[str], verb: str = "configure", tasks: Mapping[str, Mapping[str, Any]] | None = None,
        message: bytes = b"",
    ) -> Iterator[Answer]:  # fmt: skip
        """What these sites answer, as it comes, until the deadline.

        A site that is still at something older is asked as soon as it has answered that, which nobody wants any more.
        """
        seconds = BEGIN if verb == "configure" else self.deadline
        until, waiting, tasks = time.monotonic() + seconds, set(sites), dict(tasks or {})
        for site in sorted(waiting & set(tasks) - set(self._busy)):
            self._ask(site, verb, tasks[site], message)
        while waiting and (seconds := until - time.monotonic()) > 0:
            answer = self.line.receive(seconds)
            if answer is None:
                break
            asked, round = self._busy.pop(answer.site)
            if answer.failure.startswith(VANISHED):
                self._vanished.add(answer.site)
            expected = tasks[answer.site].get("round", -1) if answer.site in tasks else -1
            if answer.site in waiting and (asked, round) == (verb, expected):
                waiting.discard(answer.site)
                yield answer
                continue
            log.warning(
                "%s answers round %d (%s), and this is round %d: refused", answer.site, round + 1, asked, expected + 1
            )
            if answer.site in waiting:
                if answer.site in self._vanished:
                    waiting.discard(answer.site)
                else:
                    self._ask(answer.site, verb, tasks[answer.site], message)


def _weighted(scores: list[tuple[float, float]]) -> tuple[float, float]:
    """The mean of means, ``(mean, weight)`` each, and their weight."""
    weight = sum(w for _, w in scores)
    return sum(mean * w for mean, w in scores) / max(weight, 1.0), weight
