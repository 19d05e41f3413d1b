"""What a run of a study has to do, as far as its cost goes: read from a config, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gcfed.study.state import Made

# Samples to train on and to test on, which no config says: a data set that is not here has no estimate before a run of
# it is finished.
SAMPLES = {
    "digits": (1_437, 360), "cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000), "mnist": (60_000, 10_000),
    "fashion_mnist": (60_000, 10_000), "emnist": (697_932, 116_323), "emnist_balanced": (112_800, 18_800),
    "tinyimagenet": (100_000, 10_000), "hwdigits4": (200_000, 47_000), "hwdigits40": (200_000, 47_000),
    "tiny_shakespeare": (12_500, 1_400),
}  # fmt: skip
# LEAF's, a client: its pages' means over all users. Of Shakespeare, whose roles differ a thousandfold, a rough guess.
SAMPLES_A_CLIENT = {"femnist": (204, 23), "celeba": (19, 2), "shakespeare": (3_000, 700)}
CLIENTS = 1000  # where the data set says how many there are

# Settings in which methods differ: runs that are alike but for them have rounds of the same work.
_METHOD = (
    "tags.algorithm", "tags.gc", "gc.", "methods", "server.", "aggregator.", "quantization", "partition.", "seed",
    "client.optimizer.", "client.clip_norm",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A run's work.

    Attributes:
        kind: what rounds of equal cost have in common, whatever the method: data, model, device, processes, …
        client_steps: whole batches that a client trains on in a round, on average; None: nobody knows.
        test_samples: of all clients; None: nobody knows.
    """

    kind: str
    algorithm: str
    rounds: int
    eval_every: int
    num_clients: int
    per_round: int
    client_steps: float | None
    test_samples: float | None


def task_of(made: Made, get: Callable[[str], Any]) -> Task:
    """Of a run or a composed config, of which ``get`` is the look-up by dotted key; None where there is no such key."""
    alike = {key: value for key, value in made.setting.items() if not key.startswith(_METHOD)}
    layout = {key: str(get(f"trainer.{key}")) for key in ("accelerator", "devices", "strategy._target_")}
    every = min(made.eval_every, made.rounds)
    clients, batch = get("participation.num_clients") or CLIENTS, get("client.batch_size")
    train, test = _samples(get, clients)
    steps = get("client.steps") or (get("client.epochs") * train / clients / batch if train else None)
    return Task(
        kind=repr((sorted(alike.items()), layout, every, made.metrics)),
        algorithm=str(get("tags.algorithm")),
        rounds=made.rounds,
        eval_every=every,
        num_clients=clients,
        per_round=int(get("participation.per_round")),
        client_steps=steps,
        test_samples=test,
    )


def _samples(get: Callable[[str], Any], clients: int) -> tuple[float | None, float | None]:
    """Training and test samples of all clients; None where nobody knows."""
    data, train, test = get("tags.data"), get("data.dataset.num_train"), get("data.dataset.num_test")  # synthetic
    if data in SAMPLES_A_CLIENT:
        train, test = (count * clients for count in SAMPLES_A_CLIENT[data])
    elif data in SAMPLES:
        train, test = SAMPLES[data]
    elif (count := get("data.dataset.samples")) is not None:  # matrix_regression
        train, test = count * clients, get("data.dataset.test_samples") * clients
    limits = get("data.limit_train"), get("data.limit_test")
    train, test = (n if n is None else min(n, limit or n) for n, limit in zip((train, test), limits, strict=True))
    return train, test
