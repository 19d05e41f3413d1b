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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from omegaconf import DictConfig
from pydantic import Field

from gcfed import __version__
from gcfed.assemble import described
from gcfed.federated.forward import Params
from gcfed.federated.messages import Download, MessageError, Upload
from gcfed.federated.stacks import Stacks
from gcfed.federation.packing import MOST, UploadSchema, entries, match, pack, pack_download
from gcfed.federation.site import About, clients_config
from gcfed.federation.wire import Answer, Interpreter, Line
from gcfed.runs.folder import CONFIG
from gcfed.runs.identity import digest, identity
from gcfed.utils.checked import SMALLEST, Count, checked
from gcfed.utils.instantiate import installed

log = logging.getLogger(__name__)
BEGIN = 300.0  # seconds in which a site must have built what it needs for a run
SAMPLES = range(10**8 + 1)  # of a client: a round lists its batches
_numbers = itertools.count()  # of the questions of this process: a line may serve one run after the other


@contextmanager
def counted_against(site: str, failures: dict[str, str], failed: str = "failed") -> Iterator[None]:
    """Reads a site's answer. Any error is that site's failure alone, and without one it is taken from ``failures``."""
    try:
        yield
        del failures[site]
    except Exception as error:  # its words may be the site's: fit to be printed
        failures[site] = f"{failed}: {''.join(c if c.isprintable() else ' ' for c in str(error)[:500])}"


