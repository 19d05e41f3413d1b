"""The order of the layers in a forward pass, for our networks, torchvision's and networks as people
write them.
"""

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torchvision import models as tv

from gcfed.models.build import build_net
from gcfed.models.forward_watch import forward_order
from gcfed.models.order import declared_order
from gcfed.utils.resolvers import ROOT

MODELS = sorted(
    {path.stem for path in (ROOT / "configs/model").glob("*.yaml")} - {"huggingface", "own", "timm"}
)
ADDED = {"vit_tiny": ["position", "token"], "cct": ["position"], "gpt": ["position"]}
X = torch.randn(2, 8)


@pytest.mark.parametrize("model", MODELS)
def test_our_networks_declare_their_tensors_in_forward_order(model):
    """So their results do not depend on which of both orders counts. Only transformers have tensors
    that are no weights.
    """
    is_text = model in ("lstm", "gpt")
    cfg = OmegaConf.load(ROOT / f"configs/model/{model}.yaml")
    cfg.model.update(input_shape=[8] if is_text else [3, 32, 32], num_classes=10)
    if model == "resnet110":
        cfg.model.depth = 20
    with torch.device("cpu" if is_text else "meta"):  # the weights do not matter here
        net = build_net(cfg)
        order = forward_order(
            net, torch.zeros(2, *cfg.model.input_shape, dtype=torch.int64 if is_text else None)
        )
    assert order.names == [name for name, _ in net.named_parameters()]
    assert [name.rpartition(".")[2] for name in sorted(order.added)] == ADDED.get(model, [])
    assert len(order.facts()) == bool(order.added)
    assert not order.groups
    assert order.weights == [
        name for name, p in net.named_parameters() if p.dim() > 1 and name not in order.added
    ]
    # for boundary=auto
    assert order.weights[-1].rpartition(".")[0] == order.names[-1].rpartition(".")[0]


def test_tables_of_positions_are_no_weights_and_tables_of_tokens_are():
    """Swin looks up relative positions, GPT-2 the positions.

    Their indices do not depend on the input.
    """
    swin = tv.SwinTransformer([2, 2], 8, [1, 1], [2, 2], [2, 2], num_classes=3)
    added = forward_order(swin, torch.zeros(2, 3, 16, 16)).added
    assert added == {f"features.{i}.0.attn.relative_position_bias_table" for i in (1, 3)}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(5, 8)
            self.tokens = nn.Embedding(7, 8)
            self.rows = nn.Parameter(torch.randn(7, 8))

        def forward(self, x):
            return self.tokens(x) + self.rows[x] + self.places(torch.arange(x.shape[1]))

    order = forward_order(Net(), torch.zeros(2, 5, dtype=torch.int64))
    assert order.added == {"places.weight"}
    assert {*order.weights} == {"tokens.weight", "rows"}


