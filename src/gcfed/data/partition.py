"""Which client holds which training sample, at most one for each: a pure function of (labels, seed,
parameters).
"""

import logging
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from gcfed.data.dealing import cut, deal, fill_up, log_gamma, scatter, softmax
from gcfed.utils.checked import Count, Positive, checked
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import generator

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Partition:
    """The sample indices of all clients: client k holds ``indices[offsets[k]:offsets[k + 1]]``, in
    ascending order.

    indices: int64 [number of assigned samples].  offsets: int64 [N + 1].
    """

    indices: ndarray
    offsets: ndarray

    @classmethod
    def from_owners(cls, owner_n: ndarray, num_clients: int) -> "Partition":
        """From the owner of each sample, int64 [n], −1 for none."""
        # of those without an owner first
        ends = np.cumsum(np.bincount(owner_n + 1, minlength=num_clients + 1))
        return cls(np.argsort(owner_n, kind="stable")[ends[0] :], ends - ends[0])

    @property
    def num_clients(self) -> int:
        return len(self.offsets) - 1

    def owners(self, num_samples: int) -> ndarray:
        """The client of each sample, int64 [n], −1 for none."""
        owner_n = np.full(num_samples, -1)
        owner_n[self.indices] = np.repeat(np.arange(self.num_clients), self.sizes)
        return owner_n

    @cached_property
    def sizes(self) -> ndarray:
        """Number of samples of each client, int64 [N]."""
        return np.diff(self.offsets)

    def client(self, k: int) -> ndarray:
        """The sample indices of client ``k``, a view, int64 [n_k]."""
        return self.indices[self.offsets[k] : self.offsets[k + 1]]

    def parted(self, share: float, seed: int) -> tuple["Partition", "Partition"]:
        """Splits each client's samples into those that it keeps and a random share that is held
        out.

        The share is rounded; a client with samples keeps at least one.
        """
        draws = generator(seed, "client_test").random(len(self.indices))
        is_aside = np.zeros(len(self.indices), bool)
        for start, size in zip(self.offsets, self.sizes, strict=False):
            count = min(round(share * size), max(size - 1, 0))
            order = np.argsort(draws[start : start + size], kind="stable")
            is_aside[start + order[:count]] = True
        offsets = np.concatenate([[0], np.cumsum(is_aside)])[self.offsets]
        kept = Partition(self.indices[~is_aside], self.offsets - offsets)
        return kept, Partition(self.indices[is_aside], offsets)

    def label_counts(
        self, labels: ndarray, num_classes: int, clients: ndarray | None = None
    ) -> ndarray:
        """How many labels of each class each client has (all clients, or ``clients`` in this
        order), int64 [N, C].

        ``labels``: of all samples, [n], or [n, T] with negative labels for padding.
        """
        if clients is None:
            clients = np.arange(self.num_clients)
        counts_NC = np.zeros((len(clients), num_classes), np.int64)
        for counts_C, client in zip(counts_NC, clients, strict=True):
            own_labels = labels[self.client(client)]
            counts_C[:] = np.bincount(own_labels[own_labels >= 0], minlength=num_classes)
        return counts_NC


class Partitioner:
    """Checks its arguments and calls :meth:`owners`, which a subclass implements.

    ``labels`` are [n], or [n, T] for sequences and [n, C] for targets of a regression. A partition
    by class turns one target per sample, [n, 1], into classes: ``bins`` of equal size, from the
    smallest target to the largest.

    A call raises Refusal if the parameters or the data cannot give each client its samples.
    """

    by_class: ClassVar[bool] = True  # needs one class, or one target, per sample
    bins: int | None = 10  # None: the targets themselves
    # the setting with the least number of samples of a client; "": one sample
    least: ClassVar[str] = ""

    def __call__(
        self,
        labels: ndarray,
        num_clients: int | None,
        *,
        seed: int,
        groups: ndarray | None = None,
    ) -> Partition:
        if self.by_class:
            labels = self._classes(labels)
        if not num_clients:
            raise Refusal(
                f"participation.num_clients={num_clients} must be set: null is for"
                " partition=natural."
            )
        self._require_enough(len(labels), num_clients)
        owners = self.owners(labels, num_clients, generator(seed, "partition"))
        owner_n = np.asarray(owners)
        self._check_owners(owner_n, len(labels), num_clients)
        return Partition.from_owners(owner_n, num_clients)

    def _classes(self, labels: ndarray) -> ndarray:
        """One class per sample, int64 [n]: the labels, or the bins of the targets."""
        if labels.ndim == 1:
            return labels
        if labels.dtype.kind != "f" or labels.shape[1] != 1:
            raise Refusal(
                f"partition: {type(self).__name__} needs one class per sample, and these data have"
                " several (y.argmax(1) makes classes of one-hot rows): take natural, sizes or iid."
            )
        targets = labels[:, 0]
        rank_n = np.searchsorted(np.sort(targets), targets)  # equal targets have one rank
        if not self.bins:
            return rank_n
        return rank_n * self.bins // len(labels)

    def _require_enough(self, num_samples: int, num_clients: int) -> None:
        least = getattr(self, self.least) if self.least else 1
        needed = num_clients * least
        if needed <= num_samples:
            return
        remedy = "lower it"
        if least > 1:
            remedy += f" or partition.{self.least}"
        raise Refusal(
            f"participation.num_clients={num_clients} needs {needed} training samples, and there"
            f" are {num_samples}: {remedy}."
        )

    def _check_owners(self, owner_n: ndarray, num_samples: int, num_clients: int) -> None:
        is_valid = owner_n.dtype.kind in "iu" and owner_n.shape == (num_samples,)
        if is_valid and owner_n.min() >= -1 and owner_n.max() < num_clients:
            return
        raise Refusal(
            f"partition: {type(self).__name__}.owners must return integers [{num_samples}], of"
            f" clients 0 … {num_clients - 1}, or -1 for none: it returned {owner_n}."
        )

    def owners(self, labels: ndarray, num_clients: int, rng: Generator) -> ndarray:
        """The client of each sample, int64 [n], −1 for none."""
        raise NotImplementedError


