"""Clients at real sites: the server's transport to processes of NVIDIA FLARE, on this machine or on
others.

Any site may fail, be silent or answer nonsense. This counts against that site only.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy import ndarray
from omegaconf import DictConfig, OmegaConf
from pydantic import Field

from gcfed import __version__
from gcfed.assemble import fill_from_data
from gcfed.federated.engine.simulation import Simulation
from gcfed.federated.parts.transport import Outcome
from gcfed.federated.protocol.messages import Download, Expected, Params, Upload
from gcfed.federated.protocol.packing import pack
from gcfed.federated.state.store import NONE, ClientStores
from gcfed.federated.state.versioned_files import Key
from gcfed.folders.identity import digest, identity
from gcfed.utils.checked import SMALLEST, Count, checked
from gcfed.utils.instantiate import installed
from gcfed.utils.refusal import Refusal
from gcfed.wire import SeparateClients
from gcfed_sites import answers
from gcfed_sites.agreement import clients_config, frozen_checksum
from gcfed_sites.answers import RESUME, About, Answer, Limits, RoundTask, counted_against

log = logging.getLogger(__name__)
BEGIN = 300.0  # seconds for a site to begin a run
SAMPLES = 10**8  # the most samples of a client
_numbers = itertools.count()  # numbers of this process's questions: a line may serve several runs


class Index(ClientStores):
    """The server's states, and the valid versions of the clients' states, whose files are at the
    sites.
    """

    away: Collection[str] = ()  # the names of the clients' states
    # the versions of the checkpoint before the last, which may still be being written
    _before: Mapping[Key, int] = {}

    def references(self, clients: Sequence[int]) -> dict[str, list[list[int]]]:
        """For each client the valid version, followed by those of the last two checkpoints, by name
        of the state.
        """
        tables = (self._versions, self._saved_versions, self._before)
        references: dict[str, list[list[int]]] = {}
        for name in self.away:
            keys = [(name, client) for client in clients]
            references[name] = [[table.get(key, NONE) for table in tables] for key in keys]
        return references

    def note(self, clients: Sequence[int], versions: Mapping[str, Sequence[int]]) -> None:
        """Makes these versions the valid ones."""
        valid = dict(self._versions)
        for name, versions_of_state in versions.items():
            for client, version in zip(clients, versions_of_state, strict=True):
                valid[name, client] = version
        self._versions = {key: version for key, version in valid.items() if version != NONE}

    def rotate(self) -> list[Path]:
        self._before = self._saved_versions
        return super().rotate()

    def _wait_for_disk(self, key: Key, version: int) -> None:
        if key[0] not in self.away:  # sites wait for their disks
            super()._wait_for_disk(key, version)


class Question(NamedTuple):
    """A question to a site: its number, and its ``text`` for messages: ``round 3 (fit)``."""

    number: int
    text: str


@checked
@dataclass(eq=False)
class Sites(SeparateClients):
    """Asks the sites that hold clients of the cohort, and waits for them until a deadline.

    configs/federation/nvflare.yaml explains the settings.
    """

    simulation: Simulation
    cfg: DictConfig
    sites: Count | list[str] = 5
    kit: str | None = None
    deadline: Annotated[float, Field(ge=SMALLEST, le=86_400)] = 600.0
    least: Count | None = None
    remote = True

    def __post_init__(self) -> None:
        self.index = Index(self.simulation.stores.folder)
        self.index.away = [name for part in self.simulation.program.parts for name in part.keeps]
        super().__init__(self.simulation.program, self.index)
        self.own_data = self.kit is not None
        self.output = Path(self.cfg.paths.output_dir).resolve()
        # names the states at the sites
        self.run = f"{identity(self.cfg)}-{digest({'': str(self.output)})}"
        self._held: dict[str, set[int]] = {}  # site → the clients that it holds
        # of the clients' data sets, ``[N]``
        self._sizes = np.zeros(self.program.data.num_clients, dtype=np.int64)
        self._unanswered: dict[str, Question] = {}  # by site: each has one at a time
        self._gone: set[str] = set()  # sites
        self._done: dict[str, About] = {}  # site → its task in this round, which it has finished

    def open_line(self) -> Any:
        """The line to the sites (:class:`~gcfed_sites.line.FlareLine`).

        It serves all runs of this process in turn.
        """
        installed("nvflare", "federation=nvflare")
        from gcfed_sites.line import line_of, local_line

        if self.kit is None:
            return local_line(self.output, self.sites, str(self.cfg.paths.data_dir))
        return line_of(Path(self.kit), self.sites)

    def start(self) -> None:
        """Tells every site which run this is, and learns which clients it holds.

        Raises Refusal, with the reasons, if a site refuses, or if two sites or none hold a client.
        """
        module = self.program.module
        if module.trainer.world_size > 1:
            raise Refusal("federation=nvflare needs trainer.devices=1, because the sites train.")
        self.line = self.open_line()
        names = self.line.sites
        num_clients = len(self._sizes)
        about = self._about_run()
        tasks = {}
        for place, site in enumerate(names):
            tasks[site] = about | {"share": list(range(place, num_clients, len(names)))}
        limits = Limits(header=1_000_000 + 100 * num_clients)
        lost = dict.fromkeys(names, f"did not begin within {BEGIN:g} s")
        for answer in self._answers("configure", b"", tasks, BEGIN, module.trainer.global_step):
            with counted_against(answer.site, lost, "refuses this run"):
                self._note_clients(answer.site, answer.content(limits))
        for site, why in lost.items():
            raise Refusal(f"federation: {site} {why}")
        self._refuse_contradictions()

    def _about_run(self) -> About:
        """What every site hears of the run."""
        data = self.program.data
        module = self.program.module
        cfg = fill_from_data(self.cfg, data).copy()
        cfg.paths = dict.fromkeys(cfg.paths, ".")  # the server's folders are not sent
        classes = None
        if module.task.has_classes:
            classes = data.dataset.class_names or [*map(str, range(data.num_classes))]
        transform = {}
        for key in ("mean", "std"):
            if hasattr(data.transform, key):
                transform[key] = list(getattr(data.transform, key))
        return {
            "version": __version__,
            "num_clients": data.num_clients,
            "resumed": self.cfg.ckpt_path is not None,
            "config": clients_config(OmegaConf.to_container(cfg, resolve=True)),
            "classes": classes,
            "transform": transform,
            "frozen": frozen_checksum(module.net, module.travels),
        }

    def _note_clients(self, site: str, content: About) -> None:
        """Notes which clients a site holds, and how many samples each has.

        Raises MessageError for anything else.
        """
        clients = content["clients"]
        sizes = content["sizes"]
        answers.check_whole("clients", clients, 0, len(self._sizes) - 1)
        answers.require(len({*clients}) == len(clients), "clients", clients)
        answers.check_whole("sizes", sizes, 1, SAMPLES)
        answers.require(len(sizes) == len(clients), "sizes", sizes)
        self._held[site] = {*clients}
        self._sizes[clients] = sizes
        log.info("%s holds the clients %s with %s samples", site, clients, sizes)

    def _refuse_contradictions(self) -> None:
        """Raises Refusal if two sites or none hold a client."""
        for client in range(len(self._sizes)):
            holders = sorted(site for site, clients in self._held.items() if client in clients)
            if len(holders) != 1:
                who = f"client {client} is held by {' and '.join(holders) or 'no site'}"
                raise Refusal(f"federation: {who}: see clients in the sites' gcfed.yaml.")

    def planned(self, clients: ndarray) -> ndarray:
        return self.program.solver.num_steps(self._sizes[clients])

    def fit(
        self,
        download: Download,
        clients: ndarray,
        receive: Callable[[Upload], None],
        expected: Expected,
    ) -> Outcome:
        """Receives the uploads of these clients as they arrive.

        Raises ConnectionError if fewer clients than ``least`` answer before the deadline. It says
        which sites failed, and why.
        """
        self._round = download.round_index
        self._done = {}
        self._hear_late_answers()
        asked = self._holders(clients)
        tasks = self._tasks(asked)
        missing = self._not_answered(asked)
        message = pack(vars(download))
        for answer in self._answers("fit", message, tasks, self.deadline, download.round_index):
            uploads: list[Upload] = []
            with counted_against(answer.site, missing):
                uploads = self._read(answer, tasks[answer.site], download, expected)
            while uploads:  # so that nothing here holds an upload that was added up
                receive(uploads.pop(0).to(self.program.module.device))
        lost = [client for site in missing for client in asked[site]]
        num_unsent = sum(len(unsent) for site, unsent in asked.items() if site not in tasks)
        for site, why in missing.items():
            log.warning("round %d: %s %s", download.round_index + 1, site, why)
        self._refuse_too_few(len(clients), len(lost), missing)
        return Outcome(np.array(sorted(lost), dtype=np.int64), num_unsent)

    def _hear_late_answers(self) -> None:
        while self._unanswered or self._gone:
            late = self.line.receive(0.0)
            if late is None:
                return
            self._hear(late, ())

    def _holders(self, clients: ndarray) -> dict[str, list[int]]:
        """The sites that hold some of these clients, and their ids, sorted."""
        cohort = set(clients.tolist())
        holders = {}
        for site, held in self._held.items():
            asked = sorted(cohort & held)
            if asked:
                holders[site] = asked
        return holders

    def _tasks(self, asked: Mapping[str, list[int]]) -> dict[str, About]:
        """The tasks of those sites that are free."""
        tasks = {}
        for site, ids in asked.items():
            if site not in self._unanswered and site not in self._gone:
                tasks[site] = {"clients": ids, "states": self.index.references(ids)}
        return tasks

    def _not_answered(self, asked: Iterable[str]) -> dict[str, str]:
        """Why each of these sites has not answered yet."""
        missing = {}
        for site in asked:
            missing[site] = "did not answer"
            if site in self._gone:
                missing[site] = "is gone"
            elif site in self._unanswered:
                missing[site] = f"is still at {self._unanswered[site].text}"
        return missing

    def _read(
        self, answer: Answer, task: About, download: Download, expected: Expected
    ) -> list[Upload]:
        """The uploads of a site, whose states are then noted.

        Raises Exception for anything but what the site was asked; then nothing of it counts.
        """
        ids = np.array(task["clients"], dtype=np.int64)
        planned = self.planned(ids)
        program = self.program
        asked = RoundTask(
            round=download.round_index,
            clients=ids,
            num_samples=self._sizes[ids],
            num_steps=program.faults.steps(planned, ids, download.round_index, download.seed),
            batch_size=program.solver.batch_size,
            least_loss=program.module.task.least_loss(),
            expected=expected,
        )
        content = answer.content(asked.limits)
        uploads = answers.checked_uploads(content["uploads"], asked)
        self._note(task["clients"], content["states"])
        self._done[answer.site] = task
        return uploads

    def _refuse_too_few(self, num_asked: int, num_lost: int, missing: Mapping[str, str]) -> None:
        """Raises ConnectionError if fewer clients than ``least`` have answered."""
        least = min(self.least or num_asked, num_asked)
        answered = num_asked - num_lost
        if answered >= least:
            return
        few = f"round {self._round + 1}: {answered} of {num_asked} clients answered in time"
        reasons = "; ".join(f"{site} {why}" for site, why in missing.items())
        raise ConnectionError(f"{few}, and federation.least is {least}. {reasons}. {RESUME}")

    def _note(self, clients: list[int], versions: Mapping[str, list[int]]) -> None:
        """Notes the versions of these clients' states."""
        answers.check_versions(versions, self.index.away, clients, self._round)
        self.index.note(clients, versions)

    def reply(self, reply: Mapping[str, Params]) -> None:
        """Sends the server's reply to the clients that answered. If a site does not confirm it, the
        states that its clients had before the round are valid again.
        """
        unheard = dict.fromkeys(self._done, "did not answer")
        numbers = max([len(task["clients"]) for task in self._done.values()], default=0)
        limits = Limits(header=1_000_000 + 100 * numbers * len(self.index.away))
        for answer in self._answers("reply", pack(reply), self._done, self.deadline, self._round):
            with counted_against(answer.site, unheard):
                ids = self._done[answer.site]["clients"]
                self._note(ids, answer.content(limits)["states"])
        for site, why in unheard.items():
            log.warning("round %d: %s did not hear how it ended: it %s", self._round + 1, site, why)
            task = self._done[site]
            before = {}
            for name, versions in task["states"].items():
                before[name] = [of_client[0] for of_client in versions]
            self._note(task["clients"], before)

    def _answers(
        self,
        verb: str,
        message: bytes,
        tasks: Mapping[str, About],
        seconds: float,
        round_index: int,
    ) -> Iterator[Answer]:
        """Gives these free sites their tasks, and yields the answers that arrive within this time.

        An answer that arrives in time counts, also if it is read later. A silent site gets no new
        task before it has answered, and that answer is refused.
        """
        waiting = set(tasks)
        until = time.monotonic() + seconds
        for site, task in sorted(tasks.items()):
            question = Question(next(_numbers), f"round {round_index + 1} ({verb})")
            self._unanswered[site] = question
            self._gone.discard(site)
            about = {**task, "run": self.run, "round": round_index}
            self.line.send(site, question.number, verb, about, message)
        while waiting:
            answer = self.line.receive(max(until - time.monotonic(), 0.0))
            if answer is None:
                break
            if self._hear(answer, waiting):
                waiting.remove(answer.site)
                yield answer
        self.line.lost |= bool(waiting)  # a silent site cannot begin another run of this process

    def _hear(self, answer: Answer, waiting: Collection[str]) -> bool:
        """Notes that a site is free again, or gone.

        Returns whether its answer is one of those awaited.
        """
        question = self._unanswered.get(answer.site)
        if question is not None and question.number != answer.number:
            question = None
        if question is not None or answer.gone:
            self._unanswered.pop(answer.site, None)
        if answer.gone:
            self._gone.add(answer.site)
        if question is not None and answer.site in waiting:
            return True
        asked = "another run, or twice" if question is None else question.text
        log.warning("%s answers %s, which is too late: refused", answer.site, asked)
        return False
