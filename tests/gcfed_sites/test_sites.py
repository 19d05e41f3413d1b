"""Federations without NVFlare: the server's transport and the sites' programs are connected within
this process.

test_real_sites.py tests NVFlare itself (``make test-federation``).
"""

import itertools
import json
import re
from collections import deque
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import torch
from conftest import read_rows, refuses
from harness import final_weights
from lightning.pytorch import Callback
from omegaconf import OmegaConf

from gcfed import __version__
from gcfed.federated.protocol.messages import Download
from gcfed.federated.protocol.packing import pack, unpack
from gcfed.run import train
from gcfed_sites.agreement import OWN, adopted, clients_config, frozen_checksum
from gcfed_sites.answers import Answer
from gcfed_sites.site import Site
from gcfed_sites.sites import Sites

TINY = (
    "model.hidden=[12,8]",
    "rounds=3",
    "participation.num_clients=7",
    "participation.per_round=5",
    "client.epochs=1",
    "client.batch_size=8",
    "data.limit_train=70",
    "data.limit_test=40",
    "eval_every=1",
)
ALL = ("participation.per_round=7",)


class LineHere:
    """Sites as objects of this process. They answer at once unless ``upset`` decides otherwise.

    Args:
        folder: the folder of all sites.
        own: entries of each site's ``gcfed.yaml``, by site.
        upset: called with (site, verb, about) before a site works. Returns ``None``, a reason for a
            failure of the site, or the index of the round in which its answer arrives.
        garbled: called with (site, verb, content of the answer). Returns other content, or other
            bytes.
    """

    def __init__(self, folder, own=None, upset=None, garbled=None):
        self.sites = list("abc")
        self.programs = {}
        self.lost = False
        self.upset = upset or (lambda *_: None)
        self.garbled = garbled or (lambda site, verb, answer: answer)
        # late answers by round; seconds waited without answer
        self.answers = deque()
        self.held = {}
        self.in_vain = []
        for name in self.sites:
            home = folder / name
            home.mkdir(parents=True, exist_ok=True)
            settings = {"config": str(folder.parent / "config.yaml")} | (own or {}).get(name, {})
            (home / "gcfed.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(settings)))
            self.programs[name] = Site(name, home / "gcfed.yaml", home)

    def send(self, site, number, verb, about, message):
        why = self.upset(site, verb, about)
        if about.get("round") in self.held:
            self.answers.append(self.held.pop(about["round"]))
        if why is None or isinstance(why, int):
            said = self.garbled(site, verb, answered(self.programs[site], verb, about, message))
            answer = Answer(site, number, pack(said) if isinstance(said, dict) else said)
            if why is None:
                self.answers.append(answer)
            else:
                self.held[why] = answer
        else:
            gone = why.startswith("vanished")
            self.answers.append(Answer(site, number, pack({"failure": why}), why * gone))

    def receive(self, seconds):
        if self.answers:
            return self.answers.popleft()
        self.in_vain += [seconds] if seconds else []
        return None


def answered(site, verb, about, message=b""):
    """The content of a site's answer."""
    return unpack(site.answer(verb, json.dumps(about), message))


@pytest.fixture
def federated(config, tmp_path, monkeypatch):
    """``federated(*overrides, own=…, …)`` runs a federation of three sites.

    Returns its result and its line.
    """

    def run(*overrides, folder="run", **how):
        line = LineHere(tmp_path / folder / "sites", **how)
        monkeypatch.setattr(Sites, "open_line", lambda self: line)
        cfg = config(*TINY, "federation=nvflare", *overrides, folder=tmp_path / folder)
        return train(cfg), line

    return run


@pytest.fixture
def simulated(config, tmp_path):
    def run(*overrides, folder="simulated"):
        cfg = config(*TINY, "federation=nvflare", *overrides, folder=tmp_path / folder)
        cfg.federation = None
        return train(cfg)

    return run


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm=fedgc", *ALL),
        ("algorithm=fedsub",),
        (
            "quantization=fedpaq",
            "attack=sign_flip",
            "attack.clients=0.2",
            "aggregator=trimmed_mean",
        ),
    ],
    ids=" ".join,
)
def test_sites_with_several_clients_equal_the_simulation(federated, simulated, words):
    words = (*words, "rounds=2")
    reference = simulated(*words)
    result, _ = federated(*words)
    assert torch.equal(final_weights(reference), final_weights(result))
    rows = (r.metrics.items() for r in (reference, result))
    row, same = (
        {k: v for k, v in own if not k.startswith("time/") and "dropped" not in k} for own in rows
    )
    # sites may miss a broadcast, so the server also sends its last step
    if "algorithm=fedgc" in words:
        assert same.pop("comm/down_bytes") > row.pop("comm/down_bytes")
    assert same == pytest.approx(row, rel=1e-12, nan_ok=True)


