"""Small runs through the real loop, and the objects that tests of its parts need."""

import re
import threading
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader

from gcfed.aggregators.mean import MeanAggregator
from gcfed.federated.engine.client import ClientProgram
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.engine.simulation import Simulation
from gcfed.federated.network.lent_network import travelling_state
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.stack import ClientStack, StackStart
from gcfed.federated.parallel import sums as sums_module
from gcfed.federated.parallel.strategy import CohortStrategy
from gcfed.federated.parts import ClientPart, Order, ServerPart, Setup
from gcfed.federated.parts.method import parts_of
from gcfed.federated.protocol.checks import finite_clients
from gcfed.federated.protocol.messages import Download, Upload
from gcfed.federated.protocol.rounds import Received, Round
from gcfed.federated.state.store import ClientStores
from gcfed.federated.training.solver import LocalSolver
from gcfed.participation.clock import Clock
from gcfed.participation.faults import Faults
from gcfed.participation.schedule import Sampler
from gcfed.tasks import CLASSIFICATION
from gcfed.utils.resolvers import ROOT
from gcfed.wire import Wire

ALL = sorted({path.stem for path in (ROOT / "configs/algorithm").glob("*.yaml")} - {"gcfed"})
ALGORITHMS = [name for name in ALL if name != "fedzmg"]  # FedAvg with gc=local
# This project's own, which have a row in methods.md. A user's own YAML has none.
DOCUMENTED = [
    name
    for name in ALL
    if re.search(rf"^\|[^|]*`{name}`", (ROOT / "docs/methods.md").read_text(), re.MULTILINE)
]
# Those that wait for late clients; tests/methods/server/test_late.py has their contract.
LATE = [
    name
    for name in ALGORITHMS
    if "/participation: buffered" in (ROOT / f"configs/algorithm/{name}.yaml").read_text()
]
# Overrides by algorithm.
FEW_INNER_STEPS = {
    "fedreg": ["methods.fedreg.iterations=2"],
    "pfedme": ["methods.pfedme.inner_steps=2"],
}
CPU = torch.device("cpu")
PLAIN_SERVER = partial(torch.optim.SGD, lr=1.0)


def assert_near(found: torch.Tensor, expected: torch.Tensor, most: float) -> None:
    """No entry differs by more than ``most``."""
    torch.testing.assert_close(found, expected, rtol=0, atol=most)


class ArrayData(LightningDataModule):
    """Clients' data in memory, without a transform and without a test split."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, clients: list[np.ndarray]) -> None:
        super().__init__()
        self.x = x
        self.y = y
        self.clients = clients
        self.num_clients = len(clients)
        self.rounds = 1
        self.input_shape = tuple(x.shape[1:])
        self.num_classes = 1 + int(y.max())

    def client(self, client: int) -> np.ndarray:
        return self.clients[client]

    def sizes(self, clients: np.ndarray | None = None) -> np.ndarray:
        sizes = np.array([len(client) for client in self.clients])
        return sizes if clients is None else sizes[clients]

    def draw(self, rng, shape):
        return None

    def two_samples(self):
        return self.x[[0, len(self.x) - 1]].float()

    def fetch(self, index, augment):
        return self.x[index], self.y[index]

    def to_device(self, device, dtype, memory_format):
        pass

    def train_dataloader(self):
        return DataLoader(range(self.rounds), batch_size=None)

    def val_dataloader(self):
        return DataLoader([])


def random_federation(
    sizes=(7, 12, 5, 9, 1), features=6, classes=4, seed=0, dtype=torch.float64
) -> ArrayData:
    """Clients of unequal sizes with random inputs and labels."""
    g = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    x = torch.randn(n, features, generator=g, dtype=dtype)
    y = torch.randint(classes, (n,), generator=g)
    return ArrayData(x, y, np.split(np.arange(n), np.cumsum(sizes)[:-1]))


def make_net(seed=0, dtype=torch.float64):
    torch.default_generator.manual_seed(seed)  # faster than torch.manual_seed, for the CPU
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).to(dtype)


def sgd(lr=0.1, momentum=0.0, weight_decay=0.0, **kwargs):
    """A local solver with SGD. By default it trains two epochs in batches of four."""
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay)
    return LocalSolver(optimizer, **{"epochs": 2, "batch_size": 4} | kwargs)


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def final_weights(result):
    """The parameters and buffers of a run's last global model, in one vector."""
    tensors = [t for t in result.module.net.state_dict().values() if isinstance(t, torch.Tensor)]
    return torch.cat([t.detach().flatten() for t in tensors])