@pytest.mark.parametrize("batch", [torch.tensor([[5, 3, 4], [1, 1, 6]]), torch.full((2, 3), 2)])
def test_positions_that_depend_on_the_padding_are_no_weights(batch):
    """RoBERTa counts the tokens that are no padding."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(7, 8)
            self.places = nn.Embedding(5, 8)
            self.kinds = nn.Parameter(torch.randn(2, 8))
            self.register_buffer("kind", torch.zeros(1, 5, dtype=torch.int64))

        def forward(self, x):
            is_token = x.ne(1).int()
            places = (is_token.cumsum(1) * is_token).long()
            kinds = self.kind.expand(len(x), -1).gather(1, places)
            return self.tokens(x) + self.places(places) + self.kinds[kinds]

    order = forward_order(Net(), batch)
    assert order.added == {"places.weight", "kinds"}
    assert order.weights == ["tokens.weight"]


class Chain(nn.Module):
    """Calls its layers in alphabetical order, but declares them in another order."""

    def __init__(self, declared="cab", **layers):
        super().__init__()
        for name in declared:
            self.add_module(name, layers.get(name) or nn.Linear(8, 8))

    def forward(self, x):
        return self.c(self.b(self.a(x)))


LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "container": lambda: nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 8)
    ),
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "spectral, old": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "script": lambda: torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "recurrent": lambda: Call(nn.LSTM(8, 8, 2, batch_first=True), lambda net, x: net(x)[0]),
    "checkpoint": lambda: Call(
        nn.Linear(8, 8), lambda net, x: checkpoint(net, x, use_reentrant=False)
    ),
    "reentrant": lambda: Call(
        nn.Linear(8, 8), lambda net, x: checkpoint(net, x, use_reentrant=True)
    ),
    "never called": lambda: Call(nn.Linear(8, 8), lambda net, x: F.linear(x, net.weight, net.bias)),
    "centred": lambda: Call(
        nn.Linear(8, 8), lambda net, x: F.linear(x, net.weight - net.weight.mean(), net.bias)
    ),
    "vmap": lambda: Call(
        nn.Linear(8, 8), lambda net, x: torch.func.vmap(lambda row: net.weight @ row)(x) + net.bias
    ),
}


class Call(nn.Module):
    def __init__(self, net, how):
        super().__init__()
        self.net = net
        self.how = how

    def forward(self, x):
        return self.how(self.net, x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LAYERS)
def test_the_order_is_that_of_the_calls_for_all_kinds_of_layers(kind):
    x = torch.randn(2, 3, 8) if kind in ("attention", "recurrent") else X
    net = Chain(**{name: LAYERS[kind]() for name in "cab"})
    order = forward_order(net, x)
    assert order.names == sorted(order.names, key=lambda name: name[0])
    assert order.added == set() == order.groups.keys()
    assert order.place.keys() == {name for name, _ in net.named_parameters()}
    assert order.facts()


@pytest.mark.parametrize("declared", [["w2", "b2", "w1", "b1"], ["b1", "w2", "b2", "w1"]])
def test_parameters_of_one_module_count_where_it_uses_them(declared):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name in declared:
                self.register_parameter(
                    name, nn.Parameter(torch.randn(8, 8) if name[0] == "w" else torch.randn(8))
                )

        def forward(self, x):
            return F.linear(F.linear(x, self.w1, self.b1).relu(), self.w2, self.b2)

    assert [name[1] for name in forward_order(Net(), X).names] == ["1", "1", "2", "2"]


def test_a_weight_counts_where_it_is_last_used():
    tied = Chain("cab")
    tied.c.weight = tied.a.weight
    order = forward_order(tied, X)
    # the first declaration gives the name
    assert order.names == ["a.bias", "b.weight", "b.bias", "c.weight", "c.bias"]
    layer = nn.Linear(8, 8)
    again = forward_order(nn.Sequential(layer, nn.Linear(8, 8), layer), X)
    assert again.names == ["1.weight", "1.bias", "0.weight", "0.bias"]


class Tokens(nn.Module):
    """Has tensors with two or more axes that are no layer's weight, and two weights ``[1, …]``."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)
        shapes = {
            "token": (1, 1, 8),
            "position": (1, 5, 8),
            "table": (5, 8),
            "scale": (1, 1, 8),
            "query": (1, 1, 8),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.mask = nn.Parameter(torch.randn(1, 8))
        self.inputs = nn.Linear(2, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.weight = nn.Parameter(torch.randn(1, 8))
        self.pair = nn.Bilinear(1, 1, 1)
        self.norm = nn.LayerNorm([5, 8])

    def forward(self, x):
        h = torch.zeros(len(x), 5, 8)
        h[:, :1] = self.token
        h[:, 1:] = self.inputs(x.unflatten(1, (4, 2)))
        h = (self.norm(h) + self.position[:, : h.shape[1]] + self.table) * self.scale
        h = torch.where(torch.arange(5)[:, None] == 3, self.mask, h)
        h, _ = self.attention(self.query.expand(len(x), -1, -1), h, h)
        return self.pair(self.head(h[:, 0]), F.linear(h[:, 0], self.weight))


def test_added_and_concatenated_tensors_are_no_weights():
    order = forward_order(Tokens(), X)
    assert order.added == {
        "token",
        "position",
        "table",
        "scale",
        "query",
        "mask",
        "norm.weight",
        "norm.bias",
    }
    assert {"head.weight", "weight", "pair.weight", "attention.in_proj_weight"} <= {*order.weights}
    # where their module is
    assert order.names[:6] == ["token", "position", "table", "scale", "query", "mask"]
    assert (
        order.names.index("attention.out_proj.bias")
        < order.names.index("head.weight")
        < order.names.index("weight")
    )


@pytest.mark.parametrize(
    "scaled_positions",
    [
        lambda net: net.scale * net.positions,
        lambda net: net.scale.sigmoid() * net.positions,
        lambda net: F.normalize(net.positions, dim=-1) / net.scale,
        lambda net: net.positions * net.gates,
        lambda net: (net.positions * net.gates)[torch.arange(3)],
    ],
)
def test_scaled_positions_are_no_weights(scaled_positions):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.ones(1))
            self.positions = nn.Parameter(torch.randn(3, 8))
            self.gates = nn.Parameter(torch.ones(8))
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head((self.inputs(x) + scaled_positions(self)).mean(1))

    order = forward_order(Net(), torch.randn(2, 3, 8))
    assert order.added == {"positions"}
    assert order.weights == ["inputs.weight", "head.weight"]


class Scales(nn.Module):
    """A parametrization: a weight times learned scales, also if they are expanded first."""

    def __init__(self, *shape, expands=False):
        super().__init__()
        self.scales = nn.Parameter(torch.ones(shape))
        self.expands = expands

    def forward(self, weight):
        if self.expands:
            return weight * self.scales.expand_as(weight)
        return weight * self.scales


class JoinedRows(nn.Module):
    """A head for each class, joined to one weight."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(8, 1, bias=False) for _ in range(3)])

    def forward(self, x):
        return F.linear(x, torch.cat([head.weight for head in self.heads]))


def scaled(layer, *shape, expands=False):
    parametrize.register_parametrization(layer, "weight", Scales(*shape, expands=expands))
    return layer


TOKENS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layer", "x", "added"),
    [
        *((parametrizations.weight_norm(nn.Linear(8, 5), dim=dim), X, dim == 1) for dim in (0, 1)),
        (parametrizations.weight_norm(nn.Linear(8, 5), dim=None), X, False),
        (nn.utils.weight_norm(nn.Linear(8, 5), dim=1), X, True),
        (parametrizations.weight_norm(nn.Embedding(7, 8), dim=1), TOKENS, True),
        (parametrizations.weight_norm(nn.ConvTranspose1d(2, 5, 2), dim=1), X.view(2, 2, 4), True),
        (scaled(nn.Linear(8, 5), 1, 8), X, True),
        (scaled(nn.Linear(8, 5), 1, 8, expands=True), X, True),
        (scaled(nn.Conv1d(2, 5, 3), 1, 1, 3), X.view(2, 2, 4), True),
        (parametrizations.spectral_norm(nn.Linear(8, 1)), X, False),
        (JoinedRows(), X, False),
    ],
)
def test_scales_that_all_outputs_of_a_weight_share_are_no_weights(layer, x, added):
    order = forward_order(layer, x)
    assert len(order.added) == added
    for name in order.added:
        assert len(order.params[name]) == 1
    assert max(order.weights, key=lambda name: order.params[name].numel()) not in order.added


@pytest.mark.parametrize("orthogonal_map", ["matrix_exp", "cayley", "householder"])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (8, 8)])
def test_a_parameter_whose_rows_belong_to_no_output_is_no_weight(orthogonal_map, shape):
    """P of its gradient would not give the weight's rows a mean of zero."""
    out, inputs = shape
    layer = parametrizations.orthogonal(nn.Linear(inputs, out), orthogonal_map=orthogonal_map)
    order = forward_order(layer, torch.randn(2, inputs))
    assert order.added == {"parametrizations.weight.original"}
    assert order.weights == []


class Symmetric(nn.Module):
    """A parametrization: the exponential of a symmetric matrix, by its eigenvectors."""

    def forward(self, weight):
        values, vectors = torch.linalg.eigh(weight + weight.T)
        return vectors @ torch.diag(values.exp()) @ vectors.T


def test_eigenvectors_mix_the_rows_of_a_parameter():
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    assert forward_order(layer, X).added == {"parametrizations.weight.original"}


class Standardized(nn.Conv1d):
    """Weight standardization: each output's entries have mean 0 and variance 1."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2), keepdim=True)
        return F.conv1d(x, weight / weight.std((1, 2), keepdim=True), self.bias)


class Softmax(nn.Linear):
    def __init__(self, axis):
        super().__init__(8, 5)
        self.axis = axis

    def forward(self, x):
        return F.linear(x, self.weight.softmax(self.axis))


class Padded(nn.Module):
    """One kernel ``[1, …]`` that gets a border of zeros."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 2, 3))

    def forward(self, x):
        return F.conv1d(x, F.pad(self.weight, (1, 1)), padding=2)


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (Standardized(2, 5, 3), X.view(2, 2, 4)),
        (Softmax(0), X),
        (Softmax(1), X),
        (Padded(), X.view(2, 2, 4)),
    ],
)
def test_a_parameter_whose_rows_belong_to_outputs_is_a_weight(layer, x):
    order = forward_order(layer, x)
    assert order.added == set()
    assert order.weights == ["weight"]


