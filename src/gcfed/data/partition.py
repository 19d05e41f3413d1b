"""Which client holds which training sample: a pure function of (labels, seed, parameters).

Every partitioner names one owner per sample, so that no sample can be dealt twice, and is called as

    partitioner(labels, num_clients, seed=1, groups=None) -> Partition
"""

import logging
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from gcfed.data.dealing import cut, deal, fill_up, log_gamma, placed, softmax
from gcfed.utils.checked import Count, checked
from gcfed.utils.files import replacing
from gcfed.utils.rng import generator

log = logging.getLogger(__name__)
Alpha = Annotated[float, Field(ge=1e-100, le=1e100)]  # within which a Dirichlet draw stays within float64


@dataclass(frozen=True, eq=False)
class Partition:
    """Clients' sample indices in CSR form: client k holds ``indices[offsets[k]:offsets[k + 1]]``, in ascending order.

    indices: int64 [n_assigned].  offsets: int64 [N + 1].
    """

    indices: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_owners(cls, owner_n: np.ndarray, num_clients: int) -> "Partition":
        """From the owner of each sample, int64 [n] with −1 for a sample that nobody holds."""
        order = np.argsort(owner_n, kind="stable")
        sizes = np.bincount(owner_n[owner_n >= 0], minlength=num_clients)
        return cls(order[len(order) - sizes.sum() :], np.concatenate([[0], np.cumsum(sizes)]))

    @property
    def num_clients(self) -> int:
        return len(self.offsets) - 1

    def owners(self, num_samples: int) -> np.ndarray:
        """The client of each sample, int64 [n], −1 for none."""
        owner_n = np.full(num_samples, -1)
        owner_n[self.indices] = np.repeat(np.arange(self.num_clients), self.sizes)
        return owner_n

    @cached_property
    def sizes(self) -> np.ndarray:
        """Samples held by each client, int64 [N]."""
        return np.diff(self.offsets)

    def client(self, k: int) -> np.ndarray:
        """Client ``k``'s sample indices, a view of int64 [n_k]."""
        return self.indices[self.offsets[k] : self.offsets[k + 1]]

    def parted(self, share: float, seed: int) -> tuple["Partition", "Partition"]:
        """Each client's samples in two: those that it keeps, and a share, drawn by the seed, that is set aside.

        The share is rounded; a client with samples keeps at least one.
        """
        sizes_N = self.sizes
        aside_N = np.minimum(np.rint(share * sizes_N).astype(np.int64), np.maximum(sizes_N - 1, 0))
        owner_n = np.repeat(np.arange(self.num_clients), sizes_N)
        order = np.lexsort((generator(seed, "client_test").random(len(owner_n)), owner_n))
        rank_n = np.arange(len(owner_n)) - np.repeat(self.offsets[:-1], sizes_N)
        aside_n = placed(rank_n < np.repeat(aside_N, sizes_N), order)
        kept, aside = (np.concatenate([[0], np.cumsum(sizes)]) for sizes in (sizes_N - aside_N, aside_N))
        return Partition(self.indices[~aside_n], kept), Partition(self.indices[aside_n], aside)

    def label_counts(self, labels: np.ndarray, num_classes: int, clients: np.ndarray | None = None) -> np.ndarray:
        """Labels of each class at each client (all of them, or ``clients`` in their order), int64 [N, C].

        ``labels`` are those of all samples, [n], or [n, T] with negative ones for padding.
        """
        clients = np.arange(self.num_clients) if clients is None else clients
        held = labels[np.concatenate([self.client(k) for k in clients.tolist()])]
        real = held >= 0
        row = np.repeat(np.repeat(np.arange(len(clients)), self.sizes[clients]), real.reshape(len(held), -1).sum(1))
        flat = np.bincount(row * num_classes + held[real], minlength=len(clients) * num_classes)
        return flat.reshape(len(clients), num_classes)

    def save(self, path: Path) -> None:
        """Write an ``.npz``, in one step: a reader finds the old file or the new one."""
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, indices=self.indices, offsets=self.offsets)


