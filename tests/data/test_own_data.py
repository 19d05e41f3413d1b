"""The user's own data: arrays, functions, and which samples are held out."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import refuses
from harness import assert_near
from torch.utils.data import TensorDataset

from gcfed.assemble import assemble
from gcfed.data.augment import AutoTransform, ImageTransform, PlainTransform
from gcfed.data.dealing import held_out
from gcfed.data.partition import IID
from gcfed.data.sets.own import arrays, from_arrays
from gcfed.data.skews import Shift
from gcfed.run import evaluate, train
from gcfed.utils.instantiate import build

RNG = np.random.default_rng(0)
N = 40
IMAGES = RNG.integers(0, 256, (N, 3, 6, 5), np.uint8)
CLASSES = np.arange(N) % 4


def read(**content):
    """The data set of these arrays of a file ``mine.npz``."""
    return from_arrays(content, "mine.npz", 0.2)


# ------------------------------------------------------------------------------------------- arrays
@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (IMAGES, (3, 6, 5)),
        (IMAGES.transpose(0, 2, 3, 1), (3, 6, 5)),
        (IMAGES.reshape(N, 2, 9, 5).transpose(0, 2, 3, 1), (2, 9, 5)),
        (IMAGES[:, 0], (1, 6, 5)),
        (IMAGES[:, 0, 0], (5,)),
        (IMAGES[:, 0, 0].astype(np.float16), (5,)),
    ],
)
def test_samples_of_every_shape(x, shape):
    dataset = read(x=x, y=CLASSES, x_test=x[:8], y_test=CLASSES[:8])
    assert dataset.name == "mine"
    assert dataset.train.x.shape == (N, *shape)
    assert dataset.test.x.shape == (8, *shape)
    np.testing.assert_array_equal(
        dataset.train.x.reshape(N, -1), IMAGES.reshape(N, -1)[:, : np.prod(shape)]
    )
    assert dataset.train.x.dtype == (np.float32 if x.dtype == np.float16 else np.uint8)


def test_classes_are_numbered_in_their_order():
    for y, names, order in (
        (CLASSES * 10 - 3, ("-3", "7", "17", "27"), [0, 1, 2, 3]),
        (np.array(list("dacb"))[CLASSES], ("a", "b", "c", "d"), [3, 0, 2, 1]),
    ):
        dataset = read(x=IMAGES, y=y, x_test=IMAGES[:4], y_test=y[:4])
        np.testing.assert_array_equal(dataset.train.y, np.array(order)[CLASSES])
        assert dataset.test.y.tolist() == order
        assert dataset.num_classes == 4
        assert dataset.class_names == names


def test_float_labels_are_refused_unless_the_task_is_a_regression(config, tmp_path):
    np.savez(tmp_path / "x.npz", x=IMAGES[:, 0, 0] / 1.0, y=CLASSES / 1.0)
    mine = (
        "data=arrays",
        f"data.path={tmp_path}/x.npz",
        "partition=iid",
        "participation.num_clients=5",
    )
    words = (
        r"Classification is not for labels of float64: .* integers.*y\.astype\(int\)\.ravel\(\)"
        r" makes classes"
    )
    with refuses(words):
        assemble(config(*mine))
    assemble(config(*mine, "task._target_=gcfed.tasks.SquaredError"))
    np.savez(tmp_path / "x.npz", x=IMAGES[:, 0, 0] / 1.0, y=CLASSES)
    words = (
        r"SquaredError is not for labels of int64: .*y\.astype\(float\), or data\.regression=true"
    )
    with refuses(words):
        assemble(config(*mine, "task._target_=gcfed.tasks.SquaredError"))


@pytest.mark.parametrize(
    ("partition", "warned"),
    [
        (("partition=natural", "participation.num_clients=null"), False),
        (("partition=natural", "participation.num_clients=2"), False),
        (("partition=dirichlet", "participation.num_clients=3"), True),
        (("partition=iid", "participation.num_clients=3"), True),
    ],
)
def test_natural_clients_that_are_mixed_are_named(config, tmp_path, caplog, partition, warned):
    np.savez(tmp_path / "x.npz", x=IMAGES, y=CLASSES, groups=np.arange(N) // 10)
    build(config("data=arrays", f"data.path={tmp_path}/x.npz", *partition).data).setup()
    words = "the data have 4 natural clients, and this partition mixes them in 3 clients"
    assert (words in caplog.text) == warned
    assert warned or "natural clients" not in caplog.text


def test_labels_of_tokens_and_targets():
    tokens = IMAGES[:, 0, 0] % 7
    dataset = read(x=tokens, y=tokens.astype(int) - 1)
    assert dataset.num_classes == 6
    assert dataset.train.y.shape == (32, 5)
    assert dataset.train.y.min() == -100
    for dtype, kept in (
        (np.float16, np.float32),
        (np.float32, np.float32),
        (np.float64, np.float64),
    ):
        x = (IMAGES[:, 0, 0] / 2).astype(dtype)
        train = read(x=x, y=(CLASSES / 2).astype(dtype)).train
        assert train.y.shape == (32, 1)
        assert train.x.dtype == kept
        assert train.y.dtype == kept


def test_the_test_split_is_drawn_once_and_groups_follow():
    groups = np.array(["b", "a"])[CLASSES % 2]
    dataset = read(x=IMAGES, y=CLASSES, groups=groups)
    assert np.bincount(dataset.test.y).tolist() == [2, 2, 2, 2]
    np.testing.assert_array_equal(dataset.train.groups, 1 - dataset.train.y % 2)
    whole = {x.tobytes() for split in (dataset.train, dataset.test) for x in split.x}
    assert whole == {x.tobytes() for x in IMAGES}
    again = read(x=IMAGES, y=CLASSES)
    np.testing.assert_array_equal(again.test.x, dataset.test.x)


def test_columns_of_pandas_are_arrays():
    frame = pd.DataFrame(
        {"kind": list("dacb") * 10, "a": range(40), "b": [i / 2 for i in range(40)]}
    )
    frame["flag"] = frame.a % 3 == 0
    for kind in (frame.kind.astype(object), frame.kind.astype("category"), frame.kind):
        x = frame[["a", "b", "flag"]]
        dataset = read(x=x, y=kind, x_test=x, y_test=kind, groups=kind)
        assert dataset.class_names == ("a", "b", "c", "d")
        assert dataset.train.y.tolist() == dataset.train.groups.tolist() == [3, 0, 2, 1] * 10
        np.testing.assert_array_equal(
            dataset.train.x, np.stack([frame.a, frame.a / 2, frame.a % 3 == 0], 1)
        )
    assert read(x=frame[["b"]], y=frame.flag).class_names == ("False", "True")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {"x": IMAGES, "y": CLASSES, "x_test": IMAGES},
            "give x and y, and perhaps x_test, y_test, groups",
        ),
        ({"x": IMAGES, "y": CLASSES, "z": CLASSES}, "has x, y, z: give x and y"),
        ([IMAGES, CLASSES], "gives a list: make it a dict of arrays"),
        ((IMAGES, CLASSES), r'gives a tuple: make it a dict of arrays x and y: {"x": x, "y": y}'),
        (
            {"x": IMAGES / 255, "y": CLASSES},
            r"samples must be images, uint8 .* not float64 .*\(x \* 255\)\.round",
        ),
        ({"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}, "inhomogeneous"),
        ({"x": np.array([[{}, 1]] * N), "y": CLASSES}, "x holds objects that are no numbers"),
        (
            {"x": IMAGES, "y": np.eye(4, dtype=int)[CLASSES]},
            r"labels .* \[40, 4\]: y\.argmax\(1\) makes classes",
        ),
        (
            {"x": IMAGES, "y": CLASSES, "x_test": IMAGES, "y_test": CLASSES / 1.0},
            r"int64 .*in y_test float64 .*astype",
        ),
        ({"x": IMAGES, "y": CLASSES[:-1]}, r"labels must be int64 \[40\]"),
        (
            {"x": IMAGES, "y": np.array([None, *"abc"] * 10, object)},
            "y holds objects that are neither all text nor",
        ),
        ({"x": IMAGES, "y": CLASSES, "groups": CLASSES[:3]}, r"groups must be int64 \[40\]"),
        (
            {"x": np.full((N, 2), np.nan), "y": CLASSES},
            "samples must be finite numbers; 80 are NaN or infinite",
        ),
        ({"x": IMAGES[:1], "y": CLASSES[:1]}, "the test split is empty"),
    ],
)
def test_invalid_arrays_are_named(content, words):
    with refuses(rf"^mine\.npz:? .*{words}"):
        from_arrays(content, "mine.npz", 0.2)


def test_a_file_that_is_no_npz_is_named(tmp_path):
    np.savez(tmp_path / "good.npz", x=IMAGES, y=CLASSES)
    assert arrays(str(tmp_path / "good.npz")).num_classes == 4
    np.savez(tmp_path / "objects.npz", x=IMAGES, y=np.array([{}] * N, object))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:-40])
    for name in ("objects.npz", "cut.npz"):
        with refuses(rf"data\.path=.*{name} is no \.npz of plain arrays .*: write it by"):
            arrays(str(tmp_path / name))
    with pytest.raises(FileNotFoundError, match=r"data\.path=nowhere is no file"):
        arrays("nowhere")
    with pytest.raises(FileNotFoundError, match=r"data\.path=null is no file"):
        arrays(None)


def test_errors_of_loaders_name_the_keys_that_users_set(config):
    with refuses(r"^data\.dataset\.name=x is not one of"):
        build(config("data=mnist", "data.dataset.name=x").data).setup()
    with refuses(r"^data\.test=2 must be "):
        build(config("data=arrays", "data.test=2").data)


# --------------------------------------------------------------------------------- transforms and
# standardisation
def test_the_samples_decide_the_transform():
    auto = AutoTransform(flip=True)(IMAGES)
    assert isinstance(auto, ImageTransform)
    np.testing.assert_allclose(auto.mean, IMAGES.mean((0, 2, 3)) / 255)
    np.testing.assert_allclose(auto.std, IMAGES.std((0, 2, 3)) / 255)
    assert auto.flip
    given = AutoTransform(mean=[0.5, 0.4, 0.3])(IMAGES)
    assert given.mean == (0.5, 0.4, 0.3)
    assert given.std == auto.std
    assert AutoTransform()(np.zeros((2, 1, 3, 3), np.uint8)).std == (0.01,)  # a constant channel
    # more images than one block
    np.testing.assert_allclose(AutoTransform()(np.repeat(IMAGES, 60, 0)).mean, auto.mean)
    for settings, words in (
        ({"flip": True}, "crops, flips"),
        ({"mean": [0.5]}, "mean and std are for images"),
    ):
        with refuses(words):
            AutoTransform(**settings)(IMAGES[:, 0, 0] / 1.0)
    assert type(AutoTransform(crop_padding=0, flip=False)(IMAGES[:, 0, 0])) is PlainTransform


class OtherChannels(Shift):
    """Rolls the three channels by 0, 1 or 2."""

    def changes(self, input_shape):
        return [partial(np.roll, shift=shift, axis=1) for shift in range(3)]


def test_images_are_normalised_as_the_clients_see_them(config, tmp_path):
    """Each group sees the channels, whose means differ, in another order.

    Held-out samples do not influence the statistics.
    """
    bright = np.array([140, 70, 20])[:, None, None] + np.arange(60)[:, None, None, None]
    bright = np.broadcast_to(bright, (60, 3, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "x.npz", x=bright, y=np.arange(60) % 2)
    clients = ("participation.num_clients=3", "participation.per_round=3", "data.client_test=0.3")
    data = build(config("data=arrays", f"data.path={tmp_path}/x.npz", *clients).data)
    data.partitioner = OtherChannels(IID())
    data.setup()
    data.to_device(torch.device("cpu"), torch.float32, torch.contiguous_format)
    seen = data.fetch(torch.from_numpy(data.partition.indices), None)[0]
    assert_near(seen.mean((0, 2, 3)), torch.zeros(3), 1e-4)
    assert_near(seen.std((0, 2, 3), correction=0), torch.ones(3), 1e-3)


def test_vectors_and_targets_are_standardised_by_the_training_samples(config, tmp_path):
    rng = np.random.default_rng(1)
    # milliseconds since 1970
    x = np.stack([rng.normal(1.7e12, 2e4, 90), rng.integers(0, 2, 90), np.full(90, 0.1)], 1)
    y = rng.normal(1.7e12, 4e4, 90)
    np.savez(tmp_path / "x.npz", x=x, y=y)
    mine = (
        "data=arrays",
        f"data.path={tmp_path}/x.npz",
        "data.validation=0.2",
        "data.client_test=0.5",
        "partition=iid",
        "model=linear",
        "participation.num_clients=4",
        "task._target_=gcfed.tasks.SquaredError",
    )
    cfg = config(*mine)
    built = []
    for cfg.data.standardize in (True, False):
        built.append(build(cfg.data))
        built[-1].setup()
    scaled, raw = built
    trained, target = (tensor.double().numpy()[raw.partition.indices] for tensor in raw._train)
    assert len(trained) == 28  # held-out and test samples do not influence the statistics
    assert {*trained[:, 0], *target[:, 0]} <= {*x[:, 0], *y}  # float32 would round to two minutes
    mean = np.array([trained[:, 0].mean(), 0, 0.1])
    std = np.array([trained[:, 0].std(), 1, 1])
    for ours, plain in zip([scaled._train, *scaled._tests], [raw._train, *raw._tests], strict=True):
        np.testing.assert_allclose(ours[0], (plain[0].numpy() - mean) / std, rtol=0, atol=1e-6)
        np.testing.assert_allclose(
            ours[1], (plain[1].numpy() - target.mean()) / target.std(), rtol=0, atol=1e-6
        )
    for data in built:
        data.to_device(torch.device("cpu"), torch.float32, torch.contiguous_format)
        assert {tensor.dtype for tensor in [*data._train, *data._tests[0], *data._tests[1]]} == {
            torch.float32
        }
    assert not raw.scaling


def test_a_run_on_arrays_is_tested_again(config, tmp_path):
    x = np.where(CLASSES[:, None, None] % 2, 200, 50).astype(np.uint8) + IMAGES[:, 0] // 8
    np.savez(tmp_path / "bright.npz", x=x, y=CLASSES % 2, groups=np.arange(N) % 8)
    mine = (
        "data=arrays",
        f"data.path={tmp_path}/bright.npz",
        "partition=natural",
        "participation.num_clients=null",
        "data.validation=0.1",
        "rounds=1",
    )
    cfg = config(*mine)
    assert cfg.name == "bright_mlp_gcfed"
    result = train(cfg)
    data = result.trainer.datamodule
    assert data.num_clients == 8
    assert data.num_classes == 2
    assert data.input_shape == (1, 6, 5)
    assert data.num_test == 8
    assert len(data.labels) == 29
    found = evaluate(config(*mine, f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt"))
    assert sorted(found) == ["round", "test/acc", "test/loss", "val/acc", "val/loss"]
    assert found == {key: pytest.approx(result.metrics[key]) for key in found}


# --------------------------------------------------------------------------------- held-out samples
@pytest.mark.parametrize(
    ("n", "share", "count"),
    [(600, 0.5, 300), (40, 0.2, 8), (7, 0.5, 4), (3, 0.01, 1), (3, 0.99, 2)],
)
def test_a_share_is_held_out_of_each_class(n, share, count):
    labels = np.arange(n) % 3
    chosen = held_out(labels, share, "test")
    assert chosen.sum() == count
    np.testing.assert_allclose(
        np.bincount(labels[chosen], minlength=3), np.bincount(labels) * count / n, atol=1
    )
    assert held_out(np.zeros((n, 2)), share, "test").sum() == count


def test_validation_samples_are_held_out_before_the_partition(config):
    cfg = config("data.validation=0.1")
    built = []
    for cfg.seed in (1, 2):
        built.append(build(cfg.data))
        built[-1].setup()
    part, other = built
    assert len(part.labels) == 1293
    assert part.num_test == 360
    assert part.smallest_test == 144
    train, held = (
        {x.numpy().tobytes() for x in tensors[0]} for tensors in (part._train, part._tests[1])
    )
    assert not train & held
    assert held == {x.numpy().tobytes() for x in other._tests[1][0]}  # the same for all seeds


def test_the_code_that_converts_a_torch_dataset_is_in_the_message():
    pairs = TensorDataset(torch.rand(30, 4), torch.arange(30) % 3)
    with pytest.raises(ValueError, match="gives a TensorDataset") as refused:
        from_arrays(pairs, "mine", 0.2)
    code = str(refused.value).partition("x and y: ")[2].removesuffix(".")
    arrays = eval(code, {"numpy": np, "data": pairs})
    dataset = from_arrays(arrays, "mine", 0.2)
    assert dataset.num_classes == 3
    assert len(dataset.train.x) + len(dataset.test.x) == 30