# ---------------------------------------------------------------------------------- sites that fail
def survivors(federated, simulated, monkeypatch, lost, *words, **how):
    """A run with failing sites equals a simulation in which their clients drop out of the same
    rounds.
    """
    from gcfed.participation.schedule import Schedule

    result, line = federated(*words, "federation.least=1", **how)
    monkeypatch.setattr(
        Schedule,
        "ask",
        lambda self, clients, t: (~np.isin(clients, lost.get(t, [])), np.zeros(len(clients))),
    )
    reference = simulated(*words)
    assert torch.equal(final_weights(reference), final_weights(result))
    for row, same in zip(
        *(read_rows(r.folder / "metrics.csv") for r in (reference, result)), strict=True
    ):
        for column in [name for name in row if name.startswith(("clients/", "train/loss"))]:
            assert same[column] == pytest.approx(row[column], rel=1e-12)
    return result, line


def at_b(verb, round, what):
    """An ``upset`` that changes one answer of the site b."""
    return lambda site, asked, about: (
        what if (site, asked, about.get("round")) == ("b", verb, round) else None
    )


CLIENTS_OF_B = [1, 4]  # of seven clients at three sites


def test_clients_of_a_failed_site_drop_out(federated, simulated, monkeypatch, caplog):
    words = ("algorithm=fedgc", "metrics=[clients,updates]", "metrics.clients.every=1")
    result, _ = survivors(
        federated,
        simulated,
        monkeypatch,
        {1: CLIENTS_OF_B},
        *words,
        upset=at_b("fit", 1, "no power"),
    )
    lost = len(set(result.loop.sampler(1, 7, 1).tolist()) & set(CLIENTS_OF_B))
    rows = read_rows(result.folder / "metrics.csv")
    assert [(row["train/dropped_clients"], row["train/clients"]) for row in rows] == [
        (0, 5),
        (lost, 5 - lost),
        (0, 5),
    ]
    assert re.search("round 2: b failed: no power", caplog.text)


def test_the_server_waits_once_for_a_silent_site_and_asks_it_again_after_its_answer(
    federated, simulated, monkeypatch, caplog
):
    lost = dict.fromkeys((1, 2, 3), CLIENTS_OF_B)
    words = ("algorithm=scaffold", *ALL, "rounds=5")
    result, line = survivors(
        federated, simulated, monkeypatch, lost, *words, upset=at_b("fit", 1, 3)
    )
    assert "b answers round 2 (fit), which is too late: refused" in caplog.text
    assert line.in_vain == [pytest.approx(600.0, abs=5.0)]
    assert "round 3: b is still at round 2 (fit)" in caplog.text
    sent = [row["comm/down_bytes"] for row in read_rows(result.folder / "metrics.csv")]
    assert [bytes_ * 7 / sent[0] for bytes_ in sent] == [7, 7, 5, 5, 7]


