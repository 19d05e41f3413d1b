"""What hostile clients send, who they are, and what they do to the mean and to robust rules."""

import itertools
import re
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import (
    Spy,
    final_weights,
    make_download,
    make_net,
    make_setup,
    make_upload,
    random_federation,
    sgd,
    train_rounds,
)

from gcfed.aggregators.coordinates import Median, TrimmedMean
from gcfed.aggregators.krum import Bulyan, Krum, MultiKrum
from gcfed.attacks.byzantine import Gaussian, LabelFlip, Scale, chance_of_more, hostile
from gcfed.attacks.colluding import ALIE, IPM, z_max
from gcfed.federated.method import Order
from gcfed.run import train

N = 10


def attacked(attack, clients=range(N), seed=1):
    """The uploads of these clients of a cohort of N, before and after, and which of them are hostile."""
    clients = np.array(clients)
    g = torch.Generator().manual_seed(3)
    delta = torch.randn(N, 4, 2, generator=g).double()[clients]
    upload = make_upload({"w": delta.clone()}, np.ones(len(clients)))
    upload.send("more", {"v": delta.clone() * 3})
    upload.clients = clients
    download = make_download({"w": torch.zeros(4, 2).double()}, cohort=range(N))
    download.seed, attack.num_clients = seed, N
    attack.send(upload, {}, download)
    return delta, upload, np.isin(clients, hostile(attack.clients, N, seed))


def test_the_chance_of_more_hostile_clients_is_that_of_all_cohorts():
    for cohort, bad, f in itertools.product((1, 4, 9), (0, 1, 3, 9), range(5)):
        more = [sum(k < bad for k in drawn) > f for drawn in itertools.combinations(range(9), cohort)]
        assert chance_of_more(f, cohort, bad, 9) == pytest.approx(np.mean(more))


@pytest.mark.parametrize(
    ("rule", "cohort", "clients", "chance", "enough"),
    [
        (Krum(0.2), 5, 0.2, "24.9", None), (TrimmedMean(0.2), 20, 0.2, "36.5", 8), (MultiKrum(0.3), 20, 0.2, "6.37", 8),
        (TrimmedMean(0.0), 20, 0.02, "36.2", 2), (Bulyan(0.2), 20, 0.2, "36.5", None),
        (Bulyan(0.1), 20, 0.05, "5.32", 3), (MultiKrum(0.36), 20, 0.2, None, None), (Krum(0.2), 20, 0.0, None, None),
        (Median(), 5, 0.4, None, None),
    ],
)  # fmt: skip
def test_more_hostile_clients_than_a_rule_stands_are_told_of(caplog, rule, cohort, clients, chance, enough):
    data = random_federation(sizes=(1,) * (20 if cohort == 5 else 100))

    def said(rule):
        caplog.clear()
        for attack in (Scale(clients), LabelFlip(clients), ALIE(clients)):
            attack.validate(make_setup(make_net(), aggregator=rule, cohort_of=cohort, data=data))
        assert len(set(caplog.messages)) == len(caplog.messages) // 3  # of each attack the same
        return "".join(set(caplog.messages))

    message = said(rule)
    assert (f"in {chance} % of rounds" in message) if chance else not message
    if enough:
        better = type(rule)(float(re.search(r"aggregator.hostile=([0-9.]+)\.$", message)[1]))
        better.validate(make_setup(make_net(), aggregator=better, cohort_of=cohort, data=data))
        assert (better.most(cohort), said(better)) == (enough, "")
    else:
        assert ("no f that such a cohort allows would do" in message) == (chance is not None)


@pytest.mark.parametrize("factor", [-4.0, 1e10])
def test_scaled_clients_multiply_all_that_they_send(factor):
    delta, upload, hostile = attacked(Scale(0.3, factor=factor))
    assert hostile.sum() == 3
    for sent, honest in ((upload.delta["w"], delta), (upload.extra["more"]["v"], delta * 3)):
        torch.testing.assert_close(sent[hostile], honest[hostile] * factor)
        assert torch.equal(sent[~hostile], honest[~hostile])


def test_noise_has_its_size_and_is_each_clients_own():
    delta, upload, _ = attacked(Gaussian(1.0, factor=5.0))
    ratio = upload.delta["w"].square().mean((1, 2)).sqrt() / delta.square().mean((1, 2)).sqrt()
    assert float(ratio.mean()) == pytest.approx(5, rel=0.3)
    alone = attacked(Gaussian(1.0, factor=5.0), clients=[7])[1].delta["w"]
    assert torch.equal(alone[0], upload.delta["w"][7])
    assert not torch.equal(upload.delta["w"][7], upload.delta["w"][6])


@pytest.mark.parametrize(("share", "said"), [(0.02, 1), (0.03, 0), (0.0, 0)])
def test_a_share_that_is_nobody_is_told_of(caplog, share, said):
    Scale(share).validate(make_setup(make_net(), data=random_federation(sizes=(1,) * 20)))
    assert caplog.text.count("is nobody") == said


def test_who_is_hostile_is_drawn_once_a_run():
    first = hostile(0.2, 50, seed=1)
    assert len(set(first)) == 10
    assert not np.array_equal(hostile(0.2, 50, seed=2), first)
    for attack in (Scale(0.2), Gaussian(0.2)):
        attack.num_clients = 50
        for t in (0, 9):
            download = make_download({}, t, cohort=[3])
            assert np.array_equal(np.arange(50)[attack.is_hostile(np.arange(50), download)], first)


