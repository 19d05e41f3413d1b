"""The papers' networks: their sizes, and their values in other implementations."""

import math

import pytest
import torch
from torch import nn
from torchvision import models as tv
from torchvision.models.vgg import cfgs

from gcfed.federated.network.tap import Tap
from gcfed.models.cnn import CNN, CelebACNN
from gcfed.models.lstm import CharLSTM
from gcfed.models.mlp import MLP
from gcfed.models.resnet import ResNet9, ResNet18, ResNetCIFAR
from gcfed.models.vgg import VGG11

BUILD = {"mlp": MLP, "cnn": CNN, "resnet18_gn": ResNet18, "vgg11": VGG11}
SHAPE = {"mlp": (1, 28, 28), "cnn": (3, 32, 32), "resnet18_gn": (3, 32, 32), "vgg11": (3, 64, 64)}


def build(name: str, seed: int = 0, num_classes: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    return BUILD[name](input_shape=SHAPE[name], num_classes=num_classes)


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("name", "size"), [("mlp", 256), ("cnn", 64 * 8 * 8), ("resnet18_gn", 512), ("vgg11", 4096)]
)
def test_features_have_the_size_that_the_papers_regularize(name, size):
    with torch.device("meta"):
        _, features_BF = Tap(build(name), features=True, stages=False)(torch.randn(2, *SHAPE[name]))
    assert features_BF.shape == (2, size)


def test_parameter_counts_follow_from_the_layer_sizes():
    with torch.device("meta"):
        mlp = MLP(input_shape=(1, 28, 28), num_classes=62)
        assert count(mlp) == 784 * 512 + 512 + 512 * 256 + 256 + 256 * 62 + 62
        two = (800 * 64 + 64) + (4096 * 512 + 512)
        assert count(CNN(input_shape=(3, 32, 32), num_classes=10)) == (75 * 32 + 32) + two + (
            512 * 10 + 10
        )
        fedgc = CNN(input_shape=(3, 32, 32), num_classes=10, hidden=[512, 100])
        assert count(fedgc) == (75 * 32 + 32) + two + (512 * 100 + 100) + (100 * 10 + 10)
        femnist = CNN(input_shape=(1, 28, 28), num_classes=62, hidden=2048)
        assert count(femnist) == (25 * 32 + 32) + (800 * 64 + 64) + (3136 * 2048 + 2048) + (
            2048 * 62 + 62
        )
        faces = CelebACNN(input_shape=(3, 84, 84), num_classes=2)
        assert count(faces) == (27 * 32 + 32) + 3 * (288 * 32 + 32) + 4 * 64 + (6 * 6 * 32 * 2 + 2)
        # The published size of torchvision's ResNet18, minus the weights that the smaller stem
        # saves.
        assert count(ResNet18(num_classes=1000)) == 11_689_512 - 64 * 3 * (49 - 9)


@pytest.mark.parametrize("last_only", [False, True])
def test_lstm_equals_torchs_with_two_layers(last_only):
    net = CharLSTM(input_shape=(80,), num_classes=80, last_only=last_only)
    theirs = nn.LSTM(8, 256, 2, batch_first=True)
    for layer, module in enumerate((net.lstm1, net.lstm2)):
        for name, p in module.named_parameters():
            theirs.get_parameter(name.replace("l0", f"l{layer}")).data = p.data
    x_BT = torch.randint(81, (3, 7))  # 80 is padding
    expected = net.fc(theirs(net.embedding(x_BT))[0])
    torch.testing.assert_close(net(x_BT), expected[:, -1] if last_only else expected)
    for padding in (-1, -100):  # they share the last embedding
        assert torch.equal(net(torch.full((1, 3), padding)), net(torch.full((1, 3), 80)))


def test_faces_equal_relu_before_pooling_and_norm_within_an_image():
    net = CelebACNN(input_shape=(3, 84, 84), num_classes=2).double()
    x_BCHW = torch.randn(2, 3, 84, 84, dtype=torch.float64)
    h = x_BCHW
    for i in range(1, 5):
        h = net.get_submodule(f"norm{i}")(net.get_submodule(f"conv{i}")(h)).relu()
        h = nn.functional.max_pool2d(h, 2, ceil_mode=True)
    assert h.shape == (2, 32, 6, 6)
    assert torch.equal(net(x_BCHW), net.fc(h.flatten(1)))


def test_resnet_equals_torchvisions_with_another_stem():
    ours = build("resnet18_gn")
    theirs = tv.resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(32, channels))
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.maxpool = nn.Identity()
    theirs.load_state_dict(ours.state_dict())
    x_BCHW = torch.randn(2, 3, 8, 8)
    assert torch.equal(ours(x_BCHW), theirs(x_BCHW))