def test_a_site_that_is_gone_is_asked_again_only_in_a_new_job(
    federated, simulated, monkeypatch, caplog
):
    """A resumed run makes a new job. The site still has its states."""
    words = ("algorithm=scaffold", *ALL)
    lost = dict.fromkeys((1, 2), CLIENTS_OF_B)
    result, _ = survivors(
        federated, simulated, monkeypatch, lost, *words, upset=at_b("fit", 1, "vanished: no power")
    )
    assert "round 3: b is gone" in caplog.text
    sent = [row["comm/down_bytes"] for row in read_rows(result.folder / "metrics.csv")]
    # a site that is not asked costs no bytes
    assert [bytes_ * 7 / sent[0] for bytes_ in sent] == [7, 7, 5]
    words = (*words, "rounds=4", f"ckpt_path={result.folder}/checkpoints/last.ckpt")
    resumed, _ = federated(*words)
    assert torch.equal(
        final_weights(simulated(*words[:-1], folder="whole")), final_weights(resumed)
    )


def test_a_site_that_misses_the_reply_keeps_its_states(federated, caplog):
    result, _ = federated("algorithm=fedsub", *ALL, "rounds=2", upset=at_b("reply", 1, "no power"))
    assert "round 2: b did not hear how it ended" in caplog.text
    assert len(read_rows(result.folder / "metrics.csv")) == 2
    assert result.loop.run.setup.stores.versions("fedsub", range(7)) == [
        1,
        0,
        1,
        1,
        0,
        1,
        1,
    ]  # b has 1 and 4


def test_a_run_with_too_few_answers_stops_and_resumes_with_the_sites_states(
    federated, simulated, tmp_path
):
    """Sites a and c have finished the round. Their states go back to those of the checkpoint."""
    words = ("algorithm=scaffold", *ALL, "rounds=4")
    sites = tmp_path / "run/sites"
    with pytest.raises(
        ConnectionError, match=r"round 3: 5 of 7 .*federation.least is 7.*b failed: no power"
    ):
        federated(*words, upset=at_b("fit", 2, "no power"))
    assert sorted(path.name for path in (sites / "a").rglob("0-*.bin")) == [
        "0-0.bin",
        "0-1.bin",
        "0-2.bin",
    ]
    # the checkpoint of round 2
    result, _ = federated(*words, f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt")
    assert not list((sites / "a").rglob("0-0.bin"))
    assert torch.equal(final_weights(simulated(*words)), final_weights(result))


# --------------------------------------------------------------------------------- refused settings
def saved(tmp_path, name, x, y, **test):
    """Writes a site's own data; returns the key of its ``gcfed.yaml``."""
    np.savez(tmp_path / f"{name}.npz", x=x, y=y, **test)
    return {"arrays": str(tmp_path / f"{name}.npz")}


def pixels(n, side=8):
    return np.random.default_rng(0).integers(0, 16, (n, 1, side, side), dtype=np.uint8)


@pytest.mark.parametrize(
    ("own", "change", "sentence"),
    [
        (
            {"a": {"clients": [0, 1, 2]}},
            {},
            "client 1 is held by a and b: see clients in the sites' gcfed.yaml",
        ),
        ({"b": {"clients": [1]}}, {}, "client 4 is held by no site"),
        ({}, {"clients": [99, 4]}, r"b refuses this run: clients cannot be \[99, 4\]"),
        ({}, {"sizes": [1]}, r"b refuses this run: sizes cannot be \[1\]"),
        ({}, {"sizes": [0, 5]}, r"b refuses this run: sizes cannot be \[0, 5\]"),
        ({}, {"sizes": [10**9, 5]}, r"b refuses this run: sizes cannot be \[1000000000, 5\]"),
        ({}, {"clients": [4, 4]}, r"b refuses this run: clients cannot be \[4, 4\]"),
        ({}, {"clients": "x" * 10**7}, r"b refuses this run: a message of .* is too long"),
    ],
)
def test_sites_with_contradicting_clients_are_refused(federated, own, change, sentence):
    with refuses(sentence):
        federated(
            own=own, garbled=lambda site, verb, answer: answer | change if site == "b" else answer
        )


def test_data_of_another_shape_and_another_version_are_refused(federated, asked, tmp_path):
    with refuses(r"b refuses this run: .*samples have the shape \(1, 4, 4\).*8, 8"):
        federated(own={"b": saved(tmp_path, "small", pixels(60, 4), np.arange(60) % 10)})
    assert (
        f"the server has gcfed 9.9, and b has {__version__}"
        in asked({}, version="9.9")[1]["failure"]
    )


class Listener(Callback):
    def on_after_backward(self, trainer, pl_module): ...


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            (f"+callbacks.x._target_={__name__}.Listener",),
            "callbacks: Listener takes part in local",
        ),
        (("attack=alie", "attack.clients=0.4", "client.stack=7"), "ALIE sees the cohort"),
    ],
)
def test_settings_that_a_federation_cannot_run_are_refused_by_name(federated, words, sentence):
    with refuses(sentence):
        federated(*words)


