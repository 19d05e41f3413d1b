"""The quantizer has QSGD's levels, mean and variance bound.

Bytes are exact, and each client has its own draws.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import assert_near, bytes_per_client, join_run, make_download, make_setup, make_upload
from torch import nn

from gcfed.methods.upload.quantization import Quantization, quantize_


def quantized(x, bits, seed=0):
    out = x.clone()
    quantize_([out], 2 ** (bits - 1) - 1, torch.Generator().manual_seed(seed))
    return out


@pytest.mark.parametrize(
    ("bits", "dtype"), [(2, torch.float32), (3, torch.float64), (8, torch.float32)]
)
def test_each_coordinate_is_rounded_to_a_neighbouring_level(bits, dtype):
    x = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=dtype)
    x[3] = 0
    s = 2 ** (bits - 1) - 1
    norm = x.norm()
    q = quantized(x, bits)
    level = (q * s / norm).double()
    assert_near(level, level.round(), 1e-4)
    assert ((q - x).abs() < norm / s * (1 + 1e-5)).all()
    assert (q * x >= 0).all()
    assert level.abs().max() <= s + 1e-4
    assert q[3] == 0


@pytest.mark.parametrize("bits", [2, 4])
def test_the_quantizer_is_unbiased_and_within_the_variance_bound(bits):
    d = 20
    draws = 4000
    s = 2 ** (bits - 1) - 1
    x = torch.randn(d, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    q = x.repeat(draws, 1)
    quantize_(list(q), s, torch.Generator().manual_seed(3))
    error = (q.mean(0) - x).abs()
    assert (error <= 4.5 * q.std(0) / math.sqrt(draws) + 1e-6).all()
    variance = (q - x).square().sum(1).mean()
    assert variance <= 1.02 * min(d / s**2, math.sqrt(d) / s) * x.square().sum()
    # Exactly: Σ ‖x‖²/s² · f (1 − f), with f the fraction of s|x|/‖x‖.
    f = (s * x.abs() / x.norm()).frac()
    torch.testing.assert_close(
        variance, (x.square().sum() / s**2 * f * (1 - f)).sum(), rtol=0.05, atol=0
    )


def test_many_bits_are_the_identity():
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
    q = quantized(x, 32)
    assert q.stride() == x.stride()
    assert_near(q, x, 1e-7)


def test_zeros_small_and_infinite_numbers():
    assert torch.equal(quantized(torch.zeros(3), 8), torch.zeros(3))
    lone = torch.tensor([-0.1])
    torch.testing.assert_close(quantized(lone, 2), lone)
    # its norm in float32, as it is sent, is less than 0.7
    rounded_down = torch.tensor([0.7], dtype=torch.float64)
    assert quantized(rounded_down, 32).item() <= rounded_down.float().item()
    for bad in (float("nan"), float("inf")):
        assert quantized(torch.tensor([1.0, bad, 0.0]), 8).isnan().any()
    assert quantized(torch.full((4,), 1e-30), 8).isfinite().all()


def uploads(k, seed=0):
    """Three clients' updates, K at a time."""
    g = torch.Generator().manual_seed(seed)
    delta = {
        "w": torch.randn(3, 5, 3, generator=g, dtype=torch.float64),
        "b": torch.randn(3, 7, generator=g),
    }
    return [
        make_upload({n: t[i : i + k].clone() for n, t in delta.items()}, np.ones(k))
        for i in range(0, 3, k)
    ]


def quantization(bits):
    """The method for a network with the parameters w and b."""
    method = Quantization(bits)
    net = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1)), "b": nn.Parameter(torch.zeros(1))})
    join_run(method, make_setup(net))
    return method


@pytest.mark.parametrize("bits", [2, 5])
def test_each_client_has_its_own_draws_and_bytes(bits):
    download = make_download({})
    sent = {}
    for k in (1, 3):
        parts = uploads(k)
        for i, upload in enumerate(parts):
            upload.clients = np.arange(3)[i * k : (i + 1) * k] + 10
            # another method sends 1000 bytes more
            upload.send("more", {"t": torch.zeros(k, 125).double()})
            quantization(bits).send(upload, {}, download)
            assert (
                bytes_per_client(upload)
                == math.ceil(15 * bits / 8) + 4 + math.ceil(7 * bits / 8) + 4 + 1000
            )
        sent[k] = {n: torch.cat([u.delta[n] for u in parts]) for n in ("w", "b")}
    for name in ("w", "b"):
        assert torch.equal(sent[1][name], sent[3][name])
    for changed in ("round_index", "seed"):
        other = uploads(3)[0]
        other.clients = np.arange(3) + 10
        quantization(bits).send(other, {}, replace(download, **{changed: 7}))
        assert not torch.equal(other.delta["w"], sent[3]["w"])
    twins = uploads(3)[0]
    for t in twins.delta.values():
        t[1] = t[0]
    quantization(bits).send(twins, {}, download)
    assert not torch.equal(twins.delta["w"][0], twins.delta["w"][1])
