"""The clients' program: it trains K clients from a download and makes their uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.network.module import FederatedModule, watches_steps
from gcfed.federated.network.stack import ClientStack, StackStart
from gcfed.federated.parallel.sums import LIMIT
from gcfed.federated.parts import ClientPart, ClientStates, Part
from gcfed.federated.protocol.checks import finite_clients, sendable
from gcfed.federated.protocol.messages import Download, Params, Upload
from gcfed.federated.state.client_states import EditedState
from gcfed.federated.training.batches import BatchPlan
from gcfed.federated.training.hooks import StepHooks
from gcfed.federated.training.local_training import LocalTraining
from gcfed.federated.training.memory import TrainingMemory
from gcfed.federated.training.recorder import Recordable
from gcfed.federated.training.solver import LocalSolver
from gcfed.participation.faults import Faults
from gcfed.utils.rng import seed_generators, torch_seed

STACKS_AHEAD = 8  # stacks whose batches are drawn at once on a CPU
IN_STEPS = ("before_step", "calibrate", "local_loss", "on_after_backward", "after_step")


class StackDraw(NamedTuple):
    """What is drawn for the clients of a stack before they train."""

    clients: np.ndarray  # their ids, [K], those with most steps first
    plan: BatchPlan  # their mini-batches, as indices of samples
    seed: int  # seed of the generators from which networks draw


class SentUploads(NamedTuple):
    """Uploads of a stack, to which the server may reply."""

    clients: np.ndarray  # their ids, [K]
    finite: Tensor  # whether an upload has finite numbers only, bool [K]


@dataclass
class ClientProgram:
    """Trains clients. It reads only a download, the clients' data and their stores.

    Attributes:
        module: provides the network and calls Lightning's hooks. Its trained weights are never
            read.
        faults: make some clients do fewer steps.
        limit: the server adds up numbers below it (``Aggregator.limit``).
    """

    module: FederatedModule
    data: FederatedDataModule
    solver: LocalSolver
    parts: Sequence[ClientPart]
    faults: Faults = field(default_factory=Faults)
    limit: float = LIMIT

    @cached_property
    def memory(self) -> TrainingMemory:
        """Makes the tensors of a stack's training, or reuses those of an earlier stack."""
        return TrainingMemory(self.module, self.data, self.solver)

    def take_download(self, download: Download) -> ClientRound:
        """Prepares for stacks that train from this download."""
        self.module.net.train()
        for part in self.parts:
            part.on_download(download)
        hooks = self._step_hooks()  # now, because a part may have changed its task_weight
        self.memory.begin_round(download.broadcast_model, hooks.task_weight)
        return ClientRound(self, download, hooks)

    def _step_hooks(self) -> StepHooks:
        """The hooks of parts and callbacks that local steps call, as one record."""
        parts = self.parts
        left_out = []  # of a rehearsal
        for callback in self.module.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ClientPart) and callback not in parts:
                left_out.append(callback)
        return StepHooks(
            before_step=[part.before_step for part in parts if part.overrides("before_step")],
            calibrate=[part.calibrate for part in parts if part.overrides("calibrate")],
            local_loss=[part.local_loss for part in parts if part.overrides("local_loss")],
            after_step=[part.after_step for part in parts if part.overrides("after_step")],
            task_weight=prod(part.task_weight for part in parts),
            after_backward=self.module.after_backward(left_out),
            autocast=self.module.trainer.precision_plugin.forward_context,
        )

    @cached_property
    def in_steps(self) -> list[ClientPart]:
        """The parts that have a hook in each local step."""
        return [part for part in self.parts if part.overrides(*IN_STEPS)]

    @cached_property
    def reads(self) -> frozenset[str]:
        """What the forward pass returns in addition to the logits."""
        return frozenset[str]().union(*(part.reads for part in self.parts))

    @cached_property
    def reply_parts(self) -> list[ClientPart]:
        """The parts that get the server's reply."""
        return [part for part in self.parts if part.overrides("on_reply")]

    @cached_property
    def edits_uploads(self) -> bool:
        """Whether a part may change what clients send."""
        return any(part.overrides("send") for part in self.parts)

    @cached_property
    def recordable(self) -> Recordable:
        """How long a recorded local step of this run stays valid; empty if none can be recorded."""
        if self.module.traits.assigns or not self.module.task.is_recordable:
            return ""
        for callback in self.module.trainer.callbacks:  # type: ignore[attr-defined]
            if not isinstance(callback, Part) and watches_steps(callback):
                return ""
        declared = {part.recordable for part in self.in_steps}
        if "" in declared:
            return ""
        return "stack" if "stack" in declared else "run"


