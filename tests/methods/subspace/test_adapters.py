"""Adapters: averages equal loops over plain matrices.

Bytes, GC of A, and the files of peft are exact.

``test_contract_adapters.py`` trains adapters with every algorithm.
"""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from conftest import needs, read_rows
from harness import (
    assert_near,
    final_weights,
    join_run,
    make_net,
    make_setup,
    random_federation,
    sgd,
    train_rounds,
)
from plain_reference import batches
from torch import nn

from gcfed.assemble import build_module
from gcfed.federated.training.solver import LocalSolver
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.subspace.adapters import AVERAGES
from gcfed.models.adapters import with_adapters
from gcfed.run import train
from gcfed.utils.compose import composed

pytestmark = needs("peft")
RANK = 2


def adapted(average="mean", dtype=torch.float64):
    """A network whose first layer has an adapter. All weights of its last layer are trained."""
    net = with_adapters(
        make_net(dtype=dtype),
        rank=RANK,
        target=["0"],
        alpha=4,
        modules_to_save=["2"],
        average=average,
    )
    torch.manual_seed(1)
    for name, p in net.named_parameters():
        if ".lora_B." in name:  # with B = 0, some directions of the mean product would vanish
            nn.init.normal_(p, std=0.3)
    return net


def methods(average):
    return AVERAGES.get(average, list)()


@pytest.mark.parametrize("average", ["mean", "ffa", "alternate", "fedsa", "svd"])
def test_an_average_of_factors_equals_a_loop_over_plain_matrices(average):
    net = adapted(average)
    data = random_federation((7, 5, 9))
    solver = sgd()
    frozen = {name: p.detach().clone() for name, p in net.named_parameters()}
    w0 = frozen["0.base_layer.weight"]
    b0 = frozen["0.base_layer.bias"]
    keys = [f"0.lora_{factor}.default.weight" for factor in "AB"]
    keys += [f"2.modules_to_save.default.{kind}" for kind in ("weight", "bias")]
    model = [frozen[key].clone() for key in keys]  # A, B, head
    own = [model[1].clone() for _ in range(3)]  # each client's B
    for t in range(3):
        ends = []
        for k in range(3):
            w = [model[0], own[k] if average == "fedsa" else model[1], *model[2:]]
            for x, y in batches(data, solver, k, t):
                a, b, v, c = w = [t.detach().requires_grad_() for t in w]
                loss = F.cross_entropy((x @ (w0 + 4 / RANK * b @ a).T + b0).tanh() @ v.T + c, y)
                grads = torch.autograd.grad(loss, w)
                trained = {"ffa": "B", "alternate": "BA"[t % 2]}.get(average, "AB")
                rates = [0.1 * ("A" in trained), 0.1 * ("B" in trained), 0.1, 0.1]
                w = [
                    t.detach() - rate * grad for t, rate, grad in zip(w, rates, grads, strict=True)
                ]
            ends.append(w)
        own = [w[1] for w in ends]
        product = sum(w[1] @ w[0] for w in ends) / 3
        mean = [torch.stack(parts).mean(0) for parts in zip(*ends, strict=True)]
        if average in ("ffa", "alternate"):
            torch.testing.assert_close(mean[1] @ mean[0], product)  # their purpose
        elif average == "fedsa":
            mean[1] = model[1]
        elif average == "svd":
            values, vectors = torch.linalg.eigh(product.T @ product)  # no SVD
            mean[0] = vectors.T.flip(0)[:RANK]
            mean[0] = (
                mean[0] * torch.stack([row[row.abs().argmax()].sign() for row in mean[0]])[:, None]
            )
            mean[1] = product @ mean[0].T
            assert values[-RANK - 1] > 1e-6  # the product has more directions than the adapter
        model = mean
    for k in (1, 3):
        net = adapted(average)
        train_rounds(net, data, solver, rounds=3, methods=methods(average), k=k)
        found = dict(net.named_parameters())
        for key, expected in zip(keys, model, strict=True):
            assert_near(found[key].detach(), expected, 1e-10)
        assert all(torch.equal(found[key], frozen[key]) for key in frozen.keys() - {*keys})


