"""ViT, CCT and GPT: their values equal other implementations."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, vjp, vmap
from torch.overrides import TorchFunctionMode
from torchvision import models as tv

from gcfed.models import transformers
from gcfed.models.facts import activation_bytes
from gcfed.models.transformers import CCT, GPT, NORMS, Block, ViT
from gcfed.utils.checked import SettingError

SHAPES = {"vit": (3, 8, 8), "cct": (3, 7, 9), "gpt": (6,)}
NETS = {"vit": ViT, "cct": CCT, "gpt": GPT}


def build(name, **settings):
    """A network in float64. Noise makes all parameters different from 0 and 1."""
    torch.manual_seed(0)
    settings = {"width": 8, "depth": 2, "heads": 2} | settings
    net = NETS[name](input_shape=SHAPES[name], num_classes=5, **settings).double()
    for p in net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return net


def samples(name, n=3):
    g = torch.Generator().manual_seed(1)
    if name == "gpt":
        return torch.randint(6, (n, *SHAPES[name]), generator=g)
    return torch.randn(n, *SHAPES[name], generator=g, dtype=torch.float64)


def copy_tensors(ours, theirs):
    """Copies the values of our parameters to theirs, which have the same order."""
    for mine, other in zip(ours, theirs, strict=True):
        other.data = mine.detach().reshape(other.shape)


def test_transformers_have_the_published_sizes():
    """CCT-2/3×2 has 0.28 million parameters in its paper. A block of width D has 12 D² + 13 D."""
    images = {"input_shape": (3, 32, 32), "num_classes": 10}
    with torch.device("meta"):
        nets = (
            CCT(**images, depth=2, heads=2, mlp=1),
            ViT(**images),
            GPT(input_shape=(80,), num_classes=80, depth=2),
        )
    cct, vit, gpt = (sum(p.numel() for p in net.parameters()) for net in nets)
    assert cct == 284_490
    assert vit == 4 * (12 * 64**2 + 13 * 64) + 64 * (1 + 65 + 49 + 2 + 10) + 10
    assert gpt == 2 * (12 * 128**2 + 13 * 128) + 128 * (81 + 80 + 2 + 80) + 80


def test_vit_equals_torchvisions():
    ours = build("vit")
    theirs = tv.VisionTransformer(8, 4, 2, 2, 8, 32, num_classes=5).double()
    token, position, *rest = ours.parameters()
    copy_tensors([token, *rest[:2], position, *rest[2:]], theirs.parameters())
    for module in theirs.modules():
        module.eps = 1e-5
    torch.testing.assert_close(ours(samples("vit")), theirs(samples("vit")), rtol=1e-12, atol=1e-12)


def test_gpt_equals_gpt2_and_sees_no_later_token():
    transformers = pytest.importorskip("transformers")
    shape = {
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 6,
        "vocab_size": 6,
        "tie_word_embeddings": False,
    }
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        **shape, **no_dropout, activation_function="gelu", bos_token_id=0, eos_token_id=0
    )
    theirs = transformers.GPT2LMHeadModel(config).double()
    theirs.lm_head = nn.Linear(8, 5).double()
    ours = build("gpt")
    x_BT = samples("gpt")
    matrices = {id(p) for p in theirs.transformer.h.parameters() if p.dim() == 2}  # [in, out]
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.data = (mine.T if id(other) in matrices else mine).detach().reshape(other.shape)
    logits_BTC = ours(x_BT)
    torch.testing.assert_close(logits_BTC, theirs(x_BT).logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours(x_BT[:, :4]), logits_BTC[:, :4])
    last = build("gpt", last_only=True)
    last.load_state_dict(ours.state_dict())
    torch.testing.assert_close(last(x_BT), logits_BTC[:, -1])
    # padding of tokenizers, and our own
    for padding in (-1, -100):
        assert torch.equal(ours(torch.full((1, 6), padding)), ours(torch.full((1, 6), 5)))


def test_cct_equals_its_definition():
    net = build("cct")
    x_BCHW = samples("cct")
    for i in (0, 3):
        x_BCHW = F.max_pool2d(F.conv2d(x_BCHW, net.embed[i].weight, padding=1).relu(), 3, 2, 1)
    h_BTD = x_BCHW.flatten(2).mT + net.embed[6].position
    for block in (net.block1, net.block2, net.norm):
        h_BTD = block(h_BTD)
    weights_BT = F.softmax(F.linear(h_BTD, net.score.weight).squeeze(2), 1)
    x = samples("cct")
    torch.testing.assert_close(net(x), net.fc(torch.einsum("bt,btd->bd", weights_BT, h_BTD)))
    assert net(x).shape == (3, 5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_block_equals_torchs(norm, norm_first):
    torch.manual_seed(0)
    ours = Block(8, 2, 12, False, norm, norm_first, 0.0).double()
    theirs = nn.TransformerEncoderLayer(
        8, 2, 12, 0.0, "gelu", batch_first=True, norm_first=norm_first
    ).double()
    theirs.norm1, theirs.norm2 = (NORMS[norm](8).double() for _ in range(2))
    parts = (ours.attn.qkv, ours.attn.proj, ours.fc1, ours.fc2, ours.norm1, ours.norm2)
    copy_tensors([p for part in parts for p in part.parameters()], theirs.parameters())
    x_BTD = torch.randn(3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x_BTD), theirs(x_BTD), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vit", {"patch": 3}, "patch=3 must divide both sides of the images, 8×8"),
        ("cct", {"heads": 3}, r"heads=3 must divide model\.width=8"),
        ("gpt", {"norm": "batch"}, "norm=batch"),
    ],
)
def test_networks_that_cannot_be_built_are_refused(name, settings, message):
    with pytest.raises(SettingError, match=message):
        build(name, **settings)
    with pytest.raises(SettingError, match="input_shape"):
        NETS[name](input_shape=(5, 5), num_classes=5)


def test_networks_have_dropout_only_if_it_is_set():
    assert not [m for m in build("vit").modules() if isinstance(m, nn.Dropout)]
    net = build("vit", dropout=0.5).train()
    x = samples("vit")
    assert not torch.equal(net(x), net(x))
    assert torch.equal(net.eval()(x), net(x))


# ----------------------------------------------------------------------------- attention on a GPU
class Calls(TorchFunctionMode):
    """Counts the calls of torch's own attention."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.number += function is F.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_uses_torchs_attention_outside_of_stacks(deterministic):
    """Fake tensors have shapes and a device, and no numbers."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    try:
        with FakeTensorMode(), torch.device("cuda"):
            net = GPT(input_shape=(6,), num_classes=5, width=8, depth=3, heads=2)
            x_KB = torch.zeros(2, 4, 6, dtype=torch.int64)
            with Calls() as alone:
                net(x_KB[0])
            states = {name: torch.stack([t, t]) for name, t in net.named_parameters()}
            with Calls() as stacked:

                def loss(state, x):
                    return functional_call(net, state, (x,)).sum()

                vmap(loss)(states, x_KB)
                vmap(lambda state, x: vjp(lambda own: loss(own, x), state)[0])(states, x_KB)
    finally:
        torch.use_deterministic_algorithms(before)
    assert alone.number == (0 if deterministic else 3)
    assert stacked.number == 0


@pytest.mark.parametrize("name", NETS)
def test_torchs_attention_has_the_same_values_and_gradients(name, monkeypatch):
    net = build(name)
    x = samples(name)
    found = []
    for fused in (False, True):
        monkeypatch.setattr(transformers, "has_fused_attention", lambda queries, fused=fused: fused)
        out = net(x)
        grads = torch.autograd.grad(out.square().sum(), list(net.parameters()))
        found.append([out, *grads])
    for explicit, fused in zip(*found, strict=True):
        assert torch.allclose(explicit, fused, rtol=1e-9, atol=1e-12)


def test_activations_count_the_scores_of_attention(monkeypatch):
    """Each block keeps the softmax of H T² scores in float32, also if a GPU would not."""
    monkeypatch.setattr(transformers, "has_fused_attention", lambda queries: True)

    def kept(tokens):
        net = GPT(input_shape=(tokens,), num_classes=5, width=8, depth=3, heads=2).eval()
        return activation_bytes(net, torch.zeros(1, tokens, dtype=torch.int64))

    quadratic = kept(256) - 2 * kept(128)
    scores = 3 * 2 * 4 * (256**2 - 2 * 128**2)
    assert scores <= quadratic <= 4 * scores


def test_activations_are_what_the_backward_pass_reads():
    net = nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.Dropout(0.5), nn.Linear(100, 4)).eval()
    net.register_buffer("sparse", torch.eye(3).to_sparse())
    # the output of ReLU, which the second layer reads too
    assert activation_bytes(net, torch.zeros(1, 6)) == 4 * (6 + 100)
