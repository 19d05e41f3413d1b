"""All our networks have stages that compose to the network, features, and stacks.

A teacher is the plain network.
"""

import copy

import pytest
import torch
from harness import stack_of
from test_models import narrow_vgg
from torch.func import functional_call, stack_module_state, vmap

from gcfed.federated.network.tap import Tap
from gcfed.models.cnn import CNN, CelebACNN
from gcfed.models.lstm import CharLSTM
from gcfed.models.mlp import MLP, Linear
from gcfed.models.resnet import ResNet9, ResNet18, ResNetCIFAR
from gcfed.models.transformers import CCT, GPT, ViT

SMALL = {"width": 8, "depth": 2, "heads": 2}
MAKE = {  # the network and the shape of an input
    "mlp": (MLP, (1, 9, 9)),
    "cnn": (CNN, (3, 8, 9)),
    "cnn of two hidden layers": (lambda **kw: CNN(hidden=[30, 20], **kw), (3, 8, 8)),
    "resnet18_gn": (ResNet18, (3, 8, 8)),
    "vgg11": (narrow_vgg, (3, 32, 32)),
    "resnet9": (ResNet9, (3, 8, 8)),
    "resnet14": (lambda **kw: ResNetCIFAR(depth=14, **kw), (3, 9, 10)),
    "celeba_cnn": (CelebACNN, (3, 20, 17)),
    "linear": (Linear, (7,)),
    "lstm": (lambda **kw: CharLSTM(hidden=8, **kw), (6,)),
    "lstm of the last": (lambda **kw: CharLSTM(hidden=8, last_only=True, **kw), (6,)),
    "vit": (lambda **kw: ViT(**SMALL, **kw), (3, 8, 12)),
    "cct": (lambda **kw: CCT(**SMALL, norm="rms", **kw), (3, 8, 9)),
    "gpt": (lambda **kw: GPT(**SMALL, norm_first=False, **kw), (6,)),
    "gpt of the last": (lambda **kw: GPT(**SMALL, last_only=True, **kw), (6,)),
}
NOISE = torch.randn(2**18, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(name, seed=0):
    """Weights come from one draw, which is fast, and have Kaiming's scale.

    None is zero, unlike initially.
    """
    make, shape = MAKE[name]
    with torch.device("meta"):
        net = make(input_shape=shape, num_classes=10).double()
    net.to_empty(device="cpu")
    with torch.no_grad():
        for i, (key, p) in enumerate(net.named_parameters()):
            noise = (
                NOISE.roll(1000 * seed + i)
                .repeat(-(-p.numel() // len(NOISE)))[: p.numel()]
                .view_as(p)
            )
            p.copy_(
                noise * (2 / p[0].numel()) ** 0.5
                if p.dim() > 1
                else 0.1 * noise + ("bias" not in key)
            )
    return net


def images(name, *batch):
    shape = MAKE[name][1]
    g = torch.Generator().manual_seed(1)
    if name.startswith(("lstm", "gpt")):
        return torch.randint(11, (*batch, *shape), generator=g)
    return torch.randn(*batch, *shape, generator=g, dtype=torch.float64)


def compose(net, h, first=0):
    outputs = []
    for stage in list(net.stages().values())[first:]:
        h = stage(h)
        outputs.append(h)
    return outputs


@pytest.mark.parametrize("name", MAKE)
def test_stages_and_the_head_of_features_equal_the_network(name):
    net = network(name).eval()
    x = images(name, 2)
    outputs = compose(net, x)
    assert len(outputs) == (1 if name == "linear" else max(3, len(outputs)))
    assert torch.equal(outputs[-1], net(x))
    torch.testing.assert_close(net(x)[:1], net(x[:1]))  # samples are independent
    names = [n for n, _ in net.named_parameters()]
    used = torch.autograd.grad(
        outputs[-1].square().sum(), list(net.parameters()), allow_unused=True
    )
    # stages use all parameters
    assert not [n for n, g in zip(names, used, strict=True) if g is None]
    logits, features = Tap(net, features=True, stages=False)(x)
    assert torch.equal(logits, net(x))
    if name not in ("lstm", "gpt"):  # a Tap flattens their features over all positions
        assert torch.equal(logits, net.head(features))


@pytest.mark.parametrize("name", [name for name in MAKE if not name.startswith("lstm")])
def test_a_stack_under_vmap_equals_its_networks(name):
    nets = [network(name, seed).eval() for seed in range(2)]
    x_KB = images(name, 2, 2)
    params, buffers = stack_module_state(nets)
    logits_KBC = vmap(lambda p, b, x: functional_call(nets[0], (p, b), (x,)))(params, buffers, x_KB)
    logits_KBC.square().sum().backward()
    for k, net in enumerate(nets):
        logits_BC = net(x_KB[k])
        torch.testing.assert_close(logits_KBC[k], logits_BC, rtol=1e-9, atol=1e-9)
        logits_BC.square().sum().backward()
        for key, p in net.named_parameters():
            error = (params[key].grad[k] - p.grad).norm() / p.grad.norm()
            assert error < 1e-9, (key, error)


@pytest.mark.parametrize(
    ("name", "k", "shared"),
    [
        ("mlp", 1, False),
        ("mlp", 3, True),
        ("mlp", 3, False),
        ("cnn", 2, False),
        ("vgg11", 2, False),
        ("vit", 2, False),
    ],
)
def test_a_teacher_equals_the_plain_network(name, k, shared):
    """It starts at the first stage (with features), the second or the last.

    Only the stack trains with dropout.
    """
    net = network(name).train()
    others = [net] * k if shared else [network(name, seed) for seed in range(1, 1 + k)]
    teachers = [copy.deepcopy(o).eval() for o in others]
    stack = stack_of(net, k)
    with torch.no_grad():
        for leaf in stack.leaves.values():  # the clients' weights must not matter
            leaf.add_(1.0)
    params = None
    if not shared:
        params = {
            n: torch.stack([dict(o.named_parameters())[n].detach() for o in others])
            for n in stack.leaves
        }
    x = images(name, k, 1)
    inner = [compose(t, x[i]) for i, t in enumerate(teachers)]
    for first in (0, 1, len(inner[0]) - 1):
        h = x if first == 0 else torch.stack([outputs[first - 1] for outputs in inner]).detach()
        h = h.clone().requires_grad_()
        out = stack.reference(h, params=params, first=first, stages=True, features=first == 0)
        if first == 0:
            features = torch.stack([Tap(t, True, False)(x[i])[1] for i, t in enumerate(teachers)])
            torch.testing.assert_close(out.features_KBF, features, rtol=1e-9, atol=1e-9)
        out.logits_KBC.square().sum().backward()  # must not reach the leaves
        plain = h.detach().requires_grad_()
        logits = torch.stack([compose(t, plain[i], first)[-1] for i, t in enumerate(teachers)])
        (expected,) = torch.autograd.grad(logits.square().sum(), plain)
        torch.testing.assert_close(out.logits_KBC, logits, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(h.grad, expected, rtol=1e-8, atol=1e-9)
        assert len(out.stages) == len(inner[0]) - first
    assert net.training
    assert all(p.grad is None for p in [*net.parameters(), *stack.leaves.values()])