def without_samples(input_shape):
    """The data of a process that has no samples."""
    return SimpleNamespace(input_shape=input_shape, two_samples=lambda: None)


def make_setup(
    net,
    *,
    methods=(),
    solver=None,
    aggregator=None,
    server=PLAIN_SERVER,
    stores=None,
    data=None,
    task=CLASSIFICATION,
    rounds=1,
    cohort_of=3,
):
    """The ``Setup`` of a run with these methods."""
    parts = parts_of(methods)
    solver = solver or sgd()
    stores = stores or ClientStores()
    module = FederatedModule(net, server, task=task)
    clients = ClientProgram(
        module, data, solver, [part for part in parts if isinstance(part, ClientPart)]
    )
    return Setup(
        Cohorts(cohort_of),
        Faults(),
        solver,
        aggregator or MeanAggregator(),
        stores,
        data,
        module,
        parts,
        rounds,
        Simulation(clients, stores, cohort_of),
    )


def join_run(method, setup):
    """The parts of a method check what they need, and take it."""
    for part in method.parts:
        part.check_run(setup)
    for part in method.parts:
        part.join_run(setup)


def with_batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()


class BesideSimulation(Wire):
    """Clients that get messages as bytes, beside those of the simulation.

    Each side has its own states.
    """

    def __init__(self, simulation, cfg):
        super().__init__(simulation, cfg)
        self.simulation = simulation

    def start(self):
        names = self.stores.names
        self.stores = ClientStores()
        self.stores.names = names
        super().start()

    def reply(self, reply):
        super().reply(reply)
        self.simulation.reply(reply)

    def end_round(self):
        super().end_round()
        self.simulation.end_round()


class Spy(ClientPart, ServerPart):
    """Sees both sides of a round, which no method may do."""


class Sizes(Spy):
    """Records the bytes of each download, and of one upload of each stack."""

    order = Order.MEASURES

    def __init__(self):
        self.down = []
        self.up = []

    def on_broadcast(self, download, round):
        self.down.append(download)  # other parts may add to it later

    def on_receive(self, upload, round):
        self.up.append(bytes_per_client(upload))
        self.down[-1] = getattr(self.down[-1], "nbytes", self.down[-1])


