"""The clients' data: tensors on the device (uint8 for images and text).

A batch is one gather, without workers.
"""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy import ndarray
from pydantic import BeforeValidator, Field
from torch import Tensor
from torch.utils.data import DataLoader

from gcfed.data.augment import AutoTransform, ImageTransform
from gcfed.data.base import FLOATS, FederatedDataset, Split
from gcfed.data.dealing import held_out
from gcfed.data.distances import feature_distance
from gcfed.data.noise import noisy_labels, noisy_samples
from gcfed.data.partition import Partition
from gcfed.data.scaling import standardized
from gcfed.data.skews import Shift
from gcfed.utils.checked import Count, Inside, SettingError, Share, Weight, Whole, checked
from gcfed.utils.refusal import Refusal
from gcfed.utils.rng import generator

log = logging.getLogger(__name__)
DATASET = "data.dataset"  # the key of the function that loads the data


def _two_shares(value: Any) -> Any:
    if value is None or (isinstance(value, Sequence) and len(value) == 2):
        return value
    raise ValueError("give [ρ, τ], two shares, as in data.label_noise=[0.4,0.5]")


@checked
class FederatedDataModule(LightningDataModule):
    """A data set, partitioned into clients, on the training device.

    For Lightning, a training batch is the number of a round, and a validation batch is a slice of
    the test split.

    Args:
        dataset: returns the :class:`FederatedDataset`; called once, in ``setup``.
        transform: normalises and augments images, or converts tokens or vectors.
        partitioner: returns the :class:`Partition` of the training labels.
        num_clients: N; None: all natural clients of the data set.
        rounds: length of the training loader.
        seed: of the partition and of the subsets.
        num_classes, input_shape: what the model is built for; the data must match. None: those of
            the data.
        eval_batch_size: test samples per batch. ``auto``: as large as 250 colour images of 32×32,
            for a CPU's cache, and at most 2,000 samples; on a GPU 2,000 such images, and at most
            10,000 samples.
        limit_train, limit_test: number of samples to keep, drawn by the seed, for quick tests;
            None: all.
        client_test: share of each client's samples that is held out for its own test.
        validation: share of all training samples held out before the partition, for tests too; the
            same for all seeds.
        standardize: scale float vectors and regression targets by the mean and deviation of the
            training samples.
        feature_noise: σ of :func:`noisy_samples`, after ``standardize``, also for the samples of
            ``client_test``.
        label_noise: (ρ, τ) of :func:`noisy_labels`, for the training labels.
    """

    def __init__(
        self,
        *,
        dataset: Callable[[], FederatedDataset],
        transform: Callable[..., Any],
        partitioner: Callable[..., Partition],
        num_clients: Count | None,
        rounds: Count,
        seed: Whole,
        num_classes: Count | None,
        input_shape: Annotated[Sequence[Count], Field(min_length=1)] | None,
        eval_batch_size: Count | Literal["auto"] = "auto",
        limit_train: Count | None = None,
        limit_test: Count | None = None,
        validation: Inside | None = None,
        client_test: Inside | None = None,
        standardize: bool = False,
        feature_noise: Weight | None = None,
        label_noise: Annotated[Sequence[Share] | None, BeforeValidator(_two_shares)] = None,
    ) -> None:
        super().__init__()
        self.load = dataset
        self.partitioner = partitioner
        self.transform: Any = transform
        self.rounds = rounds
        self.seed = seed
        self.eval_batch_size = eval_batch_size
        self.input_shape: tuple[int, ...] = tuple(input_shape or ())
        self.num_clients: int = num_clients  # type: ignore[assignment]  # None until setup
        self.num_classes: int = num_classes  # type: ignore[assignment]  # likewise
        self.limit_train = limit_train
        self.limit_test = limit_test
        self.validation = validation
        self.client_test = client_test
        self.standardize = standardize
        self.feature_noise = feature_noise
        self.label_noise = label_noise
        self.scaling: dict[str, ndarray] = {}
        self.splits: dict[str, Split] = {}  # training, test and validation, before any change
        self.tests_of_clients: Partition | None = None
        self._own_labels: ndarray  # of all training samples
        self._tests: list[tuple[Tensor, Tensor]] = []

    def setup(self, stage: str | None = None) -> None:
        """Loads and partitions the data, once. Later calls only give clients their own labels back.

        Raises Refusal if data and model do not match, or the partition is impossible;
        FileNotFoundError.
        """
        if self._tests:
            self._set_labels(self._own_labels)
            return
        self.dataset = self._loaded()
        train, *tests = self._limited()
        self._fit()
        names = ("training", "test", "validation")
        self.splits = dict(zip(names, (train, *tests), strict=False))
        whole = self.partitioner(train.y, self.num_clients, seed=self.seed, groups=train.groups)
        self.partition = whole
        self._warn_of_mixed_groups(train)
        train, tests = self._shifted(train, tests)
        aside = np.zeros(0, np.int64)  # samples of the clients' own tests
        if self.client_test:
            self.partition, self.tests_of_clients = whole.parted(self.client_test, self.seed)
            aside = self.tests_of_clients.indices
        if isinstance(self.transform, AutoTransform):
            self.transform = self.transform(train.x, aside)
        self.transform.check(self.input_shape)
        if self.standardize:
            (train, *tests), self.scaling = standardized([train, *tests], aside)
        train = self._with_noise(train, whole)
        self._own_labels = train.y
        self.labels = self._own_labels
        self.num_clients = self.partition.num_clients
        self.test_labels = tests[0].y
        self.num_test = len(tests[0])
        self.smallest_test = min(map(len, tests))
        self._train, *self._tests = map(_tensors, (train, *tests))

    def _loaded(self) -> FederatedDataset:
        try:
            return self.load()
        except SettingError as error:
            raise SettingError(f"{DATASET}.{error.name}", error.rest) from None

    def _limited(self) -> list[Split]:
        """The training samples, the test split, and the validation split if there is one."""
        train = self.dataset.train
        held = []
        if self.validation:
            chosen = held_out(train.y, self.validation, "validation")
            held = [train.subset(chosen)]
            train = train.subset(~chosen)
        train = _subset(train, self.limit_train, self.seed, "limit_train")
        test = _subset(self.dataset.test, self.limit_test, self.seed, "limit_test")
        return [train, test, *held]

    def _with_noise(self, train: Split, whole: Partition) -> Split:
        """The training samples with the noise of features and labels that the settings ask for.

        Args:
            whole: the partition before the clients' own tests are taken out.
        """
        if self.feature_noise:
            x = noisy_samples(train.x, whole, self.feature_noise, self.seed)
            train = replace(train, x=x)
        if self.label_noise:
            y = noisy_labels(train.y, self.num_classes, self.partition, self.label_noise, self.seed)
            train = replace(train, y=y)
        return train

    def _shifted(self, train: Split, tests: list[Split]) -> tuple[Split, list[Split]]:
        """Changes the images of groups of clients, if the partition does so."""
        if not isinstance(self.partitioner, Shift):
            return train, tests
        change = self.partitioner.shifted
        owner_n = self.partition.owners(len(train))
        x = change(train.x, owner_n, self.partition.num_clients, generator(self.seed, "shift"))
        changed = []
        for i, split in enumerate(tests):
            rng = generator(0, "shift_test", i)  # the same for all seeds
            each = np.arange(len(split))
            changed.append(replace(split, x=change(split.x, each, len(split), rng)))
        return replace(train, x=x), changed

    def _warn_of_mixed_groups(self, train: Split) -> None:
        """Warns if the data have natural clients, and the partition mixes them."""
        if train.groups is None:
            return
        owner_n = self.partition.owners(len(train))
        groups, group_n = np.unique(train.groups, return_inverse=True)
        pairs = np.unique((owner_n * len(groups) + group_n)[owner_n >= 0])
        if len(pairs) > self.partition.num_clients:
            log.warning(
                "%s: the data have %d natural clients, and this partition mixes them in %d clients:"
                " partition=natural participation.num_clients=null keeps them",
                self.dataset.name,
                len(groups),
                self.partition.num_clients,
            )

    def _fit(self) -> None:
        """Takes the shape and the number of classes from the data if they are not set.

        Raises Refusal if they are set and the data do not match.
        """
        shape = self.dataset.train.x.shape[1:]
        classes = self.dataset.num_classes
        self.input_shape = self.input_shape or shape
        self.num_classes = self.num_classes or classes
        is_regression = self.dataset.train.y.dtype in FLOATS
        if shape != self.input_shape:
            wrong = f"samples have the shape {shape}"
            key = f"data.input_shape={[*self.input_shape]}"
        elif classes > self.num_classes or (is_regression and classes < self.num_classes):
            wrong = f"there are {classes} {'targets' if is_regression else 'classes'}"
            key = f"data.num_classes={self.num_classes}"
        else:
            return
        raise Refusal(f"{self.dataset.name}: {wrong}, and the model is built for {key}.")

    @property
    def is_text(self) -> bool:
        """Whether the samples are tokens."""
        return len(self.input_shape) == 1 and self.dataset.train.x.dtype.kind in "iu"

    @property
    def class_names(self) -> list[str]:
        """The names of the classes 0, 1, …; empty if they have none."""
        return [str(name) for name in self.dataset.class_names or ()]

    @property
    def scaling_of_inputs(self) -> dict[str, list[float]]:
        """The means and deviations that scale the network's inputs, and targets of a regression."""
        scaling = {name: values.tolist() for name, values in self.scaling.items()}
        if isinstance(self.transform, ImageTransform):
            scaling |= {"mean": list(self.transform.mean), "std": list(self.transform.std)}
        return scaling

    def to_device(
        self, device: torch.device, dtype: torch.dtype, memory_format: torch.memory_format
    ) -> None:
        """Moves the splits to the device, once.

        Batches have this ``dtype`` and ``memory_format``; numbers to regress on, at least float32.
        """
        wide = torch.promote_types(dtype, torch.float32)
        moved = []
        for x, y in (self._train, *self._tests):
            x_type = wide if x.dtype == torch.float64 else x.dtype
            y_type = wide if y.is_floating_point() else y.dtype
            moved.append((x.to(device, x_type), y.to(device, y_type)))
        self._train, *self._tests = moved
        self._dtype = dtype
        self._memory_format = memory_format

    def sizes(self, clients: ndarray | None = None) -> ndarray:
        """The numbers of samples of these clients, ``[K]``, or of all, ``[N]``."""
        sizes = self.partition.sizes
        return sizes if clients is None else sizes[clients]

    def client(self, client: int) -> ndarray:
        """Indices of a client's samples, ``[n_k]``."""
        return self.partition.client(client)

    def class_counts(self, clients: ndarray) -> ndarray:
        """Number of labels of each class of these clients, ``[K] → [K, C]``."""
        return self.partition.label_counts(self.labels, self.num_classes, clients=clients)

    def feature_distance(self) -> float | None:
        """How far the clients' mean training inputs, with their noise, are from the mean of all;
        None for texts. See :func:`gcfed.data.distances.feature_distance`.
        """
        x, _ = self._train
        return None if self.is_text else feature_distance(x.cpu().numpy(), self.partition)

    def relabel(self, clients: ndarray, relabelled: Callable[[ndarray], ndarray]) -> None:
        """Changes the training labels of these clients until the next fit begins (``setup``)."""
        labels = self.labels.copy()
        for client in clients.tolist():
            samples = self.client(client)
            labels[samples] = relabelled(labels[samples])
        self._set_labels(labels)

    def _set_labels(self, labels: ndarray) -> None:
        if labels is self.labels:
            return
        self.labels = labels
        x, y = self._train
        self._train = (x, torch.from_numpy(labels).to(y.device))

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> ndarray | None:
        """Random numbers for the augmentation of ``shape`` samples, integers ``[*shape, A]``, or
        None.
        """
        return self.transform.draw(rng, shape)

    def fetch(self, index: Tensor, augment: Tensor | None) -> tuple[Tensor, Tensor]:
        """Inputs ``[*index.shape, *input]`` and labels ``[*index.shape]`` on the device."""
        x, y = self._train
        draws = None if augment is None else augment.flatten(0, -2)
        inputs = self.transform(x[index.flatten()], draws, self._dtype, self._memory_format)
        return inputs.view(*index.shape, *inputs.shape[1:]), y[index]

    def two_samples(self) -> Tensor | None:
        """The first and the last training input, ``[2, *input]``, on the CPU; None without any."""
        x, _ = self._train
        if not len(x):
            return None
        ends = x[[0, len(x) - 1]].cpu()
        return self.transform(ends, None, torch.float32, torch.contiguous_format)

    def fetch_test(self, bounds: tuple[int, int], of: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and labels of a slice of the test split, or of the validation split (``of=1``)."""
        x, y = self._tests[of]
        part = slice(*bounds)
        return self.transform(x[part], None, self._dtype, self._memory_format), y[part]

    # -------------------------------------------------------------------------------- for Lightning
    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(self.rounds), batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> list[DataLoader]:
        """Slices of the test split, and of the validation split if there is one.

        Each process gets its share.
        """
        assert self.trainer is not None
        rank = self.trainer.global_rank
        world = self.trainer.world_size
        size = self._test_batch_size(self.trainer.strategy.root_device)
        loaders: list[DataLoader] = []
        for (_, y), key in zip(self._tests, ("limit_test", "validation"), strict=False):
            count = len(y)
            if count < world:
                raise Refusal(
                    f"data.{key} leaves {count} test samples for {world} processes; each needs one."
                )
            step = min(size, count // world)  # every process must have a slice
            slices = [(start, min(start + step, count)) for start in range(0, count, step)]
            loaders.append(DataLoader(slices[rank::world], batch_size=None))  # type: ignore[arg-type]
        return loaders

    def _test_batch_size(self, device: torch.device) -> int:
        if self.eval_batch_size != "auto":
            return self.eval_batch_size
        images, most = (250, 2_000) if device.type == "cpu" else (2_000, 10_000)
        entries = images * 3 * 32 * 32
        return max(1, min(entries // math.prod(self.input_shape), most))


def _subset(split: Split, limit: int | None, seed: int, purpose: str) -> Split:
    if limit is None or limit >= len(split):
        return split
    chosen = generator(seed, purpose).choice(len(split), limit, replace=False)
    return split.subset(np.sort(chosen))


def _tensors(split: Split) -> tuple[Tensor, Tensor]:
    with warnings.catch_warnings():
        # memory maps, which are not changed
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(split.x), torch.from_numpy(split.y)
