"""LEAF's networks: FEMNIST's and CelebA's CNNs and the character LSTM."""

import pytest
import torch
from torch import nn

from gcfed.models.celeba import CelebACNN
from gcfed.models.cnn import CNN
from gcfed.models.lstm import CharLSTM


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def lstm(**options) -> CharLSTM:
    torch.manual_seed(0)
    return CharLSTM(input_shape=(80,), num_classes=80, **options)


def faces(**options) -> CelebACNN:
    torch.manual_seed(0)
    return CelebACNN(**{"input_shape": (3, 84, 84), "num_classes": 2} | options)


def test_parameter_counts_follow_from_the_layer_sizes():
    femnist = CNN(input_shape=(1, 28, 28), num_classes=62, hidden=2048)
    assert count(femnist) == (25 * 32 + 32) + (800 * 64 + 64) + (3136 * 2048 + 2048) + (2048 * 62 + 62)
    assert count(faces()) == (27 * 32 + 32) + 3 * (288 * 32 + 32) + 4 * 64 + (6 * 6 * 32 * 2 + 2)
    gates = 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2)
    assert count(lstm()) == 81 * 8 + gates + 256 * 80 + 80


def test_layer_names_that_borderlines_use():
    assert [name for name, _ in lstm().named_children()] == ["embedding", "lstm1", "lstm2", "fc"]
    assert [name for name, _ in faces().named_children()][::2] == ["conv1", "conv2", "conv3", "conv4", "fc"]


@pytest.mark.parametrize("last_only", [False, True])
def test_lstm_is_torchs_with_two_layers(last_only):
    net = lstm(last_only=last_only)
    theirs = nn.LSTM(8, 256, 2, batch_first=True)
    for layer, module in enumerate((net.lstm1, net.lstm2)):
        for name, p in module.named_parameters():
            theirs.get_parameter(name.replace("l0", f"l{layer}")).data = p.data
    x_BT = torch.randint(81, (3, 7))  # 80 is padding
    expected = net.fc(theirs(net.embedding(x_BT))[0])
    torch.testing.assert_close(net(x_BT), expected[:, -1] if last_only else expected)


def test_a_character_depends_on_those_before_it_alone():
    net, x_BT = lstm(), torch.randint(80, (1, 9))
    other = x_BT.clone()
    other[0, 5:] = 80
    same = (net(x_BT) == net(other)).all(-1)[0].tolist()
    assert same == [True] * 5 + [False] * 4


def test_faces_equal_relu_before_pooling_and_norm_within_an_image():
    net = faces().double()
    x_BCHW = torch.randn(2, 3, 84, 84, dtype=torch.float64)
    h = x_BCHW
    for i in range(1, 5):
        h = net.get_submodule(f"norm{i}")(net.get_submodule(f"conv{i}")(h)).relu()
        h = nn.functional.max_pool2d(h, 2, ceil_mode=True)
    assert h.shape == (2, 32, 6, 6)
    assert torch.equal(net(x_BCHW), net.fc(h.flatten(1)))
    torch.testing.assert_close(net(x_BCHW)[:1], net(x_BCHW[:1]))


@pytest.mark.parametrize(
    ("build_wrong", "key"),
    [
        (lambda: CharLSTM(input_shape=(1, 8, 8), num_classes=2), "input_shape"),
        (lambda: faces(groups=5), "^groups=5 does not divide 32 channels"),
        (lambda: faces(groups=0), "^groups=0: "),
    ],
)
def test_impossible_arguments_are_named(build_wrong, key):
    with pytest.raises(ValueError, match=key):
        build_wrong()