# -------------------------------------------------------------------------------------- limits of
# the server's power
def sent_config(cfg):
    return clients_config(OmegaConf.to_container(cfg, resolve=True))


@pytest.fixture
def asked(config, tmp_path):
    """``asked(own, *words, **changes)``: a site with the run ``TINY``, and its answer to a run of
    ``words``.
    """
    (tmp_path / "own.yaml").write_text(OmegaConf.to_yaml(config(*TINY), resolve=True))
    server = cache(lambda *words: sent_config(config(*TINY, *words)))

    def ask(own, *words, edit=lambda config: None, **changes):
        # saves a second composition
        own = own if "overrides" in own else own | {"config": "own.yaml"}
        (tmp_path / "gcfed.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(own)))
        site = Site("b", tmp_path / "gcfed.yaml", tmp_path)
        sent = deepcopy(server(*words))
        edit(sent)
        about = {
            "version": __version__,
            "run": "x",
            "share": [0],
            "num_clients": 7,
            "resumed": False,
        }
        about |= {"config": sent, "classes": [str(i) for i in range(10)], "transform": {}}
        about |= {"frozen": ""} | changes
        return site, answered(site, "configure", about)

    return ask


def test_a_site_takes_numbers_from_the_server(asked):
    """It accepts them for the keys that a run needs to agree on, also where its own are null."""
    words = (
        "model.hidden=[12,8]",
        "client.epochs=3",
        "data.limit_train=null",
        "client.clip_norm=2.5",
        "rounds=9",
    )
    site, said = asked(
        {"overrides": [*words, "seed=2"]}, "client.clip_norm=1.5", "data.limit_train=140"
    )
    assert sum(said["sizes"]) < 140 // 3
    program = site.end.simulation.program
    assert [*program.module.net.state_dict()["fc1.weight"].shape] == [12, 64]
    assert program.solver.epochs == 1
    assert program.solver.clip_norm == 1.5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("algorithm=fedprox",), "methods.proximal is "),
        (("model.hidden=[5,4]",), "model.hidden is '[5, 4]' there, '[12, 8]' here"),
        (("metrics=drift",), "metrics.drift is "),
        (("data.transform.crop_padding=9",), "data.transform.crop_padding is '9' there, '0' here"),
        (("client.optimizer.lr=nan",), "client.optimizer.lr=nan is no possible number"),
        (
            ("participation.num_clients=2000000",),
            "participation.num_clients=2000000 is no possible",
        ),
    ],
)
def test_a_site_refuses_another_run_and_names_the_keys(asked, words, sentence):
    failure = asked({}, *words)[1]["failure"]
    assert "b takes only numbers from the server, and its gcfed.yaml has another run: " in failure
    assert sentence in failure


def test_a_site_keeps_its_own_choices_that_do_not_change_the_run(asked):
    """The model arrives by message, so the server's file and its stack mean nothing to a site."""
    site, said = asked({}, "model.start=x.safetensors", "client.stack=9", "client.graphs=false")
    assert "failure" not in said
    solver = site.end.simulation.program.solver
    assert solver.stack == "auto"
    assert solver.graphs