def bytes_per_client(upload):
    """Size of one client's message: float32 norms and bits of quantized tensors, all others as they
    are.
    """
    k = len(upload.clients)
    sizes = {name: t.nbytes // k for name, t in upload.delta.items()}
    for name, levels in upload.levels.items():
        entries = upload.delta[name].numel() // k
        sizes[name] = -(-entries * levels.bits // 8) + 4 * (entries > 0)
    more = sum(t.nbytes for tensors in upload.extra.values() for t in tensors.values())
    return sum(sizes.values()) + more // k


def server_of(method):
    return next(part for part in method.parts if isinstance(part, ServerPart))


def client_of(method):
    return next(part for part in method.parts if isinstance(part, ClientPart))


@dataclass(frozen=True)
class Cohorts(Sampler):
    """Draws a sorted cohort, in descending order for ``order=-1``."""

    order: int = 1

    def __call__(self, t, num_clients, seed):
        return np.sort(np.random.default_rng(t).choice(num_clients, self.per_round, replace=False))[
            :: self.order
        ]


class AtRoundEnd(ServerPart):
    """Calls ``on_round(round, row)`` at the end of each round, with the complete row."""

    def __init__(self, on_round):
        self.on_round = on_round

    def on_round_end(self, row, round):
        self.on_round(round, row)


def trainer_of(callbacks, rounds, **settings):
    """Lightning's trainer without tests, files and output."""
    return Trainer(
        max_steps=rounds,
        max_epochs=-1,
        accelerator="cpu",
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **settings,
    )


def train_rounds(
    net=None,
    data: ArrayData | None = None,
    solver: LocalSolver | None = None,
    *,
    rounds: int,
    methods=(),
    aggregator=None,
    server=PLAIN_SERVER,
    stores=None,
    k=1,
    cohort_of=3,
    seed=5,
    order=1,
    world=1,
    task=CLASSIFICATION,
    faults=None,
    sampler=None,
    clock=None,
    on_round=lambda round, row: None,
    ckpt_path=None,
    saved_to=None,
):
    """Trains ``net`` through the real loop, without tests; returns its weights.

    By default it trains ``make_net()`` on the clients of ``random_federation()`` with ``sgd()``.
    ``k`` clients train in a stack, on ``world`` forked processes. Lightning loads the checkpoint
    ``ckpt_path``, and saves one to ``saved_to``.
    """
    if net is None:
        net = make_net()
    solver = copy(solver or sgd())
    data = copy(data or random_federation())
    solver.stack = k
    data.rounds = rounds
    loop = FederatedLoop(
        sampler=sampler or Cohorts(cohort_of, order),
        solver=solver,
        aggregator=aggregator or MeanAggregator(),
        rounds=rounds,
        seed=seed,
        stores=stores or ClientStores(),
        faults=faults or Faults(),
        clock=clock or Clock(),
    )
    module = FederatedModule(net, server, task=task)
    module.test = lambda watchers: {}
    together = (
        {"strategy": CohortStrategy(cluster_environment=LightningEnvironment())}
        if world > 1
        else {}
    )
    callbacks = [loop, *parts_of(methods), AtRoundEnd(on_round)]
    trainer = trainer_of(callbacks, rounds, devices=world, **together)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    if saved_to is not None:
        trainer.save_checkpoint(saved_to)
    return weights(net)


def stack_of(net, k=1, **how):
    """A stack of the clients 0 … K − 1, with one step each."""
    ones = np.ones(k)
    return ClientStack(net, StackStart(travelling_state(net), np.arange(k), ones, ones), **how)


def of_first_process(calls):
    """What the first of these calls returns.

    Each call runs in a thread, as in a process of its own, and the threads exchange their sums.
    """
    barrier = threading.Barrier(len(calls), timeout=60)
    sent = [None] * len(calls)
    returned = {}
    process = threading.local()

    def sum_over_threads(own):
        sent[process.rank] = own
        barrier.wait()
        totals = [sum(addends) for addends in zip(*sent, strict=True)]
        barrier.wait()
        return totals

    def run(rank):
        process.rank = rank
        returned[rank] = calls[rank]()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums_module, "sum_over_processes", sum_over_threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return returned[0]


def make_upload(delta, sizes, finite=None):
    finite = finite_clients(delta) if finite is None else finite
    return Upload(
        np.arange(len(sizes)), sizes, sizes, delta, finite, 0, torch.ones(len(sizes)), sizes
    )


def make_round(start, lr=0.1):
    cohort = np.array([1, 4])
    return Round(0, 1, cohort, 5, start, lr=lr, versions=np.zeros(2, int))


def make_received(start, num_finite=2, **kwargs):
    """A ``Received`` with ``num_finite`` finite uploads."""
    cohort = np.array([1, 4])
    return Received(
        0,
        1,
        cohort,
        5,
        start,
        **{"lr": 0.1, "answered": cohort} | kwargs,
        versions=np.zeros(2, int),
        num_finite=num_finite,
        usable=num_finite > 0,
    )


def plan_of(data, clients, seed=1, index=0, **solver):
    """The batches of these clients in a round."""
    return sgd(**solver).plan(
        data, np.array(clients), Download(index, seed, 0.0, {}, np.array(clients)), CPU
    )


def make_download(start, index=0, lr=0.1, cohort=(1, 4)):
    return Download(index, 1, lr, dict(start), np.array(cohort))


def listening(process="self"):
    """The addresses and ports on which a process listens, in Linux's notation."""
    own = {
        str(path.readlink()) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()
    }
    tables = (Path("/proc/net", name).read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {cells[1] for cells in lines if cells[3] == "0A" and f"socket:[{cells[9]}]" in own}


class Listening(Callback):
    """Writes to a file the addresses on which a process of a run listens."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.before = listening()

    def on_train_start(self, trainer, *_):
        found = {place.split(":")[0] for place in listening() - self.before}
        (self.folder / f"listening_{trainer.global_rank}").write_text(" ".join(found))
