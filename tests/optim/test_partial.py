"""Optimizers from the config: refused settings, and the faster fused forms."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from gcfed.optim import kernels
from gcfed.optim.partial import fused, is_elementwise, try_optimizer, unprofiled_step
from gcfed.utils.instantiate import BuildError
from gcfed.utils.layout import in_memory_order


def test_optimizers_that_cannot_train_are_refused_by_their_key():
    for settings, message in (
        ({"nesterov": True}, "Nesterov momentum"),
        ({"momentum": float("nan")}, "momentum=nan is not finite"),
    ):
        with pytest.raises(BuildError, match=rf"^server: {message}"):
            try_optimizer(partial(SGD, lr=1.0, **settings), "server")
    with pytest.raises(BuildError, match=r"^server: SGD takes lr, .*, not betas: add '~server"):
        try_optimizer(partial(SGD, lr=1.0, betas=(0.9, 0.9)), "server")
    remedy = r"adam: Adam takes lr, .*, not momentum: .* '~adam\.momentum'"
    with pytest.raises(BuildError, match=remedy):
        try_optimizer(partial(torch.optim.Adam, lr=0.1, momentum=0.9), "adam")
    with pytest.raises(BuildError, match=r"not momentun: did you mean sgd\.momentum\?$"):
        try_optimizer(partial(SGD, lr=1.0, momentun=0.9), "sgd")
    # they need a closure, or sparse gradients
    for cls in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(BuildError, match=r"^server: "):
            try_optimizer(cls, "server")


def sgd_after(edit):
    def make(params):
        optimizer = SGD(params, lr=1e-5)
        optimizer.register_step_pre_hook(
            lambda *_: (edit(optimizer.param_groups[0]["params"][0].grad), None)[1]
        )
        return optimizer

    return make


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *[
            (partial(getattr(torch.optim, name), lr=0.1), True)
            for name in ("Adam", "Adagrad", "NAdam", "Rprop", "ASGD")
        ],
        (sgd_after(lambda g: g.add_(torch.randn_like(g))), True),
        (sgd_after(lambda g: g.div_(g.norm())), False),
        (sgd_after(lambda g: g.sub_(g.mean(-1, True)) if g.dim() > 1 else g), False),
        (torch.optim.Adafactor, False),
    ],
)
def test_optimizers_that_mix_stacked_clients_are_found(make, expected):
    assert is_elementwise(make) == expected


@pytest.mark.parametrize(
    "cls", [SGD, partial(SGD, lr=0.1), partial(partial(SGD, lr=0.1), momentum=0.9)]
)
def test_the_fused_form_is_used_unless_the_user_chose_another(cls):
    assert fused(cls).keywords["fused"] is True
    for choice in ({"foreach": False}, {"fused": False}, {"differentiable": True}):
        chosen = partial(cls, **choice)
        assert fused(chosen) is chosen
    assert fused(torch.optim.Rprop) is torch.optim.Rprop  # it has no fused form


@pytest.mark.parametrize(
    ("settings", "collected"),
    [
        ({}, 0),
        ({"momentum": 0.9, "weight_decay": 0.1}, 0),
        ({"momentum": 0.9, "nesterov": True, "maximize": True}, 0),
        ({"momentum": 0.5, "dampening": 0.3}, 0),
        ({"momentum": 0.9, "fused": False}, 4),
    ],
)
def test_a_step_without_its_overhead_computes_the_same(settings, collected):
    """Each step has another learning rate. torch itself collects the tensors in ``collected`` of
    four steps.
    """
    weights = [
        [torch.nn.Parameter(torch.arange(3.0)), torch.nn.Parameter(torch.ones(2, 2))]
        for _ in range(2)
    ]
    plain, ours = (SGD(own, lr=0.5, **{"fused": True} | settings) for own in weights)
    collect = ours._init_group
    calls = []
    ours._init_group = lambda *args: calls.append(args) or collect(*args)
    for step, optimizer in ((plain.step, plain), (unprofiled_step(ours), ours)):
        for t in range(1, 5):
            group = optimizer.param_groups[0]
            group["lr"] = 0.5 / t
            for weight in group["params"]:
                weight.grad = torch.full_like(weight, t**2)
            step()
    assert all(map(torch.equal, *weights))
    assert not torch.equal(weights[0][1], torch.ones(2, 2))
    assert len(calls) == collected


SHAPES = ((7, 3, 3, 5), (1, 4, 3, 5, 1), (3, 4, 2, 3, 3), (5, 1, 3, 3), (8,))


def in_channels_last(shape, generator):
    """Random numbers; images, and rows of images, in channels_last."""
    t = torch.randn(shape, generator=generator)
    if len(shape) < 4:
        return t
    return t.movedim(-3, -1).contiguous().movedim(-1, -3)


@pytest.mark.parametrize(
    "make",
    [
        partial(SGD, lr=0.1),
        partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
        partial(torch.optim.Adam, lr=0.1, weight_decay=0.1),
        partial(torch.optim.Adam, lr=0.1, amsgrad=True),
        partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1, maximize=True),
    ],
)
@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_in_memory_order_has_the_same_bits(make, mixed):
    """``mixed``: gradients are contiguous, and parameters are not.

    torch's own fused step would then read them in the wrong order, so its gradients are in order.
    """
    generator = torch.Generator().manual_seed(0)
    start = [in_channels_last(shape, generator) for shape in SHAPES]
    grads = [in_channels_last(shape, generator) for shape in SHAPES]
    if mixed:
        grads = [grad.contiguous() for grad in grads]
    ends = []
    for direct in (False, True):
        params = [torch.nn.Parameter(t.clone()) for t in start]
        optimizer = make(params, fused=True)
        step = unprofiled_step(optimizer) if direct else optimizer.step
        for t in range(1, 5):
            optimizer.param_groups[0]["lr"] = 0.1 / t
            for p, grad in zip(params, grads, strict=True):
                own = grad * t
                p.grad = own if direct else torch.empty_like(p).copy_(own)
            step()
        ends.append([p.detach() for p in params])
    assert all(map(torch.equal, *ends))
    assert not torch.equal(ends[0][0], start[0])
    assert [p.stride() for p in ends[1]] == [t.stride() for t in start]


@pytest.mark.parametrize(
    ("make", "kernel"),
    [
        (partial(SGD, momentum=0.9), "_fused_sgd_"),
        (torch.optim.Adam, "_fused_adam_"),
        (torch.optim.AdamW, "_fused_adamw_"),
    ],
)
def test_kernels_get_images_as_vectors(make, kernel, monkeypatch):
    p = torch.nn.Parameter(in_channels_last((1, 4, 3, 5, 5), torch.Generator()))
    optimizer = make([p], lr=0.1, fused=True)
    plain = getattr(torch, kernel)
    seen = []

    def spy(*lists, **settings):
        seen.append([t.dim() for tensors in lists[:3] for t in tensors])
        plain(*lists, **settings)

    step = unprofiled_step(optimizer)
    p.grad = torch.ones_like(p)
    step()
    monkeypatch.setattr(torch, kernel, spy)
    step()
    assert seen == [[1, 1, 1]]


FORMS = [
    partial(SGD, momentum=0.9, nesterov=True),
    SGD,
    torch.optim.Adam,
    partial(torch.optim.AdamW, weight_decay=0.1),
]


@pytest.mark.parametrize("make", FORMS)
def test_an_optimizers_state_can_begin_anew(make):
    """As it does for each client that trains in the memory of an earlier one."""
    weights = [torch.nn.Parameter(torch.arange(3.0)) for _ in range(2)]
    plain, ours = (make([w], lr=0.5, fused=True) for w in weights)
    for step, optimizer, weight in zip(
        (plain.step, unprofiled_step(ours)), (plain, ours), weights, strict=True
    ):
        for t in range(6):
            if t == 3:
                optimizer.state.clear()
            weight.grad = torch.full((3,), t + 1.0)
            step()
    assert torch.equal(*weights)


@pytest.mark.parametrize("make", FORMS)
@pytest.mark.parametrize("unused", [False, True])
def test_given_gradients_move_parameters_as_their_own_do(make, unused):
    """Given gradients lack the client axis of the parameters. ``unused``: one is None."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(1, *shape, generator=generator) for shape in ((3, 2), (4,))]
    ends = []
    for given in (False, True):
        params = [torch.nn.Parameter(t.clone()) for t in start]
        optimizer = make(params, lr=0.1, fused=True)
        step = unprofiled_step(optimizer)
        for t in range(1, 5):
            grads = [p.detach() * t for p in params]
            if unused:
                grads[1] = None
            if given:
                step([None if grad is None else grad.squeeze(0) for grad in grads])
                assert all(p.grad is None for p in params)
            else:
                for p, grad in zip(params, grads, strict=True):
                    p.grad = grad
                step()
        ends.append([p.detach() for p in params])
    assert all(map(torch.equal, *ends))
    assert not torch.equal(ends[0][0], start[0])
    assert torch.equal(ends[0][1], start[1]) == unused