def test_a_server_cannot_switch_on_downloads_or_pretrained_weights():
    own = {"data": {"dataset": {"download": False}, "download": False}}
    own["model"] = {"pretrained": False, "weights": None}
    sent = {"data": {"dataset": {"download": True}, "download": True}}
    sent["model"] = {"pretrained": True, "weights": "DEFAULT"}
    odd = []
    assert adopted(own, sent, odd) == own
    assert odd == []


@pytest.mark.parametrize(
    ("own", "sent", "result"),
    [
        (0.1, 0.5, 0.5),
        (1, 0.5, 0.5),
        (0.1, 1, 1),
        (None, 0.5, 0.5),
        (True, False, False),
        (5, 10**9, "'1000000000' there, '5' here"),
        (None, 10**9, "'1000000000' there, 'None' here"),
        (False, 10**9, "'1000000000' there, 'False' here"),
        (0.1, 1e12, "no possible number"),
        (0.1, float("inf"), "no possible number"),
    ],
)
def test_whole_numbers_of_methods_are_the_sites_own(own, sent, result):
    """Steps of an inner loop are an amount of work. A fraction is a strength."""
    odd = []
    new = adopted({"methods": {"mine": {"x": own}}}, {"methods": {"mine": {"x": sent}}}, odd)
    if isinstance(result, str):
        assert new["methods"]["mine"]["x"] is own
        assert result in odd[0]
    else:
        assert new["methods"]["mine"]["x"] is result
        assert odd == []


@pytest.mark.parametrize("word", ["client.epochs=1000000000", "client.steps=1000000000"])
def test_a_site_bounds_the_local_steps_of_a_round(asked, word):
    sentence = r"the server asks client 0 for .*000 local steps in a round, and b allows [\d,]+:"
    assert re.search(sentence, asked({}, word)[1]["failure"])
    assert "failure" not in asked({"passes": 3}, "client.epochs=3")[1]
    assert re.search(sentence, asked({"passes": 2}, "client.epochs=3000")[1]["failure"])


def test_frozen_parameters_must_be_those_of_the_server(asked):
    """No message contains them, so another start would train another network in silence."""
    said = asked({}, frozen="of another network")[1]
    assert "b has other frozen parameters than the server's" in said["failure"]
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    trained = ("1.weight", "1.bias")
    before = frozen_checksum(net, trained)
    net[1].weight.data += 1
    assert frozen_checksum(net, trained) == before != ""
    net[0].bias.data += 1
    assert frozen_checksum(net, trained) != before
    assert frozen_checksum(net, tuple(dict(net.named_parameters()))) == ""


CALLED: list[object] = []


def sentinel(*args, **kwargs):
    CALLED.append((args, kwargs))


NODE = {"_target_": "test_sites.sentinel", "x": "${sentinel:}"}
TEXT = "${sentinel:}"


def places(tree, path=()):
    """(dict, key, path) of each key of each dict in a tree, and of one new key in each dict."""
    for key, value in [*tree.items(), ("evil", None)]:
        yield tree, key, ".".join((*path, key))
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def test_a_site_accepts_only_numbers_from_a_server(config):
    words = (
        *TINY,
        "algorithm=scaffold",
        "metrics=[drift,updates]",
        "data=cifar10",
        "client_store.folder=x",
    )
    own = sent_config(config(*words))
    assert not {"server", "aggregator", "callbacks", "logger", "federation", "paths"} & set(own)
    sent = deepcopy(own)
    taken = set()
    for group, key, path in places(sent):
        before = group.get(key)
        for value in (
            NODE,
            TEXT,
            [TEXT],
            [1, NODE],
            "/etc/passwd",
            "http://x/y",
            None,
            7,
            0.5,
            True,
            [3, [1.5]],
            [],
        ):
            group[key] = value
            odd = []
            new = adopted(own, sent, odd)
            assert new == own or (isinstance(value, int | float | list) and TEXT not in str(new)), (
                path
            )
            if new != own:
                taken.add(path)
            elif value != before and not OWN.match(path):
                assert any(text.startswith((f"{path} is", f"{path}.")) for text in odd), path
        group[key] = before
        if key == "evil":
            del group[key]
    agreed = {"client.optimizer.lr", "client.epochs", "data.limit_test", "client.clip_norm"}
    assert agreed < taken
    groups = {path.split(".")[0] for path in taken}
    assert not groups & {"model", "metrics", "task", "client_store", "name", "tags", "precision"}
    assert not {path for path in taken if path.startswith("data.dataset")}