class Queries(nn.Module):
    """Learned queries ``[Q, D]`` that attend to the data."""

    def __init__(self, how):
        super().__init__()
        self.query = nn.Parameter(torch.randn(4, 8))
        self.norm = nn.LayerNorm(8)
        self.to_query = nn.Linear(8, 8, bias=False)
        self.to_key = nn.Linear(8, 8, bias=False)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.how = how

    def forward(self, x):
        return self.how(self, x, self.query.expand(len(x), -1, -1))


@pytest.mark.parametrize(
    "how",
    [
        lambda net, x, query: net.attention(query, x, x)[0],
        lambda net, x, query: net.attention(query=query, key=x, value=x)[0],
        lambda net, x, query: query + net.attention(net.norm(query), x, x)[0],
        lambda net, x, query: net.attention(x, query, query)[0],
        lambda net, x, _: (net.to_query(net.query) @ net.to_key(x).mT).softmax(-1) @ x,
    ],
    ids=["given", "named", "latent", "memory", "projected"],
)
def test_learned_queries_are_inputs_of_a_layer(how):
    """So they are no weights, whatever their number of rows is."""
    net = Queries(how)
    order = forward_order(net, torch.randn(2, 5, 8))
    assert "query" in order.added
    layers = {"to_query.weight", "to_key.weight"}
    if "to_query.weight" in order.unused:
        layers = {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert layers <= {*order.weights}


def test_a_query_that_multiplies_the_data_itself_is_a_weight():
    """It is a linear layer, with a score for each of its rows."""
    net = Queries(lambda net, x, _: (net.query @ x.mT).softmax(-1) @ x)
    order = forward_order(net, torch.randn(2, 5, 8))
    assert "query" in order.weights


def test_the_axis_of_the_outputs_is_found():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 6, 3, groups=2)
            self.normed = parametrizations.spectral_norm(nn.ConvTranspose1d(6, 1, 3))
            self.conv = nn.Conv2d(2, 4, 1, groups=2)
            for name in (
                "rows",
                "columns",
                "turned",
                "einsum",
                "einsum_left",
                "einsum_rows",
                "einsum_frames",
            ):
                self.register_parameter(name, nn.Parameter(torch.randn(6, 6)))
            self.low = nn.Parameter(torch.randn(6, 2))
            self.high = nn.Parameter(torch.randn(2, 6))
            self.wide = nn.Parameter(torch.randn(6, 5))

        def forward(self, x):
            h = self.normed(self.up(self.conv(x.view(-1, 2, 2, 2))).mean(2)).squeeze(1)
            h = F.linear((self.rows @ (h @ self.columns).T).T, self.low @ self.high)
            h = torch.einsum("bi,io->bo", (self.turned.T @ h.T).T, self.einsum)
            h = torch.einsum(
                "oi,bi->bo", self.einsum_rows, torch.einsum("io,bi->bo", self.einsum_left, h)
            )
            return (
                torch.einsum("bti,io->bto", h.expand(3, -1, -1).transpose(0, 1), self.einsum_frames)
                @ self.wide
            )

    turned = dict.fromkeys(
        ("columns", "turned", "einsum", "einsum_left", "einsum_frames", "wide"), 1
    )
    order = forward_order(Net(), X)
    assert order.groups == {"up.weight": 2, "normed.parametrizations.weight.original": 1, **turned}