@pytest.mark.parametrize("make", FORMS)
def test_a_step_leaves_no_history(make):
    """Not even if the gradient has one, and autograd is on."""
    p = torch.nn.Parameter(torch.ones(3))
    step = unprofiled_step(make([p], lr=0.1, fused=True))
    for _ in range(3):
        (grad,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
        p.grad = grad
        step()
    assert p.is_leaf
    assert not p.grad_fn
    assert p.detach().ne(1).all()


@pytest.mark.parametrize("make", FORMS)
def test_lists_of_tensors_are_made_once(make, monkeypatch):
    """Later steps with the same parameters, states and strides use them again."""
    made = []
    monkeypatch.setattr(
        kernels, "in_memory_order", lambda *sets: made.append(0) or in_memory_order(*sets)
    )
    p = torch.nn.Parameter(in_channels_last((4, 3, 5, 5), torch.Generator().manual_seed(0)))
    optimizer = make([p], lr=0.1, fused=True)
    step = unprofiled_step(optimizer)
    for _ in range(5):
        p.grad = torch.ones_like(p)
        step()
    assert len(made) == 1
    optimizer.param_groups[0]["params"] = [p]
    step()
    assert len(made) == 2


@pytest.mark.parametrize("make", [*FORMS, partial(torch.optim.Adam, amsgrad=True)])
def test_gradients_in_another_order_in_memory_move_the_right_weights(make):
    """A hook may assign such a gradient. torch's fused steps read its memory as it lies."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 3, 5, 5, generator=generator)
    grads = [torch.randn(4, 3, 5, 5, generator=generator) for _ in range(3)]
    ends = []
    for others in (False, True):
        p = torch.nn.Parameter(start.clone())
        step = unprofiled_step(make([p], lr=0.1, fused=True))
        for grad in grads:
            layout = torch.channels_last if others else torch.contiguous_format
            p.grad = grad.to(memory_format=layout)
            step()
        ends.append(p.detach())
    assert torch.equal(*ends)


def test_memory_order_leaves_out_what_it_cannot_view():
    """Gaps, other strides, and entries that appear twice."""
    image = torch.arange(24.0).view(2, 2, 2, 3).permute(0, 3, 1, 2)
    alike = image * 2
    other = image.contiguous()
    gaps = torch.arange(48.0).view(4, 2, 2, 3).permute(0, 3, 1, 2)[::2]
    twice = torch.arange(6.0).view(1, 2, 3).expand(2, 2, 3)
    (flat, unlike), (flat_2, unlike_2) = in_memory_order([image, image], [alike, other])
    assert torch.equal(flat, torch.arange(24.0))
    assert torch.equal(flat_2, 2 * torch.arange(24.0))
    assert flat.data_ptr() == image.data_ptr()
    assert unlike is image
    assert unlike_2 is other
    for t in (gaps, twice, other):
        assert in_memory_order([t])[0][0] is t
