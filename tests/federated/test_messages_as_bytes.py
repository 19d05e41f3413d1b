"""Messages survive the conversion to bytes and back. A message that does not fit is refused by name."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save

from gcfed.federated.messages import Download, Levels, Upload
from gcfed.federated.wire import (
    TENSOR,
    MessageError,
    UploadSchema,
    pack,
    pack_download,
    unpack,
    unpack_download,
    upload_content,
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


def pack_upload(upload):
    return pack("upload", upload_content(upload))


def unpack_upload(message, clients=(5, 2), shapes=SHAPES, bits=None, notes=NOTES):
    """By the schema of :func:`an_upload`: client i of its K has i + 1 samples and takes at most i + 9 steps of 8."""
    known = {client: (i + 1, i + 9, 8) for i, client in enumerate(clients)}
    return UploadSchema(3, known, bits or {}, shapes, notes).read(unpack(message, "upload"))


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
    came = unpack_upload(pack_upload(sent), [5, 2, 6])
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
    sent = an_upload(notes={})
    counted = [a_download().nbytes, 2 * sent.bytes_per_client + 2 * (8 + 1)]
    for message, size in zip((pack_download(a_download()), pack_upload(sent)), counted, strict=True):
        assert len(message) - int.from_bytes(message[:8], "little") - 8 == size


@pytest.mark.parametrize(("bits", "dtype"), [(3, torch.float64), (22, torch.float32)])
def test_quantized_values_travel_in_their_bits_and_come_out_the_same(bits, dtype):
    values = {"w": torch.randn(3, 5, 7, dtype=dtype), "b": torch.zeros(3, 4, dtype=dtype)}
    values["s"], values["w"][1] = torch.full((3,), -1e-30, dtype=dtype), float("nan")
    norms = [
        quantize_([t[row] for t in values.values()], 2 ** (bits - 1) - 1, torch.Generator().manual_seed(row))
        for row in range(3)
    ]
    levels = {n: Levels(bits, own) for n, own in zip(values, torch.stack(norms, 1), strict=True)}
    sent = an_upload((1, 2, 3), delta=values, levels=levels, extra={}, notes={})
    message, shapes = pack_upload(sent), {"delta": {name: t[0] for name, t in values.items()}}
    came = unpack_upload(message, [1, 2, 3], shapes, dict.fromkeys(values, bits), notes={})
    for name, t in values.items():
        torch.testing.assert_close(came.delta[name], t, rtol=0, atol=0, equal_nan=True)
    payload = len(message) - int.from_bytes(message[:8], "little") - 8
    assert payload == 3 * (sent.bytes_per_client + 8 + 1)  # losses, and who is finite
    assert came.bytes_per_client == sent.bytes_per_client


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {}}, "model lacks 'a.first'"),
        ({"model": MODEL | {"scale": torch.ones(2)}}, r"model.scale is \(2, torch.float32\), .*\(torch"),
        ({"round": "../x"}, "round='../x' must be a whole number from 0"),
    ],
)
def test_a_download_of_another_model_is_refused_by_name(changes, words):
    with pytest.raises(MessageError, match=words):
        unpack_download(pack_download(a_download(**changes)), MODEL)


UPLOAD = upload_content(an_upload())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"round": 2}, r"upload.round=2 must be one of \[3\]"),
        ({"clients": np.array([5, 8])}, r"upload.clients=8 must be one of \[2, 5\]"),
        ({"clients": 5}, "upload.clients=5 must be a list"),
        ({"num_samples": np.array([1, 2**62])}, rf"upload.num_samples={2**62} must be one of \[2\]"),
        ({"num_steps": np.array([9, 11])}, "upload.num_steps=11 must be a whole number from 0 to 10"),
        ({"loss": torch.tensor([0.0, 1e308], dtype=torch.float64)}, "upload.loss=.*1e[+]308"),
        ({"finite": torch.ones(2)}, r"upload.finite is \(2, torch.float32\)"),
        ({"extra": UPLOAD["extra"] | {"x": {"y": torch.zeros(2)}}}, "upload.extra has 'x'"),
        ({"extra": UPLOAD["extra"] | {"control": {"scale": torch.zeros(2).int()}}}, "extra.control.scale is .*int32"),
        ({"notes": {"drift": {"": torch.zeros(4)}}}, r"upload.notes.drift. is \(4,"),
        ({"levels": {"scale": torch.ones(2)}}, "upload.levels has 'scale'"),
    ],
)
def test_an_upload_that_does_not_follow_its_schema_is_refused_by_its_key(changes, words):
    with pytest.raises(MessageError, match=words):
        unpack_upload(pack("upload", UPLOAD | changes))


def test_bits_that_are_not_those_of_the_runs_quantization_are_refused():
    content = upload_content(an_upload(levels={"scale": Levels(8, torch.ones(2))}))
    floats = {"delta": UPLOAD["delta"]}, r"upload.delta.scale is .* must be \(2, 1, torch.uint8"
    for changes, words in (({"levels": {}}, "upload.levels lacks 'scale'"), floats):
        with pytest.raises(MessageError, match=words):
            unpack_upload(pack("upload", content | changes), bits={"scale": 8})


def test_other_kinds_and_damaged_messages_are_refused():
    message = pack_download(a_download())
    with pytest.raises(MessageError, match="is of kind 'download', where 'upload' was expected"):
        unpack(message, "upload")

    def with_header(text):
        return save({"0": torch.ones(3, 2)}, metadata={"gcfed": text})

    headers = [
        json.dumps({"kind": "download", "content": {"model": {TENSOR: "0", "strides": strides}}})
        for strides in ([0, 0], [100, 1], [2], ["1", 1], [2**70, 1], None)
    ]
    headers += ["[" * 10**5, "[1]", '{"kind": "download", "content": ' + "9" * 5000 + "}", '{"kind": "download"}']
    damaged = [b"", b"\xff" * 40, message[:100], message[:-1], save({"t": torch.ones(1)}), *map(with_header, headers)]
    for message in [*damaged, None, {"kind": "download"}, torch.ones(2)]:
        with pytest.raises(MessageError, match="cannot be read"):
            unpack(message, "download")