def test_unused_and_unseen_parameters():
    class Net(Chain):
        def forward(self, x):
            return self.b(self.a(torch.tensor(x.tolist())))  # operations are seen without the input

    order = forward_order(Net("cab"), X)
    assert order.names == ["c.weight", "c.bias", "a.weight", "a.bias", "b.weight", "b.bias"]
    assert (
        order.facts()[-1]
        == "not used by a forward pass, and counted where they are declared: c.weight, c.bias"
    )
    assert declared_order(Net("cab")).names[0] == "c.weight"


class Experts(nn.Module):
    """A gate and stacked experts, ``[E, in, out]``."""

    def __init__(self, product):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.Parameter(torch.randn(3, 8, 5))
        self.product = product

    def forward(self, x):
        return (self.gate(x).softmax(-1).unsqueeze(-1) * self.product(x, self.experts)).sum(-2)


class StateSpace(nn.Module):
    """Selective scan: rates ``A_log [d, n]``, and a kernel of pairs of real and imaginary parts."""

    def __init__(self):
        super().__init__()
        self.rates = nn.Parameter(torch.randn(8, 4))
        self.step = nn.Linear(8, 8)
        self.pairs = nn.Parameter(torch.randn(8, 2))
        self.scale = nn.Parameter(torch.randn(8, 1))
        self.read = nn.Linear(8, 4)

    def forward(self, x):
        decay = (F.softplus(self.step(x)).unsqueeze(-1) * -self.rates.exp()).exp()
        states = decay * x.unsqueeze(-1) * self.read(x).unsqueeze(1)
        turned = torch.view_as_complex(self.pairs) * torch.fft.fft(x)
        return states.sum(-1) + turned.real + x * self.scale.squeeze(-1)


