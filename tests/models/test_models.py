import math

import pytest
import torch
from torch import nn
from torchvision import models as tv
from torchvision.models.vgg import cfgs

from gcfed.federated.forward import Tap
from gcfed.models.cnn import CNN
from gcfed.models.mlp import MLP
from gcfed.models.resnet import resnet18_gn
from gcfed.models.vgg import vgg11

BUILD = {"mlp": MLP, "cnn": CNN, "resnet18_gn": resnet18_gn, "vgg11": vgg11}
SHAPE = {"mlp": (1, 28, 28), "cnn": (3, 32, 32), "resnet18_gn": (3, 32, 32), "vgg11": (3, 64, 64)}


def build(name: str, seed: int = 0, num_classes: int = 10) -> nn.Module:
    torch.manual_seed(seed)
    return BUILD[name](input_shape=SHAPE[name], num_classes=num_classes)


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(("name", "size"), [("mlp", 256), ("cnn", 64 * 8 * 8), ("resnet18_gn", 512), ("vgg11", 4096)])
def test_features_are_what_the_papers_regularize(name, size):
    with torch.device("meta"):
        _, features_BF = Tap(build(name), features=True, stages=False)(torch.randn(2, *SHAPE[name]))
    assert features_BF.shape == (2, size)


def test_parameter_counts_follow_from_the_layer_sizes():
    mlp = MLP(input_shape=(1, 28, 28), num_classes=62)
    assert count(mlp) == 784 * 512 + 512 + 512 * 256 + 256 + 256 * 62 + 62
    cnn = CNN(input_shape=(3, 32, 32), num_classes=10)
    assert count(cnn) == (75 * 32 + 32) + (800 * 64 + 64) + (4096 * 512 + 512) + (512 * 10 + 10)
    # The published size of torchvision's ResNet18, less what the smaller stem saves; both norms have as many weights.
    assert count(resnet18_gn(num_classes=1000)) == 11_689_512 - 64 * 3 * (49 - 9)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("mlp", ["fc1", "fc2", "fc3"]),
        ("cnn", ["conv1", "conv2", "fc1", "fc2"]),
        ("vgg11", ["features", "classifier"]),
    ],
)
def test_layer_names_that_borderlines_use(name, layers):
    with torch.device("meta"):
        net = build(name)
    assert [child for child, module in net.named_children() if list(module.parameters())] == layers


def test_resnet_has_the_62_tensors_of_the_paper():
    names = [name for name, _ in build("resnet18_gn").named_parameters()]
    assert len(names) == 62
    assert names[0] == "conv1.weight"
    assert names[-2:] == ["fc.weight", "fc.bias"]
    assert not list(build("resnet18_gn").buffers())


def test_resnet_computes_torchvisions_with_the_stem_changed():
    ours = build("resnet18_gn")
    theirs = tv.resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(32, channels))
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    theirs.maxpool = nn.Identity()
    theirs.load_state_dict(ours.state_dict())
    x_BCHW = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours(x_BCHW), theirs(x_BCHW))


def test_vgg_is_torchvisions():
    """Of the published size; its values where all but the convolutions is narrow."""
    torch.manual_seed(0)
    with torch.device("meta"):
        ours, theirs = vgg11(num_classes=1000), tv.vgg11(num_classes=1000)
    assert count(ours) == count(theirs) == 132_863_336
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    assert [m.p for m in ours.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    narrow = narrow_vgg(input_shape=(3, 64, 64), num_classes=10).eval()
    theirs.eval().features, theirs.classifier = narrow.features, narrow.classifier
    x_BCHW = torch.randn(2, 3, 64, 64)
    assert torch.equal(narrow(x_BCHW), theirs(x_BCHW))
    with torch.device("meta"):
        for shape in ((1, 32, 32), (3, 32, 32)):
            assert vgg11(input_shape=shape, num_classes=7)(torch.randn(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_weights_are_kaiming_normal_and_biases_zero(name):
    for layer in build(name).children():
        fan_in = layer.weight[0].numel()
        tolerance = 5 / math.sqrt(2 * layer.weight.numel())  # five standard errors of a standard deviation
        assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=tolerance)
        kurtosis = ((layer.weight / layer.weight.std()) ** 4).mean().item()
        assert kurtosis == pytest.approx(3, abs=5 * math.sqrt(24 / layer.weight.numel()))  # 1.8 if it were uniform
        assert not layer.bias.any()


@pytest.mark.parametrize(
    ("name", "shape"),
    [("cnn", (1, 28, 28)), ("cnn", (3, 64, 64)), ("cnn", (2, 13, 9)), ("mlp", (5,)), ("resnet18_gn", (1, 28, 28))],
)
def test_other_input_shapes(name, shape):
    net = BUILD[name](input_shape=shape, num_classes=7)
    assert net(torch.randn(2, *shape)).shape == (2, 7)


def test_mlp_without_hidden_layers_is_linear():
    net = MLP(input_shape=(6,), num_classes=3, hidden=())
    x_BF = torch.randn(4, 6)
    assert torch.equal(net.features(x_BF), x_BF)
    torch.testing.assert_close(net(x_BF), x_BF @ net.fc1.weight.T + net.fc1.bias)


def test_cnn_equals_relu_before_pooling_in_values_and_gradients():
    net = build("cnn").double()
    x_BCHW = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    pool = nn.MaxPool2d(2)
    plain = nn.Sequential(
        net.conv1, nn.ReLU(), pool, net.conv2, nn.ReLU(), pool, nn.Flatten(), net.fc1, nn.ReLU(), net.fc2
    )
    ours = torch.autograd.grad(net(x_BCHW).square().sum(), list(net.parameters()))
    theirs = torch.autograd.grad(plain(x_BCHW).square().sum(), list(net.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("build_wrong", "key"),
    [
        (lambda: CNN(input_shape=(3, 3, 32), num_classes=2), "input_shape"),
        (lambda: vgg11(input_shape=(1, 28, 28), num_classes=2), "input_shape"),
        (
            lambda: resnet18_gn(num_classes=2, groups=48),
            "^groups=48 does not divide 64 channels: use one of 1, 2, 4, 8, 16, 32, 64",
        ),
        (lambda: resnet18_gn(num_classes=2, groups="x"), "^groups=x: "),
    ],
)
def test_impossible_arguments_are_named(build_wrong, key):
    with pytest.raises(ValueError, match=key):
        build_wrong()


def narrow_vgg(**shape) -> nn.Module:
    """VGG11 of 16 units and, after the first layer, 16 channels in place of up to 4,096 and 512."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cfgs, "A", [64, "M", 16, "M", 16, 16, "M", 16, 16, "M", 16, 16, "M"])
        net = vgg11(**shape)
    net.classifier[0], net.classifier[3] = nn.Linear(16 * 49, 16), nn.Linear(16, 16)
    net.classifier[6] = nn.Linear(16, 10)
    return net