def test_a_site_calls_and_resolves_nothing_that_a_server_sends(asked, tmp_path):
    """This holds for the config, for other values of a question, and for the message of a round."""
    own = {"arrays": "own.npz"}
    OmegaConf.register_new_resolver("sentinel", sentinel, replace=True)
    saved(tmp_path, "own", pixels(60), np.arange(60) % 10)
    assert "failure" not in asked(own)[1]

    def everywhere(config, value):
        for group, key, _ in [*places(config)]:
            group[key] = value if not isinstance(group.get(key), dict) else group[key]

    for value in (NODE, [TEXT, NODE]):
        assert (
            "another run: "
            in asked(own, edit=lambda config, value=value: everywhere(config, value))[1]["failure"]
        )
    changes = itertools.product(
        ("share", "num_clients", "classes", "transform"), (TEXT, [TEXT], [NODE])
    )
    for key, value in [*changes, ("transform", {"mean": [NODE]})]:
        assert "failure" in asked(own, **{key: value})[1] or key == "transform"
    for run in ("../other", "..", TEXT):
        assert "has a name that cannot name a folder" in asked(own, run=run)[1]["failure"]
    site, _ = asked(own)
    download = vars(Download(0, 1, 0.1, site.end.module.travelling_state(), np.array([0])))
    question = {"run": "x", "clients": [0], "states": {}}
    message = pack(download)
    assert "failure" not in answered(site, "fit", question, message)
    for value in (TEXT, {TEXT: [NODE]}):
        for key in download:
            answered(site, "fit", question, pack(download | {key: value}))
        for key, verb in itertools.product(("clients", "states", "run"), ("fit", "reply")):
            answered(site, verb, question | {key: value}, message)
    assert not CALLED


def test_a_server_can_delete_only_states_of_the_clients_that_it_asks(federated, tmp_path):
    _, line = federated("algorithm=scaffold", "rounds=1")
    site = line.programs["a"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "scan-7.bin").write_bytes(b"mine")
    (mine,) = site.end.stores.names
    model = site.end.module.travelling_state()
    bias = "fc1.bias"
    download = Download(1, 1, 0.1, model, np.array([0]))
    question = {"run": site.run, "clients": [0], "states": {mine: [[0]]}}
    for asked, changes, sentence in (
        ({"states": {str(other): [[0]]}}, {}, "a has the states"),
        ({"states": {mine: [[0]], str(other): [[0]]}}, {}, "a has the states"),
        ({"states": {mine: [["*"]]}}, {}, "a state's versions"),
        ({"states": {mine: [[0], [0]]}}, {}, "zip"),
        ({"run": "other"}, {}, "does not know the run other"),
        ({"clients": [0, 1]}, {}, "a holds the clients [0"),
        ({"clients": [0] * 9, "states": {mine: [[0]] * 9}}, {}, "a holds the clients [0"),
        ({}, {"lr": float("inf")}, "the server's learning rate=inf"),
        ({}, {"seed": -1}, "the server's seed=-1"),
        ({}, {"round_index": "../../other/x"}, "the server's round=../../other/x"),
        ({}, {"broadcast_model": model | {"x": model[bias]}}, "x is torch"),
    ):
        message = pack(vars(download) | changes)
        assert sentence in answered(site, "fit", question | asked, message)["failure"]
    assert [path.name for path in other.iterdir()] == ["scan-7.bin"]
    assert list(site.end.stores.names) == [mine]


