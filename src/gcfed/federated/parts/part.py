"""What every part of a method is, and what it sees of a run before the first round."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from lightning.pytorch import Callback
from torch import Tensor
from torch.optim import Optimizer

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.parallel.sums import LIMIT
from gcfed.federated.parts.transport import Transport
from gcfed.federated.protocol.messages import Params, Upload
from gcfed.federated.protocol.rounds import Round
from gcfed.federated.state.client_states import KeptState
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.solver import LocalSolver
from gcfed.models.facts import two_zeros
from gcfed.models.forward_watch import order_for_gc
from gcfed.models.order import ForwardOrder
from gcfed.optim.partial import probe_optimizer
from gcfed.participation.faults import Faults
from gcfed.participation.schedule import Participation


class Order(IntEnum):
    """What a part does to a client's step or upload.

    The parts of a run are called in this order.
    """

    # moves the weights of a step, and moves them back before other parts read them; a server part
    # moves the start before other parts read it
    MOVES_WEIGHTS = 0
    CORRECTS = 1  # adds terms and corrects the gradient; GC comes last
    PROJECTS = 2  # projects on a subspace, which a later edit would leave
    SHORTENS = 3  # clips an update after the others have read it
    ATTACKS = 4  # changes the finished update
    QUANTIZES = 5  # rounds the result
    MEASURES = 6  # sees the upload


class Fact(StrEnum):
    """What other parts or the engine must know of a part (:attr:`Part.facts`)."""

    #: Its clients do not start at the server's model.
    MOVES_START = "moves the start"
    #: It estimates the clients' drift from their updates. Two such methods would correct it twice.
    CORRECTS_DRIFT = "corrects drift"
    #: Its ``on_aggregate_end`` reads or edits Δ. Another such part would see only the result.
    EDITS_MEAN = "edits the mean"
    #: It compares a client's weights with the broadcast ones, so the client must start there.
    ANCHORS = "anchors"
    #: It runs the broadcast model as a teacher, so that model must be complete.
    TEACHES = "teaches with the broadcast model"
    #: It looks at all clients of the cohort at once, as colluding clients do.
    SEES_COHORT = "sees the cohort"
    #: Its server steps in every round, because a step must not reveal whether a client answered.
    STEPS_WITHOUT_CLIENTS = "steps without clients"
    #: It asks the transport what clients would send.
    REHEARSES = "rehearses"
    #: Server and clients understand only messages of the same round, so no client may be late.
    ONE_ROUND = "one round's messages"
    #: It divides by the learning rate of the round, and a late client has had an earlier one.
    ONE_RATE = "one rate"
    #: Its updates may have entries of 2¹¹ and more, for which the mean needs a wider grid.
    LONG_UPDATES = "long updates"


Need = Callable[["Setup", str], None]
"""Takes the setup and the title of a part; raises Refusal if the setup lacks something that the
part needs.
"""


class Part(Callback):
    """One side of a method: what :class:`ClientPart` and :class:`ServerPart` share.

    Attributes:
        order: when its hooks are called.
        facts: what others must know of it.
        needs: requirements on the rest of the run (:mod:`gcfed.methods.requirements`).
        keeps: what each client keeps between rounds, by a name that no other part uses. A server
            part keeps a table.
        method: the name of its method; empty for a part that is a method by itself.
        writes: the columns that it adds to the row of metrics; ``gc/rho/*`` stands for one per
            tensor. None: it may add any. A class that overrides ``on_round_end`` or ``columns``
            does not inherit it.
        result: the column of ``metrics.csv`` by which the method is judged, such as
            ``personal/local_acc``; empty for the test of the global model.
        trained_names: the parameters that are trained, in order; known in ``bind``.
    """

    order = Order.CORRECTS
    facts: Set[str] = frozenset()
    needs: Sequence[Need] = ()
    keeps: Mapping[str, KeptState] = {}
    writes: Sequence[str] | None = None
    method = ""
    result = ""
    trained_names: list[str]
    stores: ClientStores

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self,)

    @property
    def title(self) -> str:
        return self.method or type(self).__name__

    def trained(self, tensors: Mapping[str, Tensor]) -> Params:
        """The trained parameters among these tensors, in order, by name."""
        return {name: tensors[name] for name in self.trained_names}

    def check_run(self, setup: Setup) -> None:
        """Checks the run before the first round.

        Raises Refusal with the key if the part cannot work in it.
        """
        for need in self.needs:
            need(setup, self.title)
        self.validate(setup)

    def join_run(self, setup: Setup) -> None:
        """Takes what the part and the engine need of the run, after the checks of all parts."""
        self.trained_names = setup.names
        self.stores = setup.stores
        self.stores.names |= self.keeps.keys()
        self.bind(setup)

    def personal_tensors(self, setup: Setup) -> Iterable[str]:
        """Names of the tensors that each client keeps instead of the broadcast ones."""
        return ()

    def validate(self, setup: Setup) -> None:
        """Further checks of a part, called by :meth:`check_run`. Raises Refusal in the same way.

        It changes nothing.
        """

    def bind(self, setup: Setup) -> None:
        """Takes what the part's hooks need of the run, called by :meth:`join_run`.

        May raise Refusal, too.
        """


class Accumulator(ABC):
    """What this process adds up in one round. The aggregator makes a new one for each round."""

    @abstractmethod
    def add(self, upload: Upload) -> None:
        """Adds the updates of K clients, ``upload.delta``: name → ``[K, *shape]``.

        Uploads arrive in any order. Clients that are not ``upload.finite`` must not count.
        """

    @abstractmethod
    def reduce(self, like: Params) -> Params:
        """Returns the aggregate over all processes, name → ``[*shape]``; zeros if no client counts.

        Called once, on every process. ``like`` gives the shapes to a process that trained no
        client.
        """


class Aggregator(ABC):
    """Turns the uploads of a round into one update.

    It has settings only. What it adds up is in the :class:`Accumulator` of the round, so a round
    that was interrupted leaves nothing behind. State that outlives a round belongs to a method.

    Attributes:
        limit: numbers must be below it, except those in float64. A client with a larger one is left
            out.
    """

    limit: float = LIMIT

    def validate(self, setup: Setup) -> None:  # noqa: B027 (an aggregator may need no setup)
        """Checks the run before the first round.

        Raises Refusal if the rule cannot work in it, such as with a cohort that is too small.
        """

    def bind(self, setup: Setup) -> None:  # noqa: B027
        """Takes what the rule needs of the run, after all checks."""

    @abstractmethod
    def new_sum(self, round: Round) -> Accumulator:
        """Makes the sum of Δ over the round's uploads, without an upload."""

    def new_extra_sum(self, round: Round) -> Accumulator:
        """Makes the sum of what clients send in addition to Δ, without an upload."""
        return self.new_sum(round)


@dataclass(frozen=True)
class Setup:
    """What each part sees of the run before the first round.

    Attributes:
        stores: hold the states of clients, and server parts' tables with a row per client.
        module: the global model and its server optimizer.
        parts: of all methods of the run, in the order of their hooks.
        rounds: R, the number of communication rounds.
        sampler: the rule of participation.
        transport: carries messages (``federated/engine/simulation.py``). A server part may ask it
            what clients would send.
    """

    sampler: Participation
    faults: Faults
    solver: LocalSolver
    aggregator: Aggregator
    stores: ClientStores
    data: FederatedDataModule
    module: FederatedModule
    parts: Sequence[Part]
    rounds: int
    transport: Transport

    @property
    def cohort_size(self) -> int:
        """The number of clients whose uploads a round uses, without those that drop out; with
        ``participation=poisson`` the mean number.
        """
        return self.faults.used(self.sampler.per_round)

    @functools.cached_property
    def names(self) -> list[str]:
        """The parameters that are trained, in order."""
        return [name for name, p in self.module.net.named_parameters() if p.requires_grad]

    @functools.cached_property
    def local_optimizer_probe(self) -> Optimizer:
        """An optimizer like the clients', which shows its class and settings."""
        return probe_optimizer(self.solver.optimizer)

    @functools.cached_property
    def server_optimizer_probe(self) -> Optimizer:
        """An optimizer like the server's, which shows its class and settings."""
        return probe_optimizer(self.module.make_optimizer)

    @functools.cached_property
    def forward_order(self) -> ForwardOrder:
        """The order in which a forward pass uses the parameters."""
        net = self.module.net
        x_2 = self.data.two_samples()
        if x_2 is None:  # a server without data
            x_2 = two_zeros(net, self.data.input_shape)
        return order_for_gc(net, x_2)

    @functools.cached_property
    def no_steps(self) -> set[str]:
        """Entries of Δ that are no optimizer steps and often larger: running statistics, and
        entries that clients keep.
        """
        statistics = {*self.module.travels} - {*self.names}
        return statistics.union(*(part.personal_tensors(self) for part in self.parts))