def test_colluding_clients_send_what_they_make_of_the_honest():
    delta, upload, hostile = attacked(ALIE(0.3, z=1.5))
    honest = delta[~hostile].numpy()
    expected = torch.from_numpy(honest.mean(0) - 1.5 * honest.std(0)).expand(3, 4, 2)
    torch.testing.assert_close(upload.delta["w"][hostile], expected)
    torch.testing.assert_close(upload.extra["more"]["v"][hostile], expected * 3)
    assert torch.equal(upload.delta["w"][~hostile], delta[~hostile])
    delta, upload, hostile = attacked(ALIE(0.3, z=None))
    honest = delta[~hostile].numpy()
    expected = torch.from_numpy(honest.mean(0) - z_max(10, 3) * honest.std(0)).expand(3, 4, 2)
    torch.testing.assert_close(upload.delta["w"][hostile], expected)
    delta, upload, hostile = attacked(IPM(0.3, epsilon=0.5))
    torch.testing.assert_close(upload.delta["w"][hostile], (-0.5 * delta[~hostile].mean(0)).expand(3, 4, 2))
    upload.finite[hostile] = False  # their own training has diverged, which what they send does not show
    attack = IPM(0.3)
    attack.num_clients = N
    attack.send(upload, {}, make_download({}, cohort=range(N)))
    assert upload.finite.all()
    assert z_max(50, 12) == pytest.approx(NormalDist().inv_cdf(24 / 38))  # the paper's setting: s = 14


def test_colluding_clients_need_the_whole_cohort_in_one_stack():
    with pytest.raises(ValueError, match=r"client\.stack=10 or more, and trainer\.devices=1"):
        attacked(ALIE(), clients=[1, 2, 3])
    data = SimpleNamespace(num_clients=9)
    for stack in ("auto", 5, 1000):  # auto is what the device holds
        ALIE().validate(SimpleNamespace(solver=SimpleNamespace(stack=stack), cohort=5, data=data, aggregator=None))
    with pytest.raises(ValueError, match=r"client\.stack=5 or more"):
        ALIE().validate(SimpleNamespace(solver=SimpleNamespace(stack=4), cohort=5, data=data, aggregator=None))


def test_an_attack_sees_what_is_ready_to_be_sent_and_all_stacks_agree():
    data = random_federation(sizes=(7, 12, 5, 9, 1, 6))

    class Doubled(Spy):
        order = Order.CORRECTS

        def send(self, upload, own, download):
            upload.delta = {name: 2 * t for name, t in upload.delta.items()}

    runs = [
        train_rounds(make_net(), data, sgd(), rounds=3, cohort_of=6, methods=[attack, Doubled()], k=k, world=world)
        for attack, k, world in ((Gaussian(0.5), 1, 1), (Gaussian(0.5), 3, 1), (Gaussian(0.5), 2, 2))
    ]
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], rtol=0, atol=1e-9)


TINY = ("rounds=2", "model.hidden=[12,8]", "client.epochs=1", "data.limit_train=200", "data.limit_test=50")


def test_colluding_clients_and_a_rule_for_all_messages_run_from_the_command_line(config, tmp_path):
    """An attack that shifts nothing is the mean of the honest, so that what it adds is the attack's own."""
    words = ("algorithm=scaffold", "attack=alie", "attack.clients=0.45", "aggregator=geometric_median", *TINY)
    result, weak = (train(config(*words, f"attack.z={z}", folder=tmp_path / str(z))) for z in (1.5, 0.0))
    assert result.metrics["train/nonfinite_clients"] == 0
    assert result.metrics["train/hostile_clients"] > 0
    assert not torch.equal(final_weights(result), final_weights(weak))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm=feddyn", "aggregator=median"), "FedDyn needs aggregator=mean, not Median"),
        (("algorithm=ssf", "aggregator=krum"), "SSF needs aggregator=mean, not Krum"),
        (("algorithm=fedgc", "aggregator=norm_clip"), r"methods\.fedgc\.sgc=true needs aggregator=mean"),
        (("aggregator=bulyan", "aggregator.hostile=0.2"), "Bulyan needs 4·1 [+] 3"),
        (("algorithm=fedgc", "aggregator=median", "methods.fedgc.sgc=false"), None),
        (("algorithm=fedcurv", "aggregator=multi_krum"), "FedCurv needs aggregator=mean, not MultiKrum"),
    ],
)
def test_rules_go_with_algorithms_or_are_refused_by_name(config, overrides, message):
    cfg = config(*overrides, *TINY)
    if message is None:
        assert train(cfg).metrics["train/nonfinite_clients"] == 0
    else:
        with pytest.raises(ValueError, match=message):
            train(cfg)


@pytest.mark.slow
def test_robust_rules_stand_a_fifth_of_sign_flipping_clients_and_the_mean_does_not(config, tmp_path):
    def accuracy(aggregator, attack):
        result = train(config(
            f"aggregator={aggregator}", f"attack={attack}", "gc=none", "partition=iid", "participation.per_round=10",
            "rounds=20", "eval_every=20", "client.epochs=3", "client.optimizer.lr=0.05", "model.hidden=[64]",
            "client.stack=10", "callbacks.checkpoint.every=20",
            *([] if aggregator in ("mean", "median") else ["aggregator.hostile=0.3"]),
            folder=tmp_path / f"{aggregator}_{attack}",
        ))  # fmt: skip
        return result.metrics["test/acc"]

    clean = accuracy("mean", "none")
    assert clean > 0.9
    for aggregator in ("median", "trimmed_mean", "multi_krum"):
        assert accuracy(aggregator, "sign_flip") > clean - 0.03, aggregator
    assert accuracy("mean", "sign_flip") < clean - 0.03