class Patches(nn.Module):
    """A convolution as a product with patches, and heads of attention, ``[heads, out, in]``."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 1, 3, 3))
        self.heads = nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x):
        h = self.kernel.flatten(1) @ F.unfold(x, 3)  # [B, 4, 16]
        return torch.einsum("hoi,bip->bho", self.heads, h)


@pytest.mark.parametrize(
    ("net", "x", "odd"),
    [
        (Experts(lambda x, w: torch.einsum("bi,eio->beo", x, w)), X, ["experts"]),
        (Experts(lambda x, w: torch.stack([x @ own for own in w], 1)), X, ["experts"]),
        (Experts(lambda x, w: torch.matmul(x[:, None, None], w).squeeze(2)), X, ["experts"]),
        (StateSpace(), X, ["rates", "pairs"]),
        (Patches(), torch.randn(2, 1, 6, 6), ["heads"]),
        *((Chain(a=make()), X, []) for make in LAYERS.values()),
        (nn.GRU(8, 8), torch.randn(3, 2, 8), []),
        (nn.MultiheadAttention(8, 2), None, []),
        (nn.Bilinear(8, 8, 3), None, []),
    ],
)
def test_tensors_that_are_no_matrices_are_named(net, x, odd):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            if isinstance(net, nn.Bilinear):
                return net(x, x)
            return net(x, x, x)[0] if isinstance(net, nn.MultiheadAttention) else net(x)

    order = forward_order(Net(), torch.randn(3, 2, 8) if x is None else x)
    assert [name.removeprefix("net.") for name in order.odd] == odd
    lines = [fact for fact in order.facts() if fact.startswith("no matrices [out, in]")]
    assert len(lines) == bool(odd)
    for name in order.odd:
        assert f"{name} {[*order.params[name].shape]}" in lines[0]
    assert {*order.odd} <= {*order.weights}
