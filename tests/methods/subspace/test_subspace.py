"""Projectors, and the common code of both subspace methods: draws, shapes, order of the hooks,
refusals.
"""

import itertools
from functools import partial

import pytest
import torch
from harness import assert_near, make_net, make_setup, server_of, sgd, train_rounds
from torch import nn

from gcfed.federated.parts.method import parts_of
from gcfed.federated.parts.refusals import validate_parts
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.objective.proximal import Proximal
from gcfed.methods.sharpness.sam import Sam
from gcfed.methods.subspace.fedsub import FedSub
from gcfed.methods.subspace.random import Projector, Subspaces, random_basis
from gcfed.methods.subspace.ssf import SSF
from gcfed.methods.upload.quantization import Quantization

METHODS = [SSF, FedSub]
SHAPES = [(3, 8), (8, 3), (4, 4), (4, 2, 3, 3), (20, 2, 3, 3)]
WIDE = (True, False, True, True, False)


def draw(seed=1, epoch=0, name="fc1.weight", d=9, r=4, dtype=torch.float64):
    return random_basis(seed, epoch, name, d, r, torch.empty(0, dtype=dtype))


@pytest.mark.parametrize("r", [1, 4, 9])
def test_p_is_orthonormal_and_a_function_of_seed_epoch_and_layer(r):
    p = draw(r=r)
    assert_near(p.T @ p, torch.eye(r, dtype=p.dtype), 1e-14)
    assert torch.equal(draw(r=r), p)
    for other in ({"seed": 2}, {"epoch": 1}, {"name": "fc2.weight"}):
        assert not torch.allclose(draw(r=r, **other), p, atol=1e-2)


def test_p_is_uniformly_random():
    """E PPᵀ = (r/d) I and E P = 0.

    A QR decomposition gives this only if Q takes the signs of R's diagonal.
    """
    bases = torch.stack([draw(epoch=i, d=4, r=2) for i in range(500)])
    projections = bases @ bases.mT
    assert_near(projections.mean(0), 0.5 * torch.eye(4, dtype=torch.float64), 0.08)
    assert_near(bases.mean(0), torch.zeros(4, 2, dtype=torch.float64), 0.12)


def test_projectors_are_drawn_again_every_refresh_rounds():
    spaces = Subspaces(0.2, 3)
    model = {"w": torch.zeros(4, 9), "b": torch.zeros(4)}
    drawn = [spaces.space(1, t, model, ["w", "b"]) for t in range(7)]
    assert {space["w"].basis.shape for space in drawn} == {(9, 2)}  # r = 0.2 · 9, rounded
    assert {space["b"].basis for space in drawn} == {None}
    changes = [not torch.equal(a["w"].basis, b["w"].basis) for a, b in itertools.pairwise(drawn)]
    assert changes == [False, False, True, False, False, True]
    assert Subspaces(0.01, 3).projector(1, 0, "w", model["w"]).basis.shape == (9, 1)


def test_a_method_that_trains_another_network_draws_its_projectors():
    spaces = Subspaces(0.2, 3)
    spaces.space(1, 0, {"w": torch.zeros(4, 9)}, ["w"])
    space = spaces.space(1, 0, {"w": torch.zeros(4, 20)}, ["w"])
    assert space["w"].basis.shape == (20, 4)


@pytest.mark.parametrize(("shape", "wide"), list(zip(SHAPES, WIDE, strict=True)))
@pytest.mark.parametrize("lead", [(), (3,)])
def test_coordinates_of_every_shape(shape, wide, lead):
    tensor = torch.randn(*lead, *shape, dtype=torch.float64)
    out = shape[0]
    inputs = tensor[(0,) * len(lead)].numel() // shape[0]
    p = draw(d=max(out, inputs), r=2)
    projector = Projector(shape, p)
    z = projector.project(tensor)
    assert z.shape == (*lead, *((out, 2) if wide else (2, inputs)))
    matrix = tensor.reshape(*lead, out, inputs)
    expected = matrix @ p @ p.T if wide else p @ p.T @ matrix
    assert_near(projector.lift(z), expected.view(tensor.shape), 1e-13)
    assert_near(projector.project(projector.lift(z)), z, 1e-13)
    if len(shape) == 4 and not lead:
        other = tensor.contiguous(memory_format=torch.channels_last)
        assert_near(projector.project(other), z, 0)


@pytest.mark.parametrize("cls", METHODS)
def test_vectors_and_scalars_are_not_projected(federation, cls):
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(6, 4, dtype=torch.float64)
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x):
            return self.scale * super().forward(x)

    net = Scaled()
    train_rounds(net, federation, sgd(), rounds=1, methods=[cls(ratio=0.5)], k=2)
    assert 0 < (net.scale - 1).abs() < 1


@pytest.mark.parametrize("cls", METHODS)
@pytest.mark.parametrize("others", [[], [GradientCentralization(server=False), Proximal(mu=0.3)]])
def test_a_round_does_not_change_weights_outside_the_subspace(federation, cls, others):
    """Other methods change the gradients, and weight decay is on."""
    net = make_net()
    method = cls(ratio=0.4)
    starts = []

    def outside(name, tensor):
        projector = server_of(method).space[name]
        return tensor - projector.lift(projector.project(tensor))

    def check(round, update):
        for name, p in net.named_parameters():
            starts.append((p.detach() - round.broadcast_model[name]).norm())
            assert_near(
                outside(name, p.detach()), outside(name, round.broadcast_model[name]), 1e-12
            )

    solver = sgd(weight_decay=0.1)
    train_rounds(net, federation, solver, rounds=2, methods=[*others, method], k=2, on_round=check)
    assert min(starts) > 1e-3


def test_the_order_of_the_hooks():
    method = SSF(ratio=0.5)
    gc = GradientCentralization(server=False)
    quantization = Quantization()
    sam = Sam()
    proximal = Proximal()
    parts = parts_of([quantization, method, proximal, gc, sam])
    assert parts == [sam, proximal, gc.local_gc, *method.parts, quantization]


def validate(cls, *, others=(), **parts):
    parts = {"server": partial(torch.optim.SGD, lr=0.5)} | parts
    validate_parts(make_setup(make_net(), methods=[cls(ratio=0.5), *others], **parts))


@pytest.mark.parametrize("cls", METHODS)
def test_clipping_with_weight_decay_is_refused(cls):
    with pytest.raises(ValueError, match=r"client\.clip_norm=1\.0.*weight_decay=0"):
        validate(cls, solver=sgd(weight_decay=0.1, clip_norm=1.0))
    validate(cls, solver=sgd(clip_norm=1.0), others=[Quantization(), Proximal()])
