"""Messages are the same after a conversion to bytes and back, and their size is
the counted size.
"""

import json

import numpy as np
import pytest
import torch
from harness import bytes_per_client
from safetensors.torch import save
from torch.utils._pytree import tree_structure

from gcfed.federated.protocol.messages import Download, Expected, Levels, MessageError, Upload
from gcfed.federated.protocol.packing import TENSOR, pack, unpack, unpack_download
from gcfed.federated.protocol.uploads import read_upload, upload_content
from gcfed.methods.upload.quantization import quantize_

MODEL = {
    "conv.weight": torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
    "norm.running_var": torch.rand(4, dtype=torch.float64),
    "a.first": torch.randn(2, 3).bfloat16(),
    "scale": torch.tensor(3.5),
}
EXTRA = {"control": {"scale": torch.tensor(float("-inf"))}, "round": {"index": torch.tensor(2**40)}}
DOWNLOAD = Download(3, 7, 0.1 + 0.2, MODEL, np.array([2, 5]), EXTRA)


def an_upload(k=2, **changes):
    values = {
        "clients": np.arange(k) + 5,
        "num_samples": np.arange(k) + 1,
        "num_steps": np.arange(k) + 9,
        "delta": {n: torch.stack([t * (i + 1) for i in range(k)]) for n, t in MODEL.items()},
        "finite": torch.arange(k) < 1,
        "round_index": 3,
        "loss": torch.rand(k),
        "num_seen": np.arange(k) * 7,
        "extra": {
            "control": {"scale": torch.arange(k) / 3},
            "bits": {"whole": torch.arange(k) > 0},
        },
    }
    return Upload(**values | changes)


def expected_of(upload):
    """What a server expects whose client sends this upload."""
    shapes = {"delta": upload.delta} | upload.extra
    of_one = {name: {n: t[0] for n, t in tensors.items()} for name, tensors in shapes.items()}
    bits = {name: levels.bits for name, levels in upload.levels.items()}
    return Expected(of_one, upload.notes, bits)


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, check_stride=True)
    assert tree_structure(a) == tree_structure(b)  # also the order of names


def payload(message):
    return len(message) - int.from_bytes(message[:8], "little") - 8


def test_messages_keep_their_values_order_and_memory_format():
    message = pack(vars(DOWNLOAD))
    assert_same(vars(unpack_download(message)), vars(DOWNLOAD))
    assert payload(message) == DOWNLOAD.nbytes
    sent = an_upload(notes={"drift": {"": torch.rand(3)}})
    assert_same(
        vars(read_upload(unpack(pack(upload_content(sent))), expected_of(sent))), vars(sent)
    )


@pytest.mark.parametrize(("bits", "dtype"), [(3, torch.float64), (22, torch.float32)])
def test_quantized_values_are_packed_into_their_bits_without_a_change(bits, dtype):
    values = {"w": torch.randn(3, 5, 7, dtype=dtype), "b": torch.zeros(3, 4, dtype=dtype)}
    values["s"] = torch.full((3,), -1e-30, dtype=dtype)
    values["w"][1] = float("nan")
    norms = [
        quantize_(
            [t[row] for t in values.values()],
            2 ** (bits - 1) - 1,
            torch.Generator().manual_seed(row),
        )
        for row in range(3)
    ]
    levels = {n: Levels(bits, own) for n, own in zip(values, torch.stack(norms, 1), strict=True)}
    sent = an_upload(3, delta=values, levels=levels)
    message = pack(upload_content(sent))
    received = read_upload(unpack(message), expected_of(sent))
    assert_same(received.delta, values)
    # losses and ``finite`` are not counted
    assert payload(message) == 3 * (bytes_per_client(sent) + 4 + 1)


def test_damaged_messages_are_refused():
    def with_header(text):
        return save({"0": torch.ones(6)}, metadata={"gcfed": text})

    layouts = [
        ([3, 2], strides)
        for strides in ([0, 0], [100, 1], [2], ["1", 1], [2**70, 1], [-2, 1], None)
    ]
    layouts += [([2**60, 2], [0, 1]), ([7], [1]), ([-1, 2], [2, 1])]
    nodes = [{TENSOR: "0", "shape": shape, "strides": strides} for shape, strides in layouts]
    headers = [*(json.dumps({"model": node}) for node in nodes), "[" * 10**5, "[1]", "9" * 5000]
    message = pack(vars(DOWNLOAD))
    damaged = [
        b"",
        b"\xff" * 40,
        message[:100],
        message[:-1],
        save({"t": torch.ones(1)}),
        *map(with_header, headers),
    ]
    for message in [*damaged, None, torch.ones(2)]:
        with pytest.raises(MessageError, match="cannot be read"):
            unpack(message)