@pytest.mark.parametrize("average", ["mean", "ffa", "alternate", "fedsa", "svd"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_gc_of_a_keeps_the_row_sums_of_the_product_at_zero(average, dtype, most):
    """Clients use momentum and weight decay. The server uses momentum if the average allows it."""
    server = partial(torch.optim.SGD, lr=1.0, momentum=0.0 if average in ("fedsa", "svd") else 0.5)
    sums = {}
    products = {}
    for lora in ("centre_a", *[None] * (average == "mean")):
        net = adapted(average, dtype)
        gc = GradientCentralization(boundary="0", lora=lora)
        train_rounds(
            net,
            random_federation(dtype=dtype),
            sgd(momentum=0.9, weight_decay=1e-3),
            rounds=4,
            server=server,
            methods=[*methods(average), gc],
        )
        layer = net.get_submodule("0")
        a = layer.lora_A["default"].weight.detach()
        b = layer.lora_B["default"].weight.detach()
        sums[lora] = float((b @ a).sum(1).abs().max())
        products[lora] = float((b @ a).abs().max())
    assert sums["centre_a"] < most
    assert products["centre_a"] > 0.05
    assert average != "mean" or sums[None] > 1e-3


def test_the_factor_that_is_not_trained_does_not_move():
    """Clients use AdamW. The server uses momentum and weight decay."""
    net = adapted("alternate")
    seen = []
    train_rounds(
        net,
        random_federation(),
        LocalSolver(partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)),
        rounds=4,
        k=3,
        methods=methods("alternate"),
        server=partial(torch.optim.SGD, lr=1.0, momentum=0.9, weight_decay=0.1),
        on_round=lambda *_: seen.append(
            [p.detach().clone() for n, p in net.named_parameters() if ".lora_" in n]
        ),
    )
    moved = [
        [not torch.equal(*pair) for pair in zip(*ends, strict=True)] for ends in pairwise(seen)
    ]
    assert moved == [[True, False], [False, True], [True, False]]  # A, B in rounds 2, 3, 4


def test_the_copy_that_peft_keeps_of_a_trained_module_does_not_move_the_borderline():
    gc = GradientCentralization(boundary="2").local_gc
    join_run(gc, make_setup(adapted(), methods=[gc], data=random_federation()))
    assert [*gc.axes_of] == ["0.lora_A.default.weight", "0.lora_B.default.weight"]


def test_gc_of_a_refuses_servers_that_would_break_it():
    # in FFA, nobody sends the centred A
    for wrong in ({"server": False}, {"local": False}):
        with pytest.raises(ValueError, match="lora=centre_a needs local=true and server=true"):
            GradientCentralization(boundary="0", lora="centre_a", **wrong)
    gc = [GradientCentralization(boundary="0", lora="centre_a")]
    with pytest.raises(ValueError, match=r"needs adapters: set model\.lora\.rank"):
        train_rounds(make_net(), random_federation(), sgd(), rounds=1, methods=gc)
    adam = partial(torch.optim.Adam, lr=0.1)
    with pytest.raises(ValueError, match="needs server=sgd: other optimizers move"):
        train_rounds(adapted(), random_federation(), sgd(), rounds=1, methods=gc, server=adam)


# --------------------------------------------------------------------------------------------- runs
TINY = (
    "model.hidden=[12,8]",
    "rounds=2",
    "participation.num_clients=4",
    "participation.per_round=2",
    "client.epochs=1",
    "client.batch_size=8",
    "data.limit_train=60",
    "data.limit_test=40",
    "precision=64-true",
    "eval_every=2",
)
LORA = ("model.lora.rank=2", "model.lora.target=[fc1,fc2]", "model.lora.modules_to_save=[fc3]")


@pytest.mark.parametrize(
    ("average", "up", "down"),
    [
        ("mean", ["AB"], "AB"),
        ("ffa", ["B"], "B"),
        ("alternate", ["B", "A"], "AB"),
        ("fedsa", ["A"], "A"),
        ("svd", ["AB"], "AB"),
    ],
)
def test_bytes_are_exact_and_peft_reads_the_adapter(config, tmp_path, average, up, down):
    net = train(config(*TINY, *LORA, f"model.lora.average={average}")).model
    entries = {"A": 2 * (64 + 12), "B": 2 * (12 + 8)}
    for t, row in enumerate(read_rows(tmp_path / "run/metrics.csv")):
        for sent, key in ((up[t % len(up)], "comm/up_bytes"), (down, "comm/down_bytes")):
            assert row[key] == 2 * 8 * (sum(entries[m] for m in sent) + 8 * 10 + 10)  # plus fc3
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    plain = build_module(composed(TINY)).net  # the same seed gives the same frozen weights
    from peft import PeftModel  # takes seconds

    loaded = PeftModel.from_pretrained(plain, tmp_path / "run")
    assert_near(loaded.eval()(x), net.eval()(x), 0)


# which withholds both factors
@pytest.mark.parametrize("more", [(), ("algorithm=lgfedavg", "metrics=angle")])
def test_a_continued_run_trains_the_factor_whose_turn_it_is(config, tmp_path, more):
    words = (*TINY, *LORA, "model.lora.average=alternate", "client=adamw", *more)
    ends = []
    for name, stops in (("straight", ["rounds=3"]), ("continued", ["rounds=1", "rounds=3"])):
        for rounds in stops:
            resume = ["ckpt_path=last"] * (rounds != stops[0])
            result = train(config(*words, rounds, *resume, folder=tmp_path / name))
        ends.append(final_weights(result))
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.lora.target=[fc1,fc9]"],
            r"model\.lora\.target=fc9 is no module of MLP: there are fc1, fc2, fc3",
        ),
        (
            ["model.lora.modules_to_save=[head]"],
            r"model\.lora\.modules_to_save=head is no module of MLP",
        ),
        (["model.lora.target=null"], r"model\.lora\.target=null: .*there are fc1, fc2, fc3"),
        (["model.lora.rank=null"], r"model\.lora\.rank"),
        (["model.lora.rank=0"], r"model\.lora\.rank=0"),
        (["model.lora.average=sum"], r"model\.lora\.average=sum"),
        *[
            (
                ["model.lora.average=alternate", f"algorithm={name}"],
                rf"(?i)average=alternate does not combine with {part}",
            )
            for name, part in (("scaffold", "Scaffold"), ("fedsam", "Sam"), ("fedacg", "LookAhead"))
        ],
        (
            [
                "model.lora.average=alternate",
                "privacy=client_dp",
                "privacy.noise_multiplier=1",
                "participation=poisson",
            ],
            r"does not combine with model\.lora\.average=alternate",
        ),
        (
            ["model.lora.average=svd", "aggregator=median"],
            r"model\.lora\.average=svd needs aggregator=mean",
        ),
    ],
)
def test_impossible_settings_are_refused_with_their_key(config, words, message):
    with pytest.raises(ValueError, match=message):
        train(config(*TINY, *LORA, *words))