def test_vgg_equals_torchvisions():
    """It has the published size. Values are compared with few channels and units."""
    with torch.device("meta"):
        ours = VGG11(num_classes=1000)
        theirs = tv.vgg11(num_classes=1000)
    assert count(ours) == count(theirs) == 132_863_336
    assert {n: p.shape for n, p in ours.named_parameters()} == {
        n: p.shape for n, p in theirs.named_parameters()
    }
    assert [m.p for m in ours.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    narrow = narrow_vgg(input_shape=(3, 64, 64), num_classes=10).eval()
    theirs.eval()
    theirs.features = narrow.features
    theirs.classifier = narrow.classifier
    x_BCHW = torch.randn(2, 3, 64, 64)
    assert torch.equal(narrow(x_BCHW), theirs(x_BCHW))


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_weights_are_kaiming_normal_and_biases_zero(name):
    for layer in build(name).children():
        fan_in = layer.weight[0].numel()
        # five standard errors of the standard deviation
        tolerance = 5 / math.sqrt(2 * layer.weight.numel())
        assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=tolerance)
        kurtosis = ((layer.weight / layer.weight.std()) ** 4).mean().item()
        # a uniform one has 1.8
        assert kurtosis == pytest.approx(3, abs=5 * math.sqrt(24 / layer.weight.numel()))
        assert not layer.bias.any()


def test_cnn_equals_relu_before_pooling_in_values_and_gradients():
    net = build("cnn").double()
    x_BCHW = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    pool = nn.MaxPool2d(2)
    plain = nn.Sequential(
        net.conv1,
        nn.ReLU(),
        pool,
        net.conv2,
        nn.ReLU(),
        pool,
        nn.Flatten(),
        net.fc1,
        nn.ReLU(),
        net.fc2,
    )
    ours = torch.autograd.grad(net(x_BCHW).square().sum(), list(net.parameters()))
    theirs = torch.autograd.grad(plain(x_BCHW).square().sum(), list(net.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def narrow_vgg(**shape) -> nn.Module:
    """VGG11 with 16 units instead of 4,096, and with 16 channels instead of up to 512 after the
    first layer.
    """
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setitem(cfgs, "A", [64, "M", 16, "M", 16, 16, "M", 16, 16, "M", 16, 16, "M"])
        net = VGG11(**shape)
        net.classifier[0] = nn.Linear(16 * 49, 16)
        net.classifier[3] = nn.Linear(16, 16)
        net.classifier[6] = nn.Linear(16, 10)
    net.to_empty(device="cpu")
    for p in net.parameters():
        nn.init.normal_(p, std=0.1)
    return net


# ------------------------------------------------------------------------------------------ FedGC's
# and SSF's networks
def trained(net: nn.Module) -> nn.Module:
    """Adds noise, so that no parameter is zero."""
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


def test_fixup_starts_with_identities_and_zero_logits():
    net = ResNet9(input_shape=(3, 32, 32), num_classes=10)
    x_BCHW = torch.randn(4, 3, 8, 8)
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
            # L^(−1/(2·2−2)), L = 2
            expected = 0 if m in last else kaiming / math.sqrt(2) if m in inner else kaiming
            assert m.weight.std().item() == pytest.approx(
                expected, rel=5 / math.sqrt(2 * m.weight.numel())
            )


def test_resnet9_equals_the_authors_layout():
    """The plain version has ReLU before pooling. Values and gradients are compared."""
    net = trained(ResNet9(input_shape=(3, 8, 8), num_classes=10).double())
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
    ours = net(x_BCHW)
    theirs = plain(x_BCHW)
    torch.testing.assert_close(ours, theirs)
    ours, theirs = (
        torch.autograd.grad(y.square().sum(), list(net.parameters())) for y in (ours, theirs)
    )
    torch.testing.assert_close(ours, theirs)


def test_resnet110_has_the_papers_size():
    with torch.device("meta"):
        net = ResNetCIFAR(input_shape=(3, 32, 32), num_classes=10)
        paper = ResNetCIFAR(input_shape=(3, 32, 32), num_classes=10, norm="batch", depth=20)
    blocks = 18 * (2 * 16**2 + 2 * 32**2 + 2 * 64**2) - 16 * 32 - 32 * 64
    norms = 2 * (16 + 2 * 18 * (16 + 32 + 64))
    assert count(net) == 9 * (3 * 16 + blocks) + norms + 64 * 10 + 10 == 1_727_962
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in net.modules()) == 110
    assert len(list(net.buffers())) == 0
    assert len(list(paper.buffers())) == 3 * 19


def test_resnet_cifar_block_by_block():
    net = trained(ResNetCIFAR(input_shape=(3, 32, 32), num_classes=10, depth=14).double())
    x_BCHW = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    h = net.norm1(net.conv1(x_BCHW)).relu()
    shapes = []
    for layer in (net.layer1, net.layer2, net.layer3):
        for block in layer:
            out = block.bn2(block.conv2(block.bn1(block.conv1(h)).relu()))
            if out.shape != h.shape:  # option A: every second pixel, and zeros for new channels
                small = torch.zeros_like(out)
                small[:, : h.shape[1]] = h[:, :, ::2, ::2]
                h = small
            h = (out + h).relu()
        shapes.append((*h.shape[1:],))
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    torch.testing.assert_close(net.features(x_BCHW), h.mean((2, 3)))
    torch.testing.assert_close(net(x_BCHW), net.fc(h.mean((2, 3))))