@checked
@dataclass(frozen=True)
class IID(Partitioner):
    """Random samples; sizes differ by at most one."""

    by_class = False

    def owners(self, labels: ndarray, num_clients: int, rng: Generator) -> ndarray:
        return scatter(np.arange(len(labels)) % num_clients, rng.permutation(len(labels)))


@checked
@dataclass(frozen=True)
class Dirichlet(Partitioner):
    """Unequal sizes and label mixes, as in GC-Fed's experiments: a Dirichlet(α) draw splits each
    class.

    Class after class, the draw is renormalised over the clients that have fewer than n/N samples.
    Draws repeat until every client has ``min_size`` samples, at most ``max_tries`` times, or until
    one is far from it. If the last draw fails too, the largest clients give random samples to those
    that have too few. Every sample is assigned.
    """

    least = "min_size"
    alpha: Positive
    min_size: Count = 1
    max_tries: Count = 1000
    bins: Count = field(default=10, repr=False)

    def owners(self, labels: ndarray, num_clients: int, rng: Generator) -> ndarray:
        class_sizes = np.unique(labels, return_counts=True)[1]
        # If the number of short clients is Poisson with mean m, a draw succeeds with probability
        # exp(−m). Far above ln(max_tries) all tries would fail, so such a draw is repaired at once.
        hopeless = 10 + 3 * np.log(self.max_tries)
        for _ in range(self.max_tries):
            counts_CN = self._draw(class_sizes, num_clients, rng)
            short = np.count_nonzero(counts_CN.sum(0) < self.min_size)
            if short == 0 or short > hopeless:
                break
        owner_n = deal(counts_CN, labels, rng)
        if short:
            log.info(
                "Dirichlet(%g): %d of %d clients had too few samples and got others'",
                self.alpha,
                short,
                num_clients,
            )
            fill_up(owner_n, num_clients, self.min_size, rng)
        return owner_n

    def _draw(self, class_sizes: ndarray, num_clients: int, rng: Generator) -> ndarray:
        counts_CN = np.zeros((len(class_sizes), num_clients), np.int64)
        held_N = np.zeros(num_clients, np.int64)
        for counts_N, size in zip(counts_CN, class_sizes, strict=True):
            # Never empty: if all clients had the mean size, no sample would be left.
            open_N = held_N * num_clients < class_sizes.sum()
            logits_N = log_gamma(self.alpha, (num_clients,), rng)
            shares_N = softmax(np.where(open_N, logits_N, -np.inf))
            counts_N[:] = cut(shares_N, size)
            held_N += counts_N
        return counts_CN


