"""If only one layer trains, only that layer is copied, sent, summed and counted."""

import pytest
import torch
from harness import (
    ArrayData,
    Sizes,
    Spy,
    assert_near,
    random_federation,
    sgd,
    train_rounds,
    weights,
)
from torch import nn

from gcfed.methods.correction.scaffold import Scaffold
from gcfed.methods.upload.quantization import Quantization


class Names(Spy):
    """Records the names of the tensors that clients hold and send."""

    def __init__(self):
        self.held = set()
        self.sent = set()

    def on_clients_end(self, stack, download):
        self.held |= {*stack.full, *stack.leaves, *download.broadcast_model}

    def on_receive(self, upload, round):
        self.sent |= {*upload.delta, *upload.extra.get("scaffold", ())}


@pytest.mark.parametrize(("k", "make"), [(1, lambda: [Quantization(4)]), (3, lambda: [Scaffold()])])
def test_a_frozen_layer_equals_data_that_passed_it_before(k, make):
    data = random_federation()
    torch.manual_seed(0)
    frozen = nn.Sequential(nn.Linear(6, 5), nn.Tanh()).double()
    head = nn.Linear(5, 4).double()
    features = ArrayData(frozen(data.x).detach(), data.y, data.clients)
    alone = nn.Sequential(nn.Linear(5, 4)).double()
    alone.load_state_dict({f"0.{name}": t.clone() for name, t in head.state_dict().items()})
    expected = train_rounds(alone, features, sgd(momentum=0.5), rounds=3, k=k, methods=make())
    net = nn.Sequential(*frozen.requires_grad_(False), head)
    before = weights(frozen).clone()
    names = Names()
    sizes = Sizes()
    train_rounds(net, data, sgd(momentum=0.5), rounds=3, k=k, methods=[*make(), names, sizes])
    assert_near(weights(head), expected, 1e-12)
    assert torch.equal(weights(frozen), before)
    assert names.held == names.sent == {"2.weight", "2.bias"}
    # The server of SCAFFOLD also sends c.
    assert sizes.down == [24 * 8 * (1 + isinstance(next(iter(make()), None), Scaffold))] * 3