class Holding(NamedTuple):
    """What a site says of itself when a run begins, and must say again if it comes back.

    Attributes:
        clients: ids of the clients that it holds.
        sizes: of their data sets.
        tests: labels on which they test, all together.
        stores: names of what they keep.
    """

    clients: list[int]
    sizes: list[int]
    tests: int
    stores: list[str]


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
    shapes: Callable[[], Any]
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
        self.remote, self.own_data = self.env != "wire", self.env == "prod"
        if (self.env == "prod") != (self.kit is not None):
            needed = "federation.env=prod needs the admin's startup kit, and only that"
            raise ValueError(f"federation.kit={self.kit}: {needed}.")
        if not isinstance(self.sites, int) and not 0 < len(self.sites) == len(set(self.sites)):
            raise ValueError(f"federation.sites={self.sites}: name one or more, each once.")
        if self.evaluate == "clients" and self.cfg.data.get("client_test") is None:
            raise ValueError("federation.evaluate=clients tests on samples of the clients' own: set data.client_test.")
        self.output = Path(self.cfg.paths.output_dir).resolve()
        self.run = f"{identity(self.cfg)}-{digest({'': str(self.output)})}"  # where states lie at the sites
        self._held: dict[str, Holding] = {}
        self._sizes = np.zeros(self.program.data.num_clients, dtype=np.int64)  # of the clients' data sets
        self._asked: dict[str, tuple[int, str]] = {}  # site → the question at which it is, its number and its name
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
            with counted_against(answer.site, lost, "refuses this run"):
                said, known = answer.content, self.stores.of_clients
                match("answer", said, {
                    "clients": entries(said.get("clients"), range(n)), "tests": SAMPLES,
                    "sizes": entries(said.get("clients"), SAMPLES), "stores": entries(said.get("stores"), known.keys()),
                })  # fmt: skip
                for key, before in () if begins else self._held[answer.site]._asdict().items():
                    if said[key] != before:
                        raise MessageError(f"its {key}={said[key]}, and the run began with {before}.")
                self._held[answer.site] = Holding(**said)
                self._sizes[said["clients"]] = said["sizes"]
                for name in said["stores"]:
                    known[name].elsewhere = True
        for site, why in lost.items():
            if begins:
                raise ValueError(f"federation: {site} {why}")
            log.warning("%s %s", site, why)
            self._vanished |= {site} - self._asked.keys()  # who refuses is tried again; who is silent may still answer
        held = [np.array(holding.clients, dtype=np.int64) for holding in self._held.values()]
        if (wrong := np.flatnonzero(np.bincount(np.concatenate(held), minlength=n) != 1)).size:
            holders = " and ".join(sorted(site for site, own in self._held.items() if wrong[0] in own.clients))
            who = f"client {wrong[0]} is held by {holders or 'no site'}"
            raise ValueError(f"federation: {who}: see clients in the sites' gcfed.yaml.")
        for site, own in self._held.items() if begins else ():
            log.info("%s holds the clients %s with %s samples", site, own.clients, own.sizes)

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
        least, cohort = min(self.least or len(clients), len(clients)), set(clients.tolist())
        asked = {site: sorted(cohort & set(held.clients)) for site, held in self._held.items()}
        tasks = {site: self._task(own) for site, own in asked.items() if own}
        self._free_busy(lambda: sum(len(asked[site]) for site in self._free(tasks)) >= least)
        there, missing, self._came = {site: tasks[site] for site in self._free(tasks)}, self._absent(tasks), {}
        schema, device = self._schema(download.round, clients), self.program.module.device
        for answer in self._answers("fit", pack_download(download), there, self.deadline):
            uploads: list[Upload] = []
            with counted_against(answer.site, missing):
                match("answer", said := answer.content, {"uploads": None, "states": None})
                task, sent = tasks[answer.site], [schema.read(upload) for upload in said.pop("uploads")]
                if (ids := sorted(k for upload in sent for k in upload.clients.tolist())) != task["clients"]:
                    raise MessageError(f"uploads of the clients {ids}, and asked were {task['clients']}.")
                for store, references in self.stores.told(said["states"], task["clients"]):
                    store.note(references)
                uploads, self._came[answer.site] = sent, task
            yield from (uploads.pop(0).to(device) for _ in range(len(uploads)))
        lost = sorted(client for site in missing for client in asked[site])
        self.unasked = sum(len(asked[site]) for site in tasks.keys() - there.keys())
        self.missing = np.array(lost, dtype=np.int64)
        reasons = [f"{site} {why}" for site, why in missing.items()]
        for reason in reasons:
            log.warning("round %d: %s", download.round + 1, reason)
        if (came := len(clients) - len(lost)) < least:
            raise ConnectionError(
                f"round {download.round + 1}: {came} of {len(clients)} clients came within federation.deadline="
                f"{self.deadline:g} s, and federation.least is {least}. {'; '.join(reasons)}. The same command with "
                "ckpt_path=last goes on after the last finished round."
            )

    def _schema(self, round: int, clients: np.ndarray) -> UploadSchema:
        """What these clients may send in this round."""
        shapes, notes = self.shapes()
        sizes, solver = self._sizes[clients], self.program.solver
        batches = np.minimum(solver.batch_size, np.maximum(sizes, 10**6))  # as the solver cuts them
        of_each = zip(sizes.tolist(), solver.num_steps(sizes).tolist(), batches.tolist(), strict=True)
        bits = {name: bits for part in self.program.parts for name, bits in part.coded().items()}
        return UploadSchema(round, dict(zip(clients.tolist(), of_each, strict=True)), shapes, bits, notes)

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
        deaf = dict.fromkeys(states, "did not answer")
        for answer in self._answers("reply", pack("reply", reply), self._came, self.deadline):
            with counted_against(answer.site, deaf):
                self.stores.told(said := answer.content["states"], self._came[answer.site]["clients"])
                states[answer.site] = said
        for site, said in states.items():
            if site in deaf:
                log.warning("round %d: %s did not hear how it ended: it %s", download.round + 1, site, deaf[site])
            for store, references in self.stores.told(said, self._came[site]["clients"]):
                store.note(references)

    def test(self, model: Callable[[], Params]) -> Mapping[str, tuple[float, float]] | None:
        if self.evaluate == "server":
            return None
        task, round = self.program.module.task, self.program.module.trainer.global_step
        lowest = {column: 0.0 if column in task.roots + task.shares else -MOST for column in task.columns}
        rules = {"scores": {column: (low, 1.0 if column in task.shares else MOST) for column, low in lowest.items()}}
        self._free_busy()
        sums, absent = dict.fromkeys(task.columns, 0.0), self._absent(self._held)
        tasks: dict[str, About] = {site: {} for site in self._free(self._held)}
        weight = 0
        for answer in self._answers("test", pack("model", model()), tasks, self.deadline):
            with counted_against(answer.site, absent):
                match("answer", said := answer.content, rules)
                tests = self._held[answer.site].tests
                weight += tests
                for column, mean in said["scores"].items():
                    sums[column] += mean * tests
        if absent:
            reasons = "; ".join(f"{site} {why}" for site, why in absent.items())
            log.warning("round %d: not all sites have tested the model: %s", round, reasons)
        if weight:
            return {column: (total / weight, weight) for column, total in sums.items()}
        if round >= self.cfg.rounds:
            raise ConnectionError("no site has tested the last model. The same command with ckpt_path=last goes on.")
        return {}  # NaN would say that the run has diverged

    # ------------------------------------------------------------------------------------------- questions, answers
    def _free(self, sites: Iterable[str]) -> list[str]:
        """Those of these sites that can be asked: they are there, and have answered what they were asked before."""
        return [site for site in sites if site not in self._vanished and site not in self._asked]

    def _absent(self, sites: Iterable[str]) -> dict[str, str]:
        """Why each of these sites has not answered, as long as it has not."""
        busy = {site: f"is still at {question}" for site, (_, question) in self._asked.items()}
        return {site: "is away" if site in self._vanished else busy.get(site, "did not answer") for site in sites}

    def _free_busy(self, enough: Callable[[], bool] = lambda: True) -> None:
        """Takes answers that come late; waits for them, until a deadline, while not enough sites are free."""
        until = time.monotonic() + self.deadline
        while self._asked and (answer := self.line.receive(0.0 if enough() else max(until - time.monotonic(), 0.0))):
            self._hear(answer, ())

    def _answers(self, verb: str, message: bytes, tasks: Mapping[str, About], seconds: float) -> Iterator[Answer]:
        """What these sites, which are free, answer within so many seconds, each to its own task, as it comes.

        What has come by then counts, however long it waits here. A site that is silent is not asked again before it has
        answered, and that answer is refused.
        """
        step, waiting, until = self.program.module.trainer.global_step, set(tasks), time.monotonic() + seconds
        for site, task in sorted(tasks.items()):
            number = next(_numbers)
            self._asked[site] = number, f"round {step + (verb != 'test')} ({verb})"  # a test comes after the step
            self.line.send(site, number, verb, {**task, "run": self.run, "round": step}, message)
        while waiting and (answer := self.line.receive(max(until - time.monotonic(), 0.0))):
            if self._hear(answer, waiting):
                waiting.remove(answer.site)
                yield answer
        self.line.lost |= bool(waiting)  # such a site would not begin another run of this process

    def _hear(self, answer: Answer, waiting: Collection[str]) -> bool:
        """Notes which site is free again, or gone; whether its answer is waited for."""
        number, question = self._asked.get(answer.site, (-1, ""))
        if answer.gone:
            self._vanished.add(answer.site)
        if answer.number != number:
            question = "another run, or twice"
        else:
            del self._asked[answer.site]
            if answer.site in waiting:
                return True
        log.warning("%s answers %s, which nobody waits for: refused", answer.site, question)
        return False
