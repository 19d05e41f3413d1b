"""The clients' program: it trains K clients from a download and makes their uploads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from gcfed.data.faults import Faults
from gcfed.federated.aggregate import Aggregator, narrow_of
from gcfed.federated.messages import Download, Upload, finite_clients, sendable
from gcfed.federated.method import ClientPart, Own, Part
from gcfed.federated.module import FederatedModule, hears_of_steps
from gcfed.federated.training.forward import Params
from gcfed.federated.training.solver import LocalSolver
from gcfed.federated.training.stack import ClientStack
from gcfed.utils.rng import seed_generators, torch_seed

IN_STEPS = ("before_step", "calibrate", "local_loss", "on_after_backward", "after_step")


@dataclass
class ClientProgram:
    """Trains clients. It reads only a download, the clients' data and their stores.

    Attributes:
        module: provides the network and calls Lightning's hooks. Its weights are never read.
        faults: make some clients do fewer steps.
        aggregator: knows which numbers the server can add up.
        download: the download of the present round.
        sent: the clients ``[K]`` that have uploaded in this round, and which of them were finite.
    """

    module: FederatedModule
    data: Any
    solver: LocalSolver
    parts: Sequence[ClientPart]
    faults: Faults = field(default_factory=Faults)
    aggregator: Aggregator | None = None
    download: Download = field(init=False)
    sent: list[tuple[np.ndarray, Tensor]] = field(init=False)

    def receive(self, download: Download) -> None:
        """Takes the server's download."""
        self.download, self.sent = download, []
        self.module.net.train()
        for part in self.parts:
            part.on_download(download)

    def train(
        self,
        download: Download,
        clients: np.ndarray,
        in_turn: Callable[[], AbstractContextManager] = nullcontext,
        sends: bool = True,
    ) -> Upload:
        """Trains the clients ``[K]`` side by side, and returns their uploads.

        Args:
            in_turn: context of the code that must not run while another stack trains.
            sends: whether the uploads are sent. If not, clients keep nothing.
        """
        module, data, parts, device = self.module, self.data, self.parts, self.module.device
        plan = self.solver.plan(data, clients, download, device)
        done = self.faults.steps(plan.steps, clients, download.round, download.seed)
        if (done < plan.steps).any():
            plan = plan.cut(done)
        in_steps = [part for part in parts if part.overrides(*IN_STEPS)]
        others = [c for c in module.trainer.callbacks if not isinstance(c, Part)]  # type: ignore[attr-defined]
        recordable = all(part.recordable for part in in_steps) and not any(
            map(hears_of_steps, others)
        )
        recorder = (
            self.solver.recorder(module.net, device)
            if recordable and not module.lent.traits.assigns
            else None
        )
        # padding would change the statistics of a batch
        if recorder is not None and not module.lent.traits.alone:
            plan = plan.padded()
        seed_generators(
            device, torch_seed(download.seed, "dropout", download.round, int(clients[0]))
        )
        reads = {read for part in parts for read in part.reads}
        make = partial(ClientStack, module.net, reads=reads, task=module.task, lent=module.lent)
        # Not inherited, because the hooks of a subclass may differ.
        lasting = all(
            vars(part).get("recordable", vars(type(part)).get("recordable")) == "run"
            for part in in_steps
        )
        steps = self.solver.begin(make, download, clients, plan, data, recorder, lasting)
        stack = steps.stack
        try:
            module.clients = stack
            owns = {part: self._own(part, clients, download) for part in parts}
            for part in parts:
                prepared = part.prepare(stack, owns[part], download) or {}
                stack.prepared[part] = (
                    steps.prepare(part, prepared) if part in in_steps else prepared
                )
            stack.count_from_full()  # a part may have changed ``full``
            autocast = module.trainer.precision_plugin.forward_context
            hook = module.after_backward()
            loss_K = self.solver.train(steps, data, download.lr, parts, hook, autocast)
            del steps  # frees the optimizer's state
            module.clients = None
            owns = {
                part: own if part.overrides("send", "keep") else Own() for part, own in owns.items()
            }
            with in_turn():
                return self._pack(stack, owns, download, loss_K, plan.counts.sum(1), sends)
        finally:
            stack.lent.end()

    def _own(self, part: ClientPart, clients: np.ndarray, download: Download) -> Own:
        """The states that these clients keep for a part."""
        own = Own(part.stores.versions(next(iter(part.keeps)), clients) if part.keeps else ())
        for name, kept in part.keeps.items():
            start = download.model if kept.starts_at_model else None
            own[name] = part.stores.read(name, clients, kept.like(part, download), default=start)
        return own

    def _pack(
        self,
        stack: ClientStack,
        owns: Mapping[ClientPart, Own],
        download: Download,
        loss_K: Tensor,
        num_seen: np.ndarray,
        sends: bool,
    ) -> Upload:
        """Makes the uploads of a stack.

        If it ``sends`` them, also writes the clients' new states.
        """
        for part in self.parts:
            for name, values in (part.on_clients_end(stack, download) or {}).items():
                if sends:
                    finite = finite_clients(stack.full) & finite_clients(values)
                    part.stores.write(name, stack.clients, values, download.round, finite)
        notes = {
            part.title: note
            for part in self.parts
            if (note := part.observe(stack, download)) is not None
        }
        stack.prepared.clear()
        delta, narrow = stack.delta(), narrow_of(self.aggregator)
        upload = Upload(
            stack.clients,
            stack.num_samples,
            stack.num_steps,
            delta,
            finite_clients(delta, narrow),
            download.round,
            loss_K,
            num_seen,
            notes=notes,
        )
        for part in self.parts:
            part.send(upload, owns[part], download)
        if any(part.overrides("send") for part in self.parts):
            upload.finite = upload.finite & sendable(upload, narrow)
        for part in self.parts if sends else ():
            for name, values in (part.keep(upload, owns[part], download) or {}).items():
                # A part that edits a state in place leaves out clients itself, without a wait for
                # the device.
                counts = None if values is owns[part].get(name) else upload.finite
                part.stores.write(name, stack.clients, values, download.round, counts)
        if sends:
            self.sent.append((upload.clients, upload.finite))
        return upload

    def reply(self, reply: Mapping[str, Params]) -> None:
        """Hands the server's reply to the clients that have uploaded in this round."""
        for part in self.parts:
            for clients, finite in self.sent if part.overrides("hear") else ():
                own = self._own(part, clients, self.download)
                for name, values in (part.hear(reply, own, self.download) or {}).items():
                    part.stores.write(name, clients, values, self.download.round, finite)