@dataclass(frozen=True, eq=False)
class ClientRound:
    """A round of the clients: their local training from a download, and the server's reply.

    Attributes:
        hooks: what local steps call.
        sent: the uploads, an entry for each stack; empty if no part gets the reply.
    """

    program: ClientProgram
    download: Download
    hooks: StepHooks
    sent: list[SentUploads] = field(default_factory=list)

    def num_steps(self, clients: np.ndarray) -> np.ndarray:
        """The numbers of local steps of these clients, ``[K]``. Some may do fewer than planned."""
        program = self.program
        planned = program.solver.num_steps(program.data.sizes(clients))
        return program.faults.steps(planned, clients, self.download.round_index, self.download.seed)

    def draw(self, stacks: Sequence[np.ndarray]) -> Iterator[StackDraw]:
        """Draws the batches of each stack's clients, ``[K]``.

        On a CPU it draws for several stacks before the first one trains, because the second call
        of the same code takes a third of the time (its caches are warm). On a GPU the host draws
        while the device trains.
        """
        ahead = STACKS_AHEAD if self.program.module.device.type == "cpu" else 1
        for first in range(0, len(stacks), ahead):
            drawn = [self._drawn(clients) for clients in stacks[first : first + ahead]]
            yield from drawn

    def _drawn(self, clients: np.ndarray) -> StackDraw:
        program = self.program
        download = self.download
        plan = program.solver.plan(program.data, clients, download, program.module.device)
        done = program.faults.steps(plan.steps, clients, download.round_index, download.seed)
        if (done < plan.steps).any():
            plan = plan.cut(done)
        seed = torch_seed(download.seed, "dropout", download.round_index, int(clients[0]))
        return StackDraw(clients, plan, seed)

    def train(
        self,
        drawn: StackDraw,
        in_turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        sends: bool = True,
    ) -> Upload:
        """Trains K clients side by side, and returns their uploads.

        Args:
            drawn: the clients and their batches (:meth:`draw`).
            in_turn: context of the code that must not run while another stack trains.
            sends: whether the uploads are sent. If not, clients keep nothing.
        """
        program = self.program
        training = self._begin_training(drawn)
        stack = training.stack
        num_seen = training.plan.counts.sum(1)
        try:
            program.module.clients = stack
            states = self._prepare(training)
            loss_K = program.solver.train(training, program.data, self.download.lr, self.hooks)
            del training  # frees the optimizer's state
            program.module.clients = None
            self._free_unread(states)
            with in_turn():
                self._end_training(stack, sends)
                notes = self._observe(stack)
                stack.end()  # before the updates need memory
                upload = self._make_upload(stack, loss_K, num_seen, notes)
                self._send(upload, states)
                if sends:
                    self._keep(upload, states)
                return upload
        finally:  # also after an error
            program.module.clients = None
            stack.lent_network.take_back()

    def _begin_training(self, drawn: StackDraw) -> LocalTraining:
        """The local training of a stack before its first step: tensors, batches and optimizer."""
        program = self.program
        seed_generators(program.module.device, drawn.seed)
        program.module.lent_network.reset_attributes(program.data.num_clients)
        sizes = program.data.sizes(drawn.clients)
        start = StackStart(self.download.broadcast_model, drawn.clients, sizes, drawn.plan.steps)
        return program.memory.begin_training(start, drawn.plan, program.recordable, program.reads)

    def _prepare(self, training: LocalTraining) -> dict[ClientPart, ClientStates]:
        """Lets parts prepare the stack for its local steps. Returns the clients' states by part."""
        program = self.program
        stack = training.stack
        states = {part: self._states(part, stack.clients) for part in program.parts}
        for part in program.parts:
            prepared = part.prepare(stack, states[part], self.download) or {}
            if part in program.in_steps:
                prepared = training.prepare(part, prepared)
            stack.prepared[part] = prepared
        stack.load_counters()  # a part may have changed ``full``
        return states

    def _states(self, part: ClientPart, clients: np.ndarray) -> ClientStates:
        """The states that these clients keep for a part."""
        download = self.download
        if not part.keeps:
            return ClientStates(())
        states = ClientStates(part.stores.versions(next(iter(part.keeps)), clients))
        for name, kept in part.keeps.items():
            like = kept.like(part, download)
            start = download.broadcast_model if kept.starts_at_model else None
            states[name] = part.stores.read(name, clients, like, default=start)
        return states

    def _free_unread(self, states: dict[ClientPart, ClientStates]) -> None:
        """Frees the states of parts that read them before local training only."""
        for part in states:
            if not part.overrides("send", "keep"):
                states[part] = ClientStates()

    def _end_training(self, stack: ClientStack, sends: bool) -> None:
        """Lets parts see each client's own weights. Writes states that come from them."""
        download = self.download
        for part in self.program.parts:
            states = part.on_clients_end(stack, download)
            if not (states and sends):
                continue
            has_finite_weights = finite_clients(stack.full)
            for name, values in states.items():
                finite = has_finite_weights & finite_clients(values)
                part.stores.write(name, stack.clients, values, download.round_index, finite)

    def _observe(self, stack: ClientStack) -> dict[str, Params]:
        """What the parts note of the stack, by title."""
        notes: dict[str, Params] = {}
        for part in self.program.parts:
            note = part.observe(stack, self.download)
            if note is not None:
                notes[part.title] = note
        return notes

    def _make_upload(
        self,
        stack: ClientStack,
        loss_K: Tensor,
        num_seen: np.ndarray,
        notes: dict[str, Params],
    ) -> Upload:
        """Makes the uploads of a stack, before parts add to them."""
        program = self.program
        delta = stack.delta()
        # A part that edits uploads may still clip what is too large.
        limit = inf if program.edits_uploads else program.limit
        return Upload(
            clients=stack.clients,
            num_samples=stack.num_samples,
            num_steps=stack.num_steps,
            delta=delta,
            finite=finite_clients(delta, limit),
            round_index=self.download.round_index,
            loss=loss_K,
            num_seen=num_seen,
            notes=notes,
        )

    def _send(self, upload: Upload, states: Mapping[ClientPart, ClientStates]) -> None:
        """Lets parts edit the uploads and send more."""
        program = self.program
        for part in program.parts:
            part.send(upload, states[part], self.download)
        if program.edits_uploads:
            upload.finite = upload.finite & sendable(upload, program.limit)

    def _keep(self, upload: Upload, states: Mapping[ClientPart, ClientStates]) -> None:
        """Writes the new states of the clients whose upload is finite."""
        program = self.program
        download = self.download
        for part in program.parts:
            for name, values in (part.keep(upload, states[part], download) or {}).items():
                # An edited state has left out the other clients itself.
                finite = None if isinstance(values, EditedState) else upload.finite
                part.stores.write(name, upload.clients, values, download.round_index, finite)
        if program.reply_parts:
            self.sent.append(SentUploads(upload.clients, upload.finite))

    def reply(self, reply: Mapping[str, Params]) -> None:
        """Hands the server's reply to the clients that have uploaded in this round."""
        for part in self.program.reply_parts:
            for clients, finite in self.sent:
                states = self._states(part, clients)
                new_states = part.on_reply(reply, states, self.download) or {}
                for name, values in new_states.items():
                    part.stores.write(name, clients, values, self.download.round_index, finite)