class Partitioner:
    """Says who holds which sample: :meth:`owners`, for labels and a number of clients that go together.

    ``labels`` are [n], or [n, T] for sequences and [n, C] for targets, which partitions by class refuse.

    Raises, when called, ValueError where the parameters or the data cannot give every client what it is promised.
    """

    by_class: ClassVar[bool] = True
    least: ClassVar[str] = ""  # the setting that says how many samples a client has at least; "": one

    def __call__(
        self, labels: np.ndarray, num_clients: int | None, *, seed: int, groups: np.ndarray | None = None
    ) -> Partition:
        if self.by_class and labels.ndim > 1:
            raise ValueError(
                "this partition needs one class for each sample, and these have sequences of labels, or numbers to "
                "regress on (classes are integers): choose partition=natural, sizes or iid"
            )
        if not num_clients:
            raise ValueError(f"participation.num_clients={num_clients} must be set: null is for partition=natural.")
        least = getattr(self, self.least) if self.least else 1
        if num_clients * least > len(labels):
            raise ValueError(
                f"participation.num_clients={num_clients} with at least {least} samples each needs more than the "
                f"{len(labels)} training samples: lower it" + (f" or partition.{self.least}" if least > 1 else "")
            )
        made, n = np.asarray(self.owners(labels, num_clients, generator(seed, "partition"))), len(labels)
        if made.dtype.kind not in "iu" or made.shape != (n,) or made.min() < -1 or made.max() >= num_clients:
            wanted = f"integers [{n}], of clients 0 … {num_clients - 1}, or -1 for none"
            raise ValueError(f"partition: {type(self).__name__}.owners must return {wanted}: it returned {made}.")
        return Partition.from_owners(made, num_clients)

    def owners(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """The client of each sample, int64 [n], −1 for none."""
        raise NotImplementedError


@checked
@dataclass(frozen=True)
class IID(Partitioner):
    """Samples at random; sizes differ by at most one."""

    by_class = False

    def owners(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        return placed(np.arange(len(labels)) % num_clients, rng.permutation(len(labels)))


@checked
@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Unequal sizes and label mixes, as in GC-Fed's experiments: each class is spread by its own Dirichlet(α) draw.

    Class after class, the draw is renormalised over the clients that hold fewer than n/N samples. All is drawn again
    until every client has ``min_size`` samples, at most ``max_tries`` times. The last draw is then repaired: random
    samples of the largest clients, which are cut to one level, go to those that are short. Every sample is assigned.
    """

    least = "min_size"
    alpha: Alpha
    min_size: Count = 1
    max_tries: Count = 1000

    def owners(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        class_sizes = np.unique(labels, return_counts=True)[1]
        # If the number of short clients is Poisson with mean m, a draw succeeds with probability exp(−m). Far above
        # ln(max_tries) all tries would fail, so the first draw is repaired at once.
        hopeless = 10 + 3 * np.log(self.max_tries)
        for _ in range(self.max_tries):
            counts_CN = self._draw(class_sizes, num_clients, rng)
            short = np.count_nonzero(counts_CN.sum(0) < self.min_size)
            if short == 0 or short > hopeless:
                break
        owner_n = deal(counts_CN, labels, rng)
        if short:
            log.info("Dirichlet(%g): %d of %d clients were short and are filled up", self.alpha, short, num_clients)
            fill_up(owner_n, num_clients, self.min_size, rng)
        return owner_n

    def _draw(self, class_sizes: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        counts_CN = np.zeros((len(class_sizes), num_clients), np.int64)
        held_N = np.zeros(num_clients, np.int64)
        for counts_N, size in zip(counts_CN, class_sizes, strict=True):
            # Never empty: were everyone at the mean, nothing would be left to deal.
            open_N = held_N * num_clients < class_sizes.sum()
            counts_N[:] = cut(softmax(np.where(open_N, log_gamma(self.alpha, (num_clients,), rng), -np.inf)), size)
            held_N += counts_N
        return counts_CN


@checked
@dataclass(frozen=True)
class DirichletBalanced(Partitioner):
    """Equal sizes, unequal label mixes (FedACG, after Hsu et al. 2019): each client's mix is a Dirichlet(α) draw.

    All clients get n // N samples; n mod N samples belong to nobody. All clients draw at once. If they ask for more
    samples of a class than there are, chance decides who gets them, and the others draw again from the rest, by their
    renormalised mixes.
    """

    alpha: Alpha

    def owners(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        left_C = np.unique(labels, return_counts=True)[1]
        log_mix_NC = log_gamma(self.alpha, (num_clients, len(left_C)), rng)
        counts_NC = np.zeros((num_clients, len(left_C)), np.int64)
        missing_N = np.full(num_clients, len(labels) // num_clients)
        # Ends after at most C rounds: one that leaves anybody short has exhausted a class.
        while (asking := np.flatnonzero(missing_N)).size:
            classes = np.flatnonzero(left_C)
            wanted = rng.multinomial(missing_N[asking], softmax(log_mix_NC[np.ix_(asking, classes)]))
            for column, c in enumerate(classes):
                if wanted[:, column].sum() > left_C[c]:
                    share = rng.multivariate_hypergeometric(wanted[:, column], left_C[c], method="marginals")
                    wanted[:, column] = share
            counts_NC[np.ix_(asking, classes)] += wanted
            left_C[classes] -= wanted.sum(0)
            missing_N[asking] -= wanted.sum(1)
        return deal(counts_NC.T, labels, rng)


@checked
@dataclass(frozen=True)
class ClassesPerClient(Partitioner):
    """Each client holds ``classes`` different classes; a class is cut into equal shards, one for each of its holders.

    The numbers of holders of two classes differ by at most one. With ``classes=1`` client k holds class k mod C
    (FedGC's CIFAR10-10 for N = C); else classes are dealt from shuffled decks. With N · classes < C some classes
    belong to nobody, which is logged as a warning.
    """

    classes: Count = 1

    def owners(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        present, class_sizes = np.unique(labels, return_counts=True)
        if self.classes > len(present):
            raise ValueError(f"partition.classes={self.classes} exceeds the {len(present)} classes of the data")
        held = self._hands(len(present), num_clients, rng).ravel()
        holders_C = np.bincount(held, minlength=len(present))
        if (scarce := holders_C > class_sizes).any():
            c = int(np.flatnonzero(scarce)[0])
            raise ValueError(
                f"class {present[c]} has {class_sizes[c]} samples for the {holders_C[c]} clients that would hold it: "
                "lower participation.num_clients or partition.classes"
            )
        if (holders_C == 0).any():
            log.warning("%d of %d classes belong to no client", np.count_nonzero(holders_C == 0), len(present))
        counts_CN = np.zeros((len(present), num_clients), np.int64)
        client = np.repeat(np.arange(num_clients), self.classes)
        for c, (size, holders) in enumerate(zip(class_sizes, holders_C, strict=True)):
            if holders:
                counts_CN[c, client[held == c]] = size // holders + (np.arange(holders) < size % holders)
        return deal(counts_CN, labels, rng)

    def _hands(self, num_classes: int, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """The classes of each client, by rank, [N, classes], different within a row."""
        cards = num_clients * self.classes
        if self.classes == 1:
            return np.arange(cards) % num_classes
        dealt = np.empty(-(-cards // num_classes) * num_classes, np.int64)
        for start in range(0, cards, num_classes):
            deck = rng.permutation(num_classes)
            # A hand begun with the last deck must not get a class twice: what it holds goes to the bottom of this one.
            twice = np.isin(deck, dealt[start - start % self.classes : start])
            dealt[start : start + num_classes] = np.concatenate([deck[~twice], deck[twice]])
        return dealt[:cards].reshape(num_clients, self.classes)


@checked
@dataclass(frozen=True)
class ByGroup(Partitioner):
    """Natural clients: one for each value of ``groups`` (writer, domain), in ascending order of the value.

    With fewer clients than groups, the seed draws the groups. The samples of the others belong to nobody, and the test
    split stays whole. ``num_clients=None`` takes all groups.

    by: the column of the groups, for data sets that let the user choose.
    """

    by: str | None = field(default=None, repr=False)

    def __call__(
        self, labels: np.ndarray, num_clients: int | None, *, seed: int = 0, groups: np.ndarray | None = None
    ) -> Partition:
        if groups is None:
            raise ValueError(
                "partition=natural needs client groups, and this data set has none. Set partition.by=<column> (csv, "
                "huggingface), data.clients=true (image_folder) or a groups array (arrays)."
            )
        values, rank_n = np.unique(groups, return_inverse=True)
        num_clients = len(values) if num_clients is None else num_clients
        if num_clients > len(values):
            raise ValueError(
                f"participation.num_clients={num_clients}, but the training samples are of {len(values)} groups: "
                f"set participation.num_clients={len(values)} or null"
            )
        kept = np.sort(generator(seed, "partition").choice(len(values), num_clients, replace=False))
        owner_n = np.where(np.isin(rank_n, kept), np.searchsorted(kept, rank_n), -1)
        if spare := np.count_nonzero(owner_n < 0):
            log.info("%d of %d groups are clients, %d samples nobody's", num_clients, len(values), spare)
        return Partition.from_owners(owner_n, num_clients)
