"""Messages as bytes: they come out as they went in, and what does not fit is refused by name."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save

from gcfed.federated.messages import Download, Levels, Upload, nbytes
from gcfed.federation.packing import (
    TENSOR,
    VERSION,
    MessageError,
    pack,
    pack_download,
    pack_upload,
    unpack_download,
    unpack_upload,
)
from gcfed.methods.quantization import quantize_

MODEL = {
    "conv.weight": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "norm.running_var": torch.rand(4, dtype=torch.float64),
    "a.first": torch.randn(2, 3).bfloat16(),
    "scale": torch.tensor(3.5),
}
SHAPES = {"delta": MODEL, "control": {"scale": MODEL["scale"]}, "bits": {"whole": torch.tensor(True)}}
NOTES = {"drift": {"": torch.zeros(3)}}


def a_download(**changes):
    extra = {"control": {"scale": torch.tensor(float("-inf"))}, "round": {"index": torch.tensor(2**40)}}
    values = {"round": 3, "seed": 7, "lr": 0.1 + 0.2, "model": dict(MODEL), "cohort": np.array([2, 5]), "extra": extra}
    return Download(**values | changes)


def an_upload(clients=(5, 2), **changes):
    k = len(clients)
    delta = {n: torch.stack([t * (i + 1) for i in range(k)]) for n, t in MODEL.items()}
    extra = {"control": {"scale": torch.arange(k) / 3}, "bits": {"whole": torch.arange(k) > 0}}
    values = {
        "clients": np.array(clients), "num_samples": np.arange(k) + 1, "num_steps": np.arange(k) + 9, "delta": delta,
        "finite": torch.arange(k) < 1, "round": 3, "loss": torch.rand(k, dtype=torch.float64),
        "num_seen": np.arange(k) * 7, "extra": extra, "notes": {"drift": {"": torch.rand(3)}},
    }  # fmt: skip
    return Upload(**values | changes)


def assert_same(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].stride() == b[name].stride()
        assert torch.equal(a[name], b[name])


def test_a_download_comes_out_as_it_went_in_with_its_order_and_memory_format():
    sent = a_download()
    came = unpack_download(pack_download(sent), MODEL)
    assert (came.round, came.seed, came.lr) == (3, 7, 0.1 + 0.2)
    assert came.cohort.tolist() == [2, 5]
    assert_same(came.model, sent.model)
    for name, tensors in sent.extra.items():
        assert_same(came.extra[name], tensors)


def test_an_upload_comes_out_as_it_went_in():
    sent = an_upload()
    came = unpack_upload(pack_upload(sent), 3, SHAPES, [2, 5, 6], NOTES)
    for name in ("clients", "num_samples", "num_steps", "num_seen"):
        np.testing.assert_array_equal(getattr(came, name), getattr(sent, name))
    assert_same({"finite": came.finite, "loss": came.loss}, {"finite": sent.finite, "loss": sent.loss})
    assert_same(came.delta, sent.delta)
    for theirs, ours in ((came.extra, sent.extra), (came.notes, sent.notes)):
        assert list(theirs) == list(ours)
        for name, tensors in ours.items():
            assert_same(theirs[name], tensors)


def test_the_bytes_that_are_counted_are_those_of_the_message():
    """But for its header, and what an upload carries that is not counted: notes, losses and who is finite."""
    for message, counted in (
        (pack_download(a_download()), a_download().nbytes),
        (
            pack_upload(an_upload(notes={})),
            2 * an_upload().bytes_per_client + nbytes({"l": torch.rand(2).double()}) + 2,
        ),
    ):
        header = int.from_bytes(message[:8], "little")
        assert len(message) - header - 8 == counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [2, 3, 8, 13, 22])
def test_quantized_values_travel_in_their_bits_and_come_out_the_same(bits, dtype):
    values = {
        "w": torch.randn(3, 5, 7, dtype=dtype),
        "b": torch.zeros(3, 4, dtype=dtype),
        "s": torch.full((3,), -1e-30, dtype=dtype),
    }
    values["w"][1] = float("nan")
    norms = [
        quantize_([t[row] for t in values.values()], 2 ** (bits - 1) - 1, torch.Generator().manual_seed(row))
        for row in range(3)
    ]
    levels = {n: Levels(bits, own) for n, own in zip(values, torch.stack(norms, 1), strict=True)}
    sent = an_upload((1, 2, 3), delta=values, levels=levels, extra={}, notes={})
    message = pack_upload(sent)
    came = unpack_upload(message, 3, {"delta": {name: t[0] for name, t in values.items()}}, [1, 2, 3], {})
    for name, t in values.items():
        torch.testing.assert_close(came.delta[name], t, rtol=0, atol=0, equal_nan=True)
    payload = len(message) - int.from_bytes(message[:8], "little") - 8
    assert payload == 3 * sent.bytes_per_client + 3 * (8 + 1)  # losses, and who is finite
    assert came.bytes_per_client == sent.bytes_per_client


def without(tensors, name):
    return {key: t for key, t in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("download", "words"),
    [
        (lambda: a_download(model=without(MODEL, "scale")), "lacks scale"),
        (lambda: a_download(model=MODEL | {"more": torch.ones(1)}), "has more, which is not known"),
        (lambda: a_download(model=MODEL | {"scale": torch.ones(2)}), r"has scale as \(2,\), and here it is \(\)"),
        (lambda: a_download(round="../x"), "of round '../x', which is none"),
        (lambda: a_download(round=-1), "of round -1, which is none"),
    ],
)
def test_a_download_of_another_model_is_refused_by_name(download, words):
    with pytest.raises(MessageError, match=words):
        unpack_download(pack_download(download()), MODEL)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"round": 2}, "answers round 3, and this is round 4"),
        ({"clients": np.array([5, 8])}, r"nobody asked: \[8\]"),
        ({"extra": {}}, "control lacks scale"),
        ({"delta": {}}, "delta lacks conv.weight"),
        ({"num_samples": np.array([-99, 1])}, r"num_samples=\[-99, 1\]"),
        ({"extra": an_upload().extra | {"x": {"y": torch.zeros(2)}}}, "has x beside Δ, which no method"),
        ({"extra": an_upload().extra | {"delta": {"y": torch.zeros(2)}}}, "has delta beside Δ, which no method"),
        ({"levels": {"scale": Levels(2**70, torch.ones(2))}}, f"has scale in {2**70} bits, and they may be 2 to 22"),
        ({"levels": {"scale": Levels(30, torch.ones(3))}}, r"levels has scale as \(3,\), and here it is \(2,\)"),
        ({"notes": {}}, "note drift lacks "),
        ({"notes": {"drift": {"": torch.zeros(4)}}}, r"note drift has  as \(4,\), and here it is \(3,\)"),
    ],
)
def test_an_upload_that_does_not_fit_is_refused_by_name(changes, words):
    with pytest.raises(MessageError, match=words):
        unpack_upload(pack_upload(an_upload(**changes)), 3, SHAPES, [2, 5], NOTES)


def test_other_versions_other_kinds_and_damaged_messages_are_refused():
    message = pack_download(a_download())
    with pytest.raises(MessageError, match="is a download, where a upload was expected"):
        unpack_upload(message, 3, SHAPES, [2, 5], NOTES)
    header = {"version": 99, "kind": "download", "content": {}}
    with pytest.raises(MessageError, match="version 99, and this project reads version 2"):
        unpack_download(save({"t": torch.ones(1)}, metadata={"gcfed": json.dumps(header)}), MODEL)
    for strides in ([0, 0], [1, 1], [3, 2], [100, 1], [2], ["1", 1]):
        content = {"model": {TENSOR: "0", "strides": strides}}
        header = json.dumps({"version": VERSION, "kind": "download", "content": content})
        with pytest.raises(MessageError, match="cannot be read"):
            unpack_download(save({"0": torch.ones(3, 2)}, metadata={"gcfed": header}), MODEL)
    for damaged in (b"", b"\xff" * 40, message[:100], message[:-1], save({"t": torch.ones(1)})):
        with pytest.raises(MessageError, match="cannot be read"):
            unpack_download(damaged, MODEL)


def test_bits_of_a_tensor_that_nobody_knows_are_refused():
    """Here it is packed by hand: no upload of ours can have them."""
    content = vars(an_upload()) | {"levels": {"nope": Levels(30, torch.ones(2))._asdict()}}
    with pytest.raises(MessageError, match="an upload's levels has nope, which is not known here"):
        unpack_upload(pack("upload", content), 3, SHAPES, [2, 5], NOTES)
