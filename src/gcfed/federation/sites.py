"""Clients at sites: the transport of a federation whose clients share no object with the server.

``federation=nvflare``: sites are processes of NVIDIA FLARE's, here or on machines of their own. ``federation=wire``
checks messages: one site with all clients, in a second interpreter that has the config, the data and the states of the
clients and nothing of the server's. What a method reads without sending it is not there, so a run that equals the one
by reference shows that the method's messages are whole.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from omegaconf import DictConfig
from pydantic import Field

from gcfed import __version__
from gcfed.assemble import described
from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, MessageError, Upload
from gcfed.federated.round import Shapes
from gcfed.federated.stacks import Stacks
from gcfed.federation.packing import pack, pack_download, unpack_upload
from gcfed.federation.site import About, clients_config
from gcfed.federation.wire import Answer, Interpreter, Line
from gcfed.runs.folder import CONFIG
from gcfed.runs.identity import digest, identity
from gcfed.utils.checked import SMALLEST, Count, Whole, checked, fits
from gcfed.utils.instantiate import installed

log = logging.getLogger(__name__)
BEGIN = 300.0  # seconds in which a site must have built what it needs for a run
#: What an answer gives that is not as ours.
GARBLED = (ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RuntimeError)
#: What a site tells of itself; a round lists the batches of so many samples.
HOLDS = {"clients": list[Whole], "sizes": list[Annotated[int, Field(ge=0, le=10**8)]], "stores": list[str]}
MOST = 1e20  # of a mean score: times a weight it is finite in float32
_numbers = itertools.count()  # of the questions of this process: a line may serve one run after the other


def shown(error: Exception) -> str:
    """What is wrong with an answer, of which a site may choose the words: fit to be printed."""
    return "".join(c if c.isprintable() else " " for c in str(error)[:500])


@checked
@dataclass(eq=False)
class Sites(Stacks):
    """The server's side: asks the sites whose clients are in the cohort, and waits for them until a deadline.

    Its settings are told in configs/federation/nvflare.yaml; clients of ``wire`` see what those of a simulation see.

    Args:
        stacks: the simulation's, in whose place sites train.
        shapes: what a client sends in the present round.
        cfg: the run's config, of which the sites get what is the clients'.

    Raises:
        ValueError: a setting that cannot work; names the key.
    """

    stacks: Stacks
    shapes: Shapes
    cfg: DictConfig
    _: KW_ONLY
    env: Literal["local", "prod", "wire"] = "local"
    sites: Count | list[str] = 5
    kit: str | None = None
    deadline: Annotated[float, Field(ge=SMALLEST, le=86_400)] = 600.0
    least: Count | None = None
    evaluate: Literal["server", "clients"] = "server"
    apart = True

    def __post_init__(self) -> None:
        super().__init__(self.stacks.program, self.stacks.stores, self.stacks.per_round)
        self.remote = self.env != "wire"
        if (self.env == "prod") != (self.kit is not None):
            needed = "federation.env=prod needs the admin's startup kit, and only that"
            raise ValueError(f"federation.kit={self.kit}: {needed}.")
        if not isinstance(self.sites, int) and not 0 < len(self.sites) == len(set(self.sites)):
            raise ValueError(f"federation.sites={self.sites}: name one or more, each once.")
        if self.evaluate == "clients" and self.cfg.data.get("client_test") is None:
            raise ValueError("federation.evaluate=clients tests on samples of the clients' own: set data.client_test.")
        self.output = Path(self.cfg.paths.output_dir).resolve()
        self.run = f"{identity(self.cfg)}-{digest({'': str(self.output)})}"  # where states lie at the sites
        self._held: dict[str, list[int]] = {}  # site → its clients
        self._sizes = np.zeros(self.program.data.num_clients, dtype=np.int64)  # of their data
        self._asked: dict[str, tuple[int, str]] = {}  # site → the question at which it is, its number and its name
        self._sent: set[str] = set()  # the sites that got the present question
        self._vanished: set[str] = set()
        self._came: dict[str, About] = {}  # site → its task in the present round, which it has done

    # ------------------------------------------------------------------------------------------------ the beginning
    def start(self) -> None:
        if self.program.module.trainer.world_size > 1:
            raise ValueError("federation needs trainer.devices=1: the sites train, the server only adds up.")
        self.line = self.open_line()
        self._configure(resumed=self.cfg.ckpt_path is not None)

    def open_line(self) -> Line:
        """By NVFlare, or to the second interpreter; it serves one run of this process after the other."""
        data_dir = str(self.cfg.paths.data_dir)
        if self.env == "wire":
            device = self.program.module.device.type
            return Interpreter(self.output / "wire", self.output / CONFIG, data_dir, device)
        installed("nvflare", "federation=nvflare")
        from gcfed.federation.line import line_of, local_line

        if self.kit is None:
            return local_line(self.output, self.sites, data_dir)
        return line_of(Path(self.kit), self.sites if isinstance(self.sites, int) else tuple(self.sites))

    def _configure(self, resumed: bool) -> None:
        """Tells every site what run this is, and learns which clients it holds.

        Raises:
            ValueError: a site refuses, or a client is held by two sites or by none; with the reasons. Later in a run a
                site that refuses or is silent is only warned of: its clients drop out.
        """
        data, module, names = self.program.data, self.program.module, self.line.sites
        transform, classes, n = data.transform, data.dataset.class_names, data.num_clients
        about = {
            "version": __version__, "num_clients": n, "resumed": resumed,
            "config": clients_config(described(self.cfg, data)),
            "classes": classes or [str(c) for c in range(data.num_classes)] if module.task.has_classes else None,
            "transform": {key: list(getattr(transform, key)) for key in ("mean", "std") if hasattr(transform, key)},
        }  # fmt: skip
        shares = {site: list(range(i, n, len(names))) for i, site in enumerate(names)}
        tasks = {site: about | {"share": share} for site, share in shares.items() if site not in self._vanished}
        begins, lost = not self._held, dict.fromkeys(tasks, f"did not begin within {BEGIN:g} s")
        for answer in self._answers("configure", b"", tasks, BEGIN):
            try:
                if answer.failure:
                    raise MessageError(answer.failure)
                clients, sizes, stores = (fits(key, answer.about[key], kind) for key, kind in HOLDS.items())
                before = clients if begins else self._held[answer.site]
                if len(clients) != len(sizes) or max(clients, default=0) >= n or clients != before:
                    known = f" of {n}" if begins else f", and the run began with {before}"
                    raise MessageError(f"it holds the clients {clients} with {len(sizes)} sizes{known}.")
                for name in stores:
                    if name not in self.stores.of_clients:
                        raise MessageError(f"it keeps {name!r}, which no client of this run does.")
            except GARBLED as error:
                lost[answer.site] = f"refuses this run: {shown(error)}"
                continue
            del lost[answer.site]
            self._held[answer.site], self._sizes[clients] = clients, sizes
            for name in stores:
                self.stores.open(name).elsewhere = True
        for site, why in lost.items():
            if begins:
                raise ValueError(f"federation: {site} {why}")
            log.warning("%s %s", site, why)
            self._vanished |= {site} - self._asked.keys()  # who refuses is tried again; who is silent may still answer
        holders = np.bincount(np.concatenate([*self._held.values()]).astype(np.int64), minlength=n)
        if (wrong := np.flatnonzero(holders != 1)).size:
            holding = " and ".join(sorted(site for site, clients in self._held.items() if wrong[0] in clients))
            known = f"client {wrong[0]} is held by {holding or 'no site'}"
            raise ValueError(f"federation: {known}: see clients in the sites' gcfed.yaml.")

    # ------------------------------------------------------------------------------------------------------ a round
    def planned(self, clients: np.ndarray) -> np.ndarray:
        return self.program.solver.num_steps(self._sizes[clients])

    def fit(self, download: Download, clients: np.ndarray) -> Iterator[Upload]:
        """The uploads of these clients as they come.

        Raises:
            ConnectionError: fewer clients than ``least`` have come until the deadline; says who failed, and why.
        """
        if self._vanished and (away := self.line.renew(self._vanished)) is not None:
            log.info("round %d: sites are back; all are told anew what run this is", download.round + 1)
            self._vanished, self._asked = set(away), {}
            self._configure(resumed=True)
        (shapes, notes), device, cohort = self.shapes(), self.program.module.device, set(clients.tolist())
        asked = {site: sorted(cohort & set(held)) for site, held in self._held.items()}
        tasks = {site: self._task(own) for site, own in asked.items() if own}
        missing, self._came = dict.fromkeys(tasks, "did not answer"), {}
        there = {site: task for site, task in tasks.items() if site not in self._vanished}
        for answer in self._answers("fit", pack_download(download), there, self.deadline):
            task = tasks[answer.site]
            try:
                if answer.failure:
                    raise MessageError(answer.failure)
                sent = answer.about["uploads"]
                uploads = [unpack_upload(u, download.round, shapes, task["clients"], notes) for u in sent]
                if (clients_of := sorted(k for u in uploads for k in u.clients.tolist())) != task["clients"]:
                    raise MessageError(f"uploads of the clients {clients_of}, and asked were {task['clients']}.")
                states = self.stores.told(answer.about["states"], task["clients"])
            except GARBLED as error:
                missing[answer.site] = f"failed: {shown(error)}"
                continue
            del missing[answer.site]
            self._came[answer.site] = task
            for store, references in states:
                store.note(references)
            yield from (uploads.pop(0).to(device) for _ in range(len(uploads)))
        lost = sorted(client for site in missing for client in tasks[site]["clients"])
        self.unasked = sum(len(asked[site]) for site in tasks.keys() - self._sent)
        self.missing = np.array(lost, dtype=np.int64)
        reasons = [f"{site} {why}" for site, why in missing.items()]
        for reason in reasons:
            log.warning("round %d: %s", download.round + 1, reason)
        came, least = len(clients) - len(lost), min(self.least or len(clients), len(clients))
        if came < least:
            raise ConnectionError(
                f"round {download.round + 1}: {came} of {len(clients)} clients came within federation.deadline="
                f"{self.deadline:g} s, and federation.least is {least}. {'; '.join(reasons)}. The same command with "
                "ckpt_path=last goes on after the last finished round."
            )

    def _task(self, clients: list[int]) -> About:
        """What a site needs beside the download: who of its clients trains, and from which states."""
        stores = self.stores.opened
        states = {name: store.references(clients) for name, store in stores.items() if store.elsewhere}
        return {"clients": clients, "states": states}

    def rehearse(self, *_: Any, **__: Any) -> Iterator[Upload]:
        raise ValueError("metrics=gap and metrics=leakage ask what clients would send: with federation=none alone.")

    def reply(self, reply: Mapping[str, Params], download: Download) -> None:
        """Tells the clients that came; those of a site that does not hear it keep what they had before the round."""
        states = {site: task["states"] for site, task in self._came.items()}
        deaf = set(states)
        for answer in self._answers("reply", pack("reply", reply), self._came, self.deadline):
            with suppress(*GARBLED):
                self.stores.told(answer.about["states"], self._came[answer.site]["clients"])
                states[answer.site] = answer.about["states"]
                deaf.discard(answer.site)
        for site, said in states.items():
            if site in deaf:
                log.warning("round %d: %s did not hear how it ended", download.round + 1, site)
            for store, references in self.stores.told(said, self._came[site]["clients"]):
                store.note(references)

    def test(self, model: Callable[[], Params]) -> Mapping[str, tuple[float, float]] | None:
        if self.evaluate == "server":
            return None
        tasks: dict[str, About] = {site: {} for site in self._held.keys() - self._asked.keys() - self._vanished}
        columns, round = self.program.module.task.columns, self.program.module.trainer.global_step
        sums = dict.fromkeys(columns, (0.0, 0.0))
        absent = {site: "did not answer" if site in tasks else "is away or busy" for site in sorted(self._held)}
        for answer in self._answers("test", pack("model", model()), tasks, self.deadline):
            try:
                if answer.failure:
                    raise MessageError(answer.failure)
                scores = {column: tuple(map(float, answer.about["scores"][column])) for column in columns}
                for column, (mean, weight) in scores.items():
                    if not (abs(mean) <= MOST and 0 <= weight < 2**53 and weight.is_integer()):
                        raise MessageError(f"{column} is {mean:g} over {weight:g} samples.")
            except GARBLED as error:
                absent[answer.site] = f"failed: {shown(error)}"
                continue
            del absent[answer.site]
            for column, (mean, weight) in scores.items():
                total, before = sums[column]
                sums[column] = total + mean * weight, before + weight
        if absent:
            reasons = "; ".join(f"{site} {why}" for site, why in absent.items())
            log.warning("round %d: not all sites have tested the model: %s", round, reasons)
        if not all(weight for _, weight in sums.values()):  # NaN would say that the run has diverged
            if round >= self.cfg.rounds:
                raise ConnectionError(
                    "no site has tested the last model. The same command with ckpt_path=last goes on."
                )
            return {}
        return {column: (total / weight, weight) for column, (total, weight) in sums.items()}

    def _answers(self, verb: str, message: bytes, tasks: Mapping[str, About], seconds: float) -> Iterator[Answer]:
        """What these sites answer, each to its own task, as it comes, for so many seconds.

        A site that is still at something older is asked as soon as it has answered that, which nobody wants any more.
        """
        until, waiting, began = time.monotonic() + seconds, set(tasks), next(_numbers)
        self._sent = set()
        step = self.program.module.trainer.global_step
        round = step + (verb != "test")  # a test comes after the server's step
        while waiting:  # what has come by then counts, however long its uploads waited here
            left = max(until - time.monotonic(), 0.0)
            for site in sorted(waiting - self._asked.keys()) if left else ():
                self._asked[site] = next(_numbers), f"round {round} ({verb})"
                about = {**tasks[site], "run": self.run, "round": step, "message": message}
                self.line.send(site, self._asked[site][0], verb, about)
                self._sent.add(site)
            answer = self.line.receive(left)
            if answer is None:
                return
            number, asked = self._asked.get(answer.site, (-1, ""))
            if answer.number == number:
                del self._asked[answer.site]
            if answer.gone:
                self._vanished.add(answer.site)
            if answer.number > began:
                waiting.discard(answer.site)
                yield answer
            else:
                what = asked if answer.number == number else "another run"
                log.warning("%s answers %s, and this is round %d: refused", answer.site, what, round)