@checked
@dataclass(frozen=True)
class DirichletBalanced(Partitioner):
    """Equal sizes, unequal label mixes (FedACG, after Hsu et al. 2019): each client's mix is a
    Dirichlet(α) draw.

    Each client gets n // N samples; n mod N samples have no owner. If clients ask for more samples
    of a class than are left, random ones of them get these. The others draw again from the
    remaining classes, by their renormalised mixes.
    """

    alpha: Positive
    bins: Count = field(default=10, repr=False)

    def owners(self, labels: ndarray, num_clients: int, rng: Generator) -> ndarray:
        left_C = np.unique(labels, return_counts=True)[1]
        log_mix_NC = log_gamma(self.alpha, (num_clients, len(left_C)), rng)
        counts_NC = np.zeros((num_clients, len(left_C)), np.int64)
        missing_N = np.full(num_clients, len(labels) // num_clients)
        # At most C iterations: if a client still misses samples, a class has been used up.
        while missing_N.any():
            asking = np.flatnonzero(missing_N)
            classes = np.flatnonzero(left_C)
            block = np.ix_(asking, classes)
            wanted = rng.multinomial(missing_N[asking], softmax(log_mix_NC[block]))
            for left, wants in zip(left_C[classes], wanted.T, strict=True):
                if wants.sum() > left:
                    wants[:] = rng.multivariate_hypergeometric(wants, left, method="marginals")
            counts_NC[block] += wanted
            left_C[classes] -= wanted.sum(0)
            missing_N[asking] -= wanted.sum(1)
        return deal(counts_NC.T, labels, rng)


@checked
@dataclass(frozen=True)
class ClassesPerClient(Partitioner):
    """Each client holds ``classes`` different classes.

    Each class is cut into equal shards, one per holder.

    The numbers of holders of two classes differ by at most one. With ``classes=1`` client k holds
    class k mod C (FedGC's CIFAR10-10 for N = C); otherwise classes are dealt from shuffled decks.
    With N · classes < C some classes have no client, and a warning says so.
    """

    classes: Count = 1
    bins: Count = field(default=10, repr=False)

    def owners(self, labels: ndarray, num_clients: int, rng: Generator) -> ndarray:
        present, class_sizes = np.unique(labels, return_counts=True)
        num_classes = len(present)
        if self.classes > num_classes:
            raise Refusal(
                f"partition.classes={self.classes} exceeds the {num_classes} classes, or bins of"
                " targets, of the data: lower it."
            )
        held = self._hands(num_classes, num_clients, rng)
        holders_C = np.bincount(held, minlength=num_classes)
        scarce = present[holders_C > class_sizes]
        if scarce.size:
            raise Refusal(
                f"partition.classes={self.classes}: class {scarce[0]} has fewer samples than the"
                " clients that would hold it; lower it or participation.num_clients."
            )
        unheld = np.count_nonzero(holders_C == 0)
        if unheld:
            log.warning("%d of %d classes belong to no client", unheld, num_classes)
        counts_CN = np.zeros((num_classes, num_clients), np.int64)
        client = np.repeat(np.arange(num_clients), self.classes)
        for index in np.flatnonzero(holders_C):
            size = class_sizes[index]
            holders = holders_C[index]
            has_one_more = np.arange(holders) < size % holders
            counts_CN[index, client[held == index]] = size // holders + has_one_more
        return deal(counts_CN, labels, rng)

    def _hands(self, num_classes: int, num_clients: int, rng: Generator) -> ndarray:
        """The classes of each client, by rank, [N · classes]; those of a client differ."""
        cards = num_clients * self.classes
        if self.classes == 1:
            return np.arange(cards) % num_classes
        dealt = np.empty(-(-cards // num_classes) * num_classes, np.int64)
        for start in range(0, cards, num_classes):
            deck = rng.permutation(num_classes)
            # The last hand may go on with this deck. Its classes go to the bottom, so that it gets
            # none twice.
            twice = np.isin(deck, dealt[start - start % self.classes : start])
            dealt[start : start + num_classes] = np.concatenate([deck[~twice], deck[twice]])
        return dealt[:cards]


@checked
@dataclass(frozen=True)
class ByGroup(Partitioner):
    """Natural clients: one for each value of ``groups`` (writer, domain), in ascending order.

    If there are fewer clients than groups, the seed draws the groups. Samples of other groups have
    no owner; the test split stays whole. ``num_clients=None`` uses all groups.

    by: the column of the groups, for data sets in which the user chooses it.
    """

    by: str | None = field(default=None, repr=False)

    def __call__(
        self,
        labels: ndarray,
        num_clients: int | None,
        *,
        seed: int = 0,
        groups: ndarray | None = None,
    ) -> Partition:
        if groups is None:
            raise Refusal(
                "partition=natural needs client groups, and this data set has none. Set"
                " partition.by=<column> (csv, huggingface), data.clients=true (image_folder) or a"
                " groups array (arrays)."
            )
        values, rank_n = np.unique(groups, return_inverse=True)
        if num_clients is None:
            num_clients = len(values)
        if num_clients > len(values):
            raise Refusal(
                f"participation.num_clients={num_clients}, but there are {len(values)} groups: set"
                f" participation.num_clients={len(values)} or null."
            )
        kept = np.sort(generator(seed, "partition").choice(len(values), num_clients, replace=False))
        owner_n = np.where(np.isin(rank_n, kept), np.searchsorted(kept, rank_n), -1)
        spare = np.count_nonzero(owner_n < 0)
        if spare:
            log.info(
                "%d of %d groups are clients; %d samples have no client."
                " participation.num_clients=null takes all",
                num_clients,
                len(values),
                spare,
            )
        return Partition.from_owners(owner_n, num_clients)