ANSWERS = (  # a change of an answer, and the error
    (
        lambda answer: answer | {"uploads": []},
        r"clients cannot be \[\], because the server asked for",
    ),
    # a later round
    (lambda answer: answer | {"states": {"scaffold": [0, 2**62]}}, "states.scaffold cannot be"),
    (lambda answer: pack(answer)[:-1], "a message cannot be read"),
)


def garbled_by(changes):
    """Changes each answer of b to ``fit`` by the next of these functions."""
    changes = iter(changes)
    return lambda site, verb, answer: (
        next(changes)(answer) if (site, verb) == ("b", "fit") else answer
    )


def test_a_malformed_answer_fails_only_its_site(federated, simulated, monkeypatch, caplog):
    """The uploads of other sites count. The states that the answer names do not."""
    garbled = garbled_by(change for change, _ in ANSWERS)
    rounds = len(ANSWERS)
    words = ("algorithm=scaffold", *ALL, f"rounds={rounds}")
    survivors(
        federated,
        simulated,
        monkeypatch,
        dict.fromkeys(range(rounds), CLIENTS_OF_B),
        *words,
        garbled=garbled,
    )
    for round_number, (_, sentence) in enumerate(ANSWERS, start=1):
        assert re.search(f"round {round_number}: b failed: .*{sentence}", caplog.text)


# ----------------------------------------------------------------------------------- data and tests
def test_sites_train_on_their_own_samples(federated, simulated, tmp_path):
    """Sites that own the samples of a partition compute the same as a simulation with that
    partition.
    """
    words = (
        "data.limit_train=null",
        "participation.num_clients=3",
        "participation.per_round=3",
        "partition=shards",
        "rounds=2",
    )
    reference = simulated(*words)
    data = reference.trainer.datamodule
    x = data.dataset.train.x
    y = data.dataset.train.y
    own = {}
    for k, name in enumerate(("a", "b", "c")):
        mine = data.client(k)
        test = {"x_test": x[mine[:1]], "y_test": y[mine[:1]]}
        own[name] = saved(tmp_path, name, x[mine], y[mine], **test) | {"clients": [k]}
    result, line = federated(*words, "partition=iid", own=own)
    assert torch.equal(final_weights(reference), final_weights(result))
    assert [len(line.programs[name].clients) for name in line.sites] == [1, 1, 1]


def test_clients_of_a_site_share_its_own_data(federated, tmp_path):
    """Site c has no client. An unknown class is refused."""
    words = ("rounds=1", "participation.num_clients=2", "participation.per_round=2")
    x = pixels(70)
    dealt = {"a": {"clients": []}, "b": {"clients": [0, 1]}}
    own = {"b": dealt["b"] | saved(tmp_path, "b", x, np.arange(70) % 3 + 7)}
    result, line = federated(*words, own=dealt | own)
    data = line.programs["b"].end.data
    assert data.sizes(np.arange(2)).sum() == 69  # one sample is held out
    assert set(data.labels.tolist()) == {7, 8, 9}
    assert line.programs["c"].clients == []
    assert np.isfinite(result.metrics["test/loss"])
    own = {"b": dealt["b"] | saved(tmp_path, "b", x, np.arange(70) % 3 + 8)}
    with refuses("has the class 10, and the run's are 0, 1"):
        federated(*words, folder="other", own=dealt | own)


def test_a_resumed_run_refuses_changed_data(federated, tmp_path):
    own = {"b": saved(tmp_path, "b", pixels(60), np.arange(60) % 10)}
    federated("rounds=1", own=own)
    saved(tmp_path, "b", pixels(60), np.arange(60) % 9)
    with refuses("the data of b have changed since the run began"):
        federated(f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt", own=own)
