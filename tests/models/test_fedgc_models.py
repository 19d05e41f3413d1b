"""FedGC's and SSF's networks: ResNet-9 under Fixup and the ResNets of 6n + 2 layers."""

import math

import pytest
import torch
from torch import nn

from gcfed.models.resnet9 import ResNet9
from gcfed.models.resnet_cifar import ResNetCIFAR


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def resnet9(seed: int = 0, shape=(3, 32, 32), num_classes: int = 10) -> ResNet9:
    torch.manual_seed(seed)
    return ResNet9(input_shape=shape, num_classes=num_classes)


def deep(seed: int = 0, **options) -> ResNetCIFAR:
    torch.manual_seed(seed)
    return ResNetCIFAR(**{"input_shape": (3, 32, 32), "num_classes": 10} | options)


def trained(net: nn.Module) -> nn.Module:
    """No parameter is 0 any more."""
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


def test_fixup_starts_with_identities_and_no_opinion():
    net, x_BCHW = resnet9(), torch.randn(4, 3, 32, 32)
    for block in (net.layer1[1], net.layer3[1]):
        h_BCHW = torch.randn(2, block.conv1.in_channels, 8, 8)
        assert torch.equal(block(h_BCHW), h_BCHW.relu())
    assert not net(x_BCHW).any()

    nn.functional.cross_entropy(net(x_BCHW), torch.tensor([0, 1, 2, 3])).backward()
    assert {name for name, p in net.named_parameters() if p.grad.any()} == {"fc.weight", "fc.bias"}

    inner = {net.layer1[1].conv1, net.layer3[1].conv1}
    last = {net.layer1[1].conv2, net.layer3[1].conv2}
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            kaiming = math.sqrt(2 / (9 * m.out_channels))
            expected = 0 if m in last else kaiming / math.sqrt(2) if m in inner else kaiming  # L^(−1/(2·2−2)), L = 2
            assert m.weight.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * m.weight.numel()))


def test_resnet9_computes_what_the_authors_layout_says():
    """ReLU before pooling, every scalar in its place; values and gradients."""
    net = trained(resnet9(shape=(3, 8, 8)).double())
    pool = nn.functional.max_pool2d

    def conv(f, h):
        return (f.conv(h + f.bias_in) * f.scale + f.bias_out).relu()

    def block(b, h):
        out = (b.conv1(h + b.bias1_in) + b.bias1_out).relu()
        return (b.conv2(out + b.bias2_in) * b.scale + b.bias2_out + h).relu()

    def plain(x):
        h = conv(net.conv1, x)
        h = block(net.layer1[1], pool(conv(net.layer1[0], h), 2))
        h = pool(conv(net.layer2, h), 2)
        h = block(net.layer3[1], pool(conv(net.layer3[0], h), 2))
        return (h.flatten(1) + net.fc.bias_in) @ net.fc.weight.T + net.fc.bias

    x_BCHW = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    ours, theirs = net(x_BCHW), plain(x_BCHW)
    torch.testing.assert_close(ours, theirs)
    ours, theirs = (torch.autograd.grad(y.square().sum(), list(net.parameters())) for y in (ours, theirs))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_resnet110_has_the_papers_size(norm):
    net = deep(norm=norm)
    blocks = 18 * (2 * 16**2 + 2 * 32**2 + 2 * 64**2) - 16 * 32 - 32 * 64
    norms = 2 * (16 + 2 * 18 * (16 + 32 + 64))
    assert count(net) == 9 * (3 * 16 + blocks) + norms + 64 * 10 + 10 == 1_727_962
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in net.modules()) == 110
    assert bool(list(net.buffers())) == (norm == "batch")


def test_resnet_cifar_block_by_block():
    net = trained(deep(depth=14).double())
    x_BCHW = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    h, shapes = net.norm1(net.conv1(x_BCHW)).relu(), []
    for layer in (net.layer1, net.layer2, net.layer3):
        for block in layer:
            out = block.norm2(block.conv2(block.norm1(block.conv1(h)).relu()))
            if out.shape != h.shape:  # option A: every other pixel, and zeros for the new channels
                small = torch.zeros_like(out)
                small[:, : h.shape[1]] = h[:, :, ::2, ::2]
                h = small
            h = (out + h).relu()
        shapes.append((*h.shape[1:],))
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    torch.testing.assert_close(net.features(x_BCHW), h.mean((2, 3)))
    torch.testing.assert_close(net(x_BCHW), net.fc(h.mean((2, 3))))
