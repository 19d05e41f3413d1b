"""What a run of a study has to do, as far as its cost goes: read from a config, before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

# Samples to train on and to test on.
SAMPLES = {
    "digits": (1_437, 360), "cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000), "mnist": (60_000, 10_000),
    "fashion_mnist": (60_000, 10_000), "emnist": (697_932, 116_323), "emnist_balanced": (112_800, 18_800),
    "tinyimagenet": (100_000, 10_000), "hwdigits4": (200_000, 47_000), "hwdigits40": (200_000, 47_000),
    "tiny_shakespeare": (12_500, 1_400),
}  # fmt: skip
# LEAF's, a client: its pages' means over all users. Of Shakespeare, whose roles differ a thousandfold, a rough guess.
SAMPLES_A_CLIENT = {"femnist": (204, 23), "celeba": (19, 2), "shakespeare": (3_000, 700)}

# A round's training with each method, as a multiple of FedAvg's; those that are not named took 0.94 to 1.09. Measured
# with the CNN on CIFAR-10's shapes, one epoch a round, batches of 50, in seconds of one thread. What is done
# once a round, such as FedCurv's Fisher information and SSF's bases, weighs less where there are more epochs.
STEPS = {
    "fedcurv": 5.4, "fedgc": 1.2, "fedmlb": 1.6, "fedntd": 1.2, "fedreg": 18.0, "fedsam": 1.8, "fedsol": 2.3,
    "fedsub": 4.1, "moon": 1.5, "ssf": 2.6,
}  # fmt: skip
# Models that a method keeps of each client, on the disk once the client has taken part.
STATES = {"feddc": 2, "fedcurv": 2, "fedvarp": 1, "feddyn": 1, "ssf": 1, "fedsub": 1, "moon": 1, "scaffold": 1}


@dataclass(frozen=True)
class Work:
    """What a round is made of; runs with the same work differ by their method and by the number of their rounds.

    Attributes:
        client_samples: of a client, on average.
        num_clients: None: all that the data set has.
    """

    data: str
    model: str
    precision: str
    num_clients: int | None
    per_round: int
    epochs: int
    steps: int | None
    batch_size: int
    client_samples: float
    test_samples: float

    @property
    def client_steps(self) -> float:
        """Whole batches that a client trains on in a round; a client with less than a batch has a part of one."""
        return self.steps or self.epochs * self.client_samples / self.batch_size


@dataclass(frozen=True)
class Task:
    """A job's work and how much of it."""

    work: Work
    algorithm: str
    rounds: int
    eval_every: int

    def by(self, algorithm: str | None) -> Task:
        """The same under another algorithm; None leaves it."""
        return replace(self, algorithm=algorithm or self.algorithm)


def task_of(get: Callable[[str], Any]) -> Task:
    """From a config, of which ``get`` is the look-up by dotted key; None where there is no such key.

    Raises:
        ValueError: nobody knows how many samples the data set has.
    """
    data, clients, rounds = get("tags.data"), get("participation.num_clients"), int(get("rounds"))
    client_samples, test_samples = _samples(get, data, clients)
    work = Work(
        data=data,
        model=get("tags.model"),
        precision=get("precision"),
        num_clients=clients,
        per_round=int(get("participation.per_round")),
        epochs=int(get("client.epochs")),
        steps=get("client.steps"),
        batch_size=int(get("client.batch_size")),
        client_samples=client_samples,
        test_samples=test_samples,
    )
    return Task(work, get("tags.algorithm"), rounds, min(int(get("eval_every")), rounds))


def _samples(get: Callable[[str], Any], data: str, clients: int | None) -> tuple[float, float]:
    """Training samples of a client, and test samples of all."""
    train: float
    test: float
    if data in SAMPLES_A_CLIENT:
        train, test = (count * (clients or 1000) for count in SAMPLES_A_CLIENT[data])
    elif data in SAMPLES:
        train, test = SAMPLES[data]
    elif (count := get("data.dataset.num_train")) is not None:  # synthetic
        train, test = count, get("data.dataset.num_test")
    elif (count := get("data.dataset.samples")) is not None:  # matrix_regression
        train, test = count * (clients or 1), get("data.dataset.test_samples") * (clients or 1)
    else:
        raise ValueError(f"data={data}: its number of samples is not known to gcfed.study.work, which estimates cost.")
    train, test = min(train, get("data.limit_train") or train), min(test, get("data.limit_test") or test)
    return train / (clients or 1000), test
