"""A federation of sites without NVFlare: the server's transport and the sites' programs, by a line of this process.

The same through NVFlare, with its processes and certificates: tests/real_sites, by ``make test-federation``.
"""

import errno
import itertools
import json
import re
import time
from collections import deque
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import read_rows
from harness import final_weights
from lightning.pytorch import Callback
from omegaconf import OmegaConf

from gcfed import __version__
from gcfed.federated.messages import Download
from gcfed.federated.method import ClientPart
from gcfed.federation.packing import pack, pack_download, unpack
from gcfed.federation.site import OWN, Settings, Site, adopted, clients_config
from gcfed.federation.sites import Sites
from gcfed.federation.wire import Answer, Line
from gcfed.models.mlp import MLP
from gcfed.run import train

TINY = (
    "model.hidden=[12,8]", "rounds=4", "participation.num_clients=7", "participation.per_round=5", "client.epochs=1",
    "client.batch_size=8", "data.limit_train=150", "data.limit_test=40", "eval_every=1",
)  # fmt: skip


def plain(about):
    """As it comes out of JSON, but for the messages."""
    values, messages = about.copy(), {key: about[key] for key in ("message", "uploads") if key in about}
    for key in messages:
        del values[key]
    return json.loads(json.dumps(values)) | messages


class LineHere(Line):
    """Sites as objects of this process, which answer at once, or not as they should.

    Args:
        folder: of the sites.
        names: of the sites.
        own: what a site's ``gcfed.yaml`` says beside where the run's config is.
        upset: called with (site, verb, about) before a site works; what it returns: ``None``, or why the site fails;
            ``"late"``: the answer comes after the next one that is waited for in vain.
        garbled: called with (site, verb, answer), makes what comes instead.
        away: for each time that the line is renewed who is not there then.
    """

    def __init__(self, folder, names, own=None, upset=None, garbled=None, away=()):
        self.sites, self.folder, self.own = list(names), folder, own or {}
        self.upset, self.garbled = upset or (lambda *_: None), garbled or (lambda site, verb, answer: answer)
        self.answers, self.late, self.renewed, self.away = deque(), deque(), 0, deque(away)
        self.begin()

    def begin(self):
        self.programs = {}
        for name in self.sites:
            home = self.folder / name
            home.mkdir(parents=True, exist_ok=True)
            settings = {"config": str(self.folder.parent / "config.yaml"), "threads": 1} | self.own.get(name, {})
            (home / "gcfed.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(settings)))
            self.programs[name] = Site(name, home / "gcfed.yaml", home)

    def send(self, site, number, verb, about):
        why = self.upset(site, verb, about)
        if why not in (None, "late"):
            gone = why.startswith("vanished")
            self.answers.append(Answer(site, number, {} if gone else {"failure": why}, why * gone))
            return
        said = self.garbled(site, verb, plain(self.programs[site].answer(verb, plain(about))))
        queue = self.late if why == "late" else self.answers
        queue.append(Answer(site, number, said))

    def receive(self, seconds):
        if self.answers:
            return self.answers.popleft()
        while self.late:  # nothing else is under way: the deadline has passed, and this comes in the next round
            self.answers.append(self.late.popleft())
        return None

    def renew(self, vanished):
        self.renewed += 1
        self.begin()
        return self.away.popleft() if self.away else ()


@pytest.fixture
def federated(config, tmp_path, monkeypatch):
    """``federated(*overrides, own=…, …)`` runs a federation of three sites; its result and its line."""

    def run(*overrides, folder="run", names=("a", "b", "c"), **how):
        line = LineHere(tmp_path / folder / "sites", names, **how)
        monkeypatch.setattr(Sites, "open_line", lambda self: line)
        cfg = config(*TINY, "federation=nvflare", *overrides, folder=tmp_path / folder)
        return train(cfg), line

    return run


@pytest.fixture
def simulated(config, tmp_path):
    def run(*overrides, folder="simulated"):
        cfg = config(*TINY, "federation=nvflare", *overrides, folder=tmp_path / folder)  # composed already
        cfg.federation = None
        return train(cfg)

    return run


def without_times(row):
    return {key: value for key, value in row.items() if not key.startswith("time/") and "dropped" not in key}


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm=fedgc", "participation.per_round=7"),
        ("algorithm=fedsub",),
        ("algorithm=feddyn", "quantization=fedpaq"),
        ("aggregator=trimmed_mean", "attack=sign_flip", "attack.clients=0.2"),
        ("participation.faults.stragglers=0.5", "client.epochs=2", "aggregator.weighting=samples"),
    ],
    ids=" ".join,
)
def test_sites_of_several_clients_compute_what_the_simulation_does(federated, simulated, words):
    reference, (result, _) = simulated(*words), federated(*words)
    assert torch.equal(final_weights(reference), final_weights(result))
    row, same = without_times(reference.loop.last_row), without_times(result.loop.last_row)
    if "algorithm=fedgc" in words:  # there a client may have missed a broadcast: the server sends it what it has moved
        assert same.pop("comm/down_bytes") > row.pop("comm/down_bytes")
    assert same == pytest.approx(row, rel=1e-12, nan_ok=True)


# ------------------------------------------------------------------------------------------------------ who vanishes
def survivors(federated, simulated, monkeypatch, lost, *words, **how):
    """A run in which sites fail equals a simulation in which their clients drop out of the same rounds."""
    from gcfed.federated.faults import Faults

    result, line = federated(*words, "federation.least=1", **how)
    monkeypatch.setattr(
        Faults, "survivors", lambda self, drawn, steps, round, seed: np.setdiff1d(drawn, lost.get(round, []))
    )
    reference = simulated(*words)
    assert torch.equal(final_weights(reference), final_weights(result))
    for row, same in zip(*(read_rows(r.folder / "metrics.csv") for r in (reference, result)), strict=True):
        for column in [name for name in row if name.startswith(("clients/", "train/loss"))]:
            assert same[column] == pytest.approx(row[column], rel=1e-12)
    return result, line


CLIP = tuple(f"+methods.clip_update.{key}" for key in ("_target_=gcfed.methods.clip_update.ClipUpdate", "quantile=0.3"))
CLIENTS_OF_B = [1, 4]  # of seven, dealt to three sites


MEASURED = ("metrics=[clients,updates]", "metrics.clients.every=1")  # of those that came


@pytest.mark.parametrize("words", [("algorithm=fedgc",), ("aggregator=median", *MEASURED)], ids=" ".join)
def test_a_site_that_fails_counts_as_dropped_out(federated, simulated, monkeypatch, caplog, words):
    def upset(site, verb, about):
        return "no power" if (site, verb, about.get("round")) == ("b", "fit", 1) else None

    result, _ = survivors(federated, simulated, monkeypatch, {1: CLIENTS_OF_B}, *words, upset=upset)
    rows = read_rows(result.folder / "metrics.csv")
    lost = [row["train/dropped_clients"] for row in rows]
    drawn = set(result.loop.sampler(1, 7, 1).tolist())
    assert lost == [0, len(drawn & set(CLIENTS_OF_B)), 0, 0]
    assert [row["train/clients"] for row in rows] == [5 - n for n in lost]
    assert re.search("round 2: b failed: no power", caplog.text)


def test_an_upload_of_an_older_round_is_refused_by_name_and_its_site_gets_the_present_model(
    federated, simulated, monkeypatch, caplog
):
    """The late site trained in vain: its clients go on from the states that count."""

    def upset(site, verb, about):
        return "late" if (site, verb, about.get("round")) == ("b", "fit", 1) else None

    survivors(federated, simulated, monkeypatch, {1: CLIENTS_OF_B}, "algorithm=scaffold", upset=upset)
    assert "b answers round 2 (fit), and this is round 3: refused" in caplog.text


def test_a_site_that_comes_back_has_its_states(federated, simulated, monkeypatch):
    def upset(site, verb, about):
        return "vanished: killed" if (site, verb, about.get("round")) == ("b", "fit", 1) else None

    _, line = survivors(federated, simulated, monkeypatch, {1: CLIENTS_OF_B}, "algorithm=scaffold", upset=upset)
    assert line.renewed == 1


def test_a_site_that_stays_away_is_not_asked_and_the_others_go_on(federated, simulated, monkeypatch, caplog):
    """The server of the sites may take it for connected: the job begins anew without it, until it is there."""
    asked = []

    def upset(site, verb, about):
        asked.append((site, verb, about.get("round")))
        return "vanished: no power" if asked[-1] == ("b", "fit", 1) else None

    lost = dict.fromkeys((1, 2), CLIENTS_OF_B)
    words, away = ("algorithm=scaffold", "participation.per_round=7"), [{"b"}]
    result, line = survivors(federated, simulated, monkeypatch, lost, *words, upset=upset, away=away)
    assert line.renewed == 2
    assert [(verb, round) for site, verb, round in asked if site == "b"] == [
        ("configure", 0), ("fit", 0), ("fit", 1), ("configure", 3), ("fit", 3)
    ]  # fmt: skip
    assert "round 3: b did not answer" in caplog.text
    sent = [row["comm/down_bytes"] for row in read_rows(result.folder / "metrics.csv")]
    assert [bytes_ * 7 / sent[0] for bytes_ in sent] == [7, 7, 5, 7]  # to whom nothing was sent does not count


def test_a_site_that_refuses_a_job_begun_anew_drops_out(federated, caplog):
    """It is not asked, and tried again as one that has vanished is."""
    asked = []

    def upset(site, verb, about):
        asked.append((site, verb, about.get("round")))
        if asked[-1] == ("b", "fit", 1):
            return "vanished: killed"
        return "no disk" if asked[-1] == ("b", "configure", 2) else None

    result, _ = federated("participation.per_round=7", "federation.least=1", upset=upset)
    assert [row["train/dropped_clients"] for row in read_rows(result.folder / "metrics.csv")] == [0, 2, 2, 0]
    assert "b refuses this run: no disk" in caplog.text
    assert ("b", "fit", 2) not in asked


CONFIGURED = (
    ({"clients": [99, 4]}, r"it holds the clients \[99, 4\] with 2 sizes, and the run began with \[1, 4\]"),
    ({"clients": "ab"}, "clients=ab must be a list"),
    ({"clients": [-1, 4]}, r"clients=\[-1, 4\] must be a list"),
    ({"clients": None}, "clients=None must be a list"),
    ({"clients": [0, 3]}, r"it holds the clients \[0, 3\]"),
    ({"sizes": [2**70, 1]}, "sizes=.* must be a list"),
    ({"sizes": [10**12, 1]}, "sizes=.* must be a list"),
    ({"sizes": [1]}, "with 1 sizes"),
    ({"stores": [["x"]]}, "stores=.* must be a list"),
    ({"stores": ["x"]}, "it keeps 'x'"),
    ({"failure": "\x1b[2J" + "x" * 600}, r" \[2Jx{496}$"),
)


def test_a_site_that_comes_back_and_says_something_else_of_itself_drops_out(federated, caplog):
    """Of numbers, of other clients than before, and of its reasons as many as it likes."""
    said = iter([{}, *(change for change, _ in CONFIGURED)])

    def garbled(site, verb, answer):
        return answer | next(said) if (site, verb) == ("b", "configure") else answer

    def upset(site, verb, about):
        return "vanished: killed" if (site, verb) == ("b", "fit") else None

    words = ("participation.per_round=7", "federation.least=1", f"rounds={len(CONFIGURED) + 1}")
    result, _ = federated(*words, garbled=garbled, upset=upset)
    assert {row["train/dropped_clients"] for row in read_rows(result.folder / "metrics.csv")} == {2}
    refused = [record.getMessage() for record in caplog.records if "refuses this run" in record.getMessage()]
    for (_, sentence), message in zip(CONFIGURED, refused, strict=True):
        assert re.search(f"b refuses this run: .*{sentence}|b refuses this run: {sentence}", message)


def test_what_came_in_time_counts_however_long_the_server_takes_for_it(federated, simulated):
    def upset(site, verb, about):
        time.sleep(0.06 * (verb == "fit"))

    result, _ = federated("federation.deadline=0.05", upset=upset)
    assert torch.equal(final_weights(simulated()), final_weights(result))


def test_a_site_that_does_not_hear_the_reply_keeps_what_it_had(federated, caplog):
    def upset(site, verb, about):
        return "gone" if (site, verb, about.get("round")) == ("b", "reply", 1) else None

    result, _ = federated("algorithm=fedsub", "participation.per_round=7", "rounds=2", upset=upset)
    assert "round 2: b did not hear how it ended" in caplog.text
    assert len(read_rows(result.folder / "metrics.csv")) == 2
    store = result.loop.stores.opened["fedsub"]
    assert [store.version(client) for client in range(7)] == [1, 0, 1, 1, 0, 1, 1]  # 1 and 4 are b's


def test_a_full_disk_at_a_site_is_named_and_the_run_resumes_from_the_states_at_the_sites(
    federated, simulated, tmp_path, monkeypatch
):
    """Of a site's two clients one has its state on the disk, and it does not count."""
    write = Path.write_bytes

    def full(path, data):
        if re.search(r"sites/b/.*\.4-2\.bin", str(path)):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, data)

    words = ("algorithm=scaffold", "participation.per_round=7")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(ConnectionError, match=r"round 3: 5 of 7 .*federation.least is 7.*b failed: .*No space"):
            federated(*words)
    assert len(read_rows(tmp_path / "run" / "metrics.csv")) == 2
    result, _ = federated(*words, f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt")  # new processes everywhere
    assert torch.equal(final_weights(simulated(*words)), final_weights(result))


def test_a_server_that_forgets_a_round_goes_back_to_the_states_of_its_checkpoint(federated, simulated, tmp_path):
    """From previous.ckpt, though the sites have trained on; and states that nobody needs are deleted."""
    words = ("algorithm=feddc", "participation.per_round=7")
    federated(*words, "rounds=3")
    files = sorted(path.name for path in (tmp_path / "run/sites/a").rglob("0-*.bin") if "drift" in str(path))
    assert files == [
        "0-0.bin",
        "0-1.bin",
        "0-2.bin",
    ]  # of the checkpoints that there were in the last round, and its own
    result, _ = federated(*words, f"ckpt_path={tmp_path}/run/checkpoints/previous.ckpt")
    assert not list((tmp_path / "run/sites/a").rglob("0-0.bin"))
    assert torch.equal(final_weights(simulated(*words)), final_weights(result))


def test_a_state_that_is_damaged_at_a_site_is_named_in_every_round(federated, tmp_path, caplog):
    words = ("algorithm=scaffold", "participation.per_round=7")
    federated(*words, "rounds=2")
    (damaged,) = (tmp_path / "run/sites/c").rglob("2-1.bin")
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    result, _ = federated(*words, f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt", "federation.least=1")
    for round in (3, 4):  # it is never trained from
        assert re.search(rf"round {round}: c failed: ValueError: .*2-1.bin is damaged", caplog.text)
    assert [row["train/dropped_clients"] for row in read_rows(result.folder / "metrics.csv")] == [0, 0, 2, 2]


# ------------------------------------------------------------------------------------------------ what is refused
def test_another_version_of_the_project_is_refused_with_both(federated, monkeypatch):
    monkeypatch.setattr("gcfed.federation.sites.__version__", "9.9")
    with pytest.raises(ValueError, match=rf"a refuses this run: .*the server has gcfed 9.9, and a has {__version__}"):
        federated()


def test_another_model_is_refused_with_both_shapes(federated, tmp_path):
    x = np.random.default_rng(0).integers(0, 255, (60, 1, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "small.npz", x=x, y=np.arange(60) % 10)
    with pytest.raises(ValueError, match=r"b refuses this run: .*training samples have the shape \(1, 4, 4\).*8, 8"):
        federated(own={"b": {"arrays": str(tmp_path / "small.npz")}})


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"a": {"clients": [0, 1, 2]}}, "client 1 is held by a and b: see clients in the sites' gcfed.yaml"),
        ({"b": {"clients": [1]}}, "client 4 is held by no site"),
        ({"b": {"clients": [1, 7]}}, r"b holds the clients \[1, 7\], and the run has 7, from 0 on"),
        ({"b": {"threads": 0}}, r"b refuses this run: .*threads=0"),
        ({"b": {"thread": 1}}, r"gcfed.yaml: thread=1 is read by nothing: did you mean threads"),
    ],
)
def test_sites_that_do_not_fit_together_are_refused(federated, own, sentence):
    with pytest.raises(ValueError, match=sentence):
        federated(own=own)


class Listener(Callback):
    def on_after_backward(self, trainer, pl_module): ...


class Client(ClientPart):
    """A method's part, among the callbacks."""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        *(
            ((f"+callbacks.x._target_={__name__}.{kind.__name__}",), f"callbacks: {kind.__name__} takes part in local")
            for kind in (Listener, Client)
        ),
        (("attack=alie", "attack.clients=0.4", "client.stack=7"), "ALIE sees the whole cohort"),
        (("metrics=gap",), "Gap asks what clients would send"),
        (("metrics=leakage",), "Leakage asks what clients would send"),
        (("metrics=forgetting",), "Forgetting sees the whole cohort"),
        (("federation.env=prod",), "federation.kit=None"),
        (("federation.sites=[]",), r"federation.sites=\[\]: name one or more, each once"),
        (("federation.sites=[a,a]",), r"federation.sites=\['a', 'a'\]: name one or more, each once"),
        (("federation.least=0",), "federation.least=0"),
        (("federation.deadline=0",), "federation.deadline=0"),
        (("federation.deadline=86401",), "federation.deadline=86401 must be a number above 0, at most 86,400"),
        (("federation.evaluate=clients",), "set data.client_test"),
        (("federation.evaluate=nobody",), "federation.evaluate=nobody"),
    ],
    ids=str,
)
def test_what_a_federation_cannot_do_is_refused_by_name(federated, words, sentence):
    with pytest.raises(ValueError, match=sentence):
        federated(*words)


# ------------------------------------------------------------------------------------------- what the server may ask
@pytest.fixture
def asked(config, tmp_path):
    """``asked(own, *words, **changes)``: a site, and what it says to a run of these words; its own are ``TINY``."""

    def ask(own, *words, edit=lambda config: None, **changes):
        if "overrides" not in own:  # which Hydra composes, in a second
            (tmp_path / "own.yaml").write_text(OmegaConf.to_yaml(config(*TINY), resolve=True))
            own = own | {"config": "own.yaml"}
        (tmp_path / "gcfed.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(own)))
        site, sent = Site("b", tmp_path / "gcfed.yaml", tmp_path), clients_config(config(*TINY, *words))
        edit(sent)
        about = {"version": __version__, "run": "x", "share": [0], "num_clients": 7, "resumed": False}
        about |= {"config": sent, "classes": [str(i) for i in range(10)], "transform": {}} | changes
        return site, site.answer("configure", about)

    return ask


def test_threads_of_null_are_those_that_a_site_began_with(asked, monkeypatch):
    """Also after a run that set another number; in a container no more than its share of cores."""
    torch.set_num_threads(2)
    monkeypatch.setattr("gcfed.federation.site.cores", lambda: 1)
    assert asked({"threads": 0})[0].threads == 1
    monkeypatch.setattr("gcfed.federation.site.cores", lambda: 3)
    for threads, then in ((None, 2), (1, 1)):
        assert asked({"threads": threads})[1]["clients"] == [0]
        assert torch.get_num_threads() == then


def test_only_the_clients_side_of_a_config_is_sent(config):
    cfg = clients_config(config("algorithm=fedadam", "aggregator=median", "metrics=drift", "logger=csv"))
    assert not {"server", "aggregator", "callbacks", "logger", "federation", "paths"} & set(cfg)


def test_a_site_takes_numbers_from_the_server(asked):
    """For keys that it has, and where it has a number, or none: also in lists."""
    words = ("model.hidden=[5,4]", "client.epochs=3", "data.limit_train=null", "client.clip_norm=2.5", "rounds=9")
    site, said = asked({"overrides": [*words, "seed=2"]}, "client.clip_norm=1.5", "data.limit_train=140")
    assert sum(said["sizes"]) < 140 // 3
    program = site.stacks.program
    assert [*program.module.net.state_dict()["fc1.weight"].shape] == [12, 64]
    assert (program.solver.epochs, program.solver.clip_norm) == (1, 1.5)


OTHER_RUNS = (  # words of the run beside those of the site, and what the site says
    (("algorithm=fedprox",), "methods.proximal is "),
    (("algorithm=scaffold", "gc=none"), "methods.scaffold is "),
    (("gc=local",), "gc.boundary is 'None' there, 'fc3' here"),
    (("partition=iid",), "partition._target_ is "),
    (("attack=label_flip", "attack.clients=0.2"), "attack._target_ is 'gcfed"),
    (("client=adam",), "client.optimizer._target_ is 'torch.optim.Adam"),
    (("precision=64-true",), "precision is '64-true' there, '32-true' here"),
    (("data.eval_batch_size=40",), "data.eval_batch_size is '40' there, 'auto' here"),
    (("model.start=x.safetensors",), "model.start is 'x.safetensors' there, 'None' here"),
    (("client.optimizer.momentum=null",), "client.optimizer.momentum is 'None' there, '0.9' here"),
    (("metrics=clients",), "metrics.clients is "),
)


@pytest.mark.parametrize(("words", "sentence"), OTHER_RUNS, ids=str)
def test_a_site_refuses_a_run_that_is_not_its_own_and_names_the_keys(asked, words, sentence):
    failure = asked({}, *words)[1]["failure"]
    assert "b takes numbers alone from the server, and its gcfed.yaml has another run: " in failure
    assert sentence in failure


CALLED: list[object] = []


def sentinel(*args, **kwargs):
    CALLED.append((args, kwargs))


NODE, TEXT = {"_target_": "test_sites.sentinel", "x": "${sentinel:}"}, "${sentinel:}"


def places(tree, path=()):
    """Each group of a tree with each of its keys, and with one more."""
    for key, value in [*tree.items(), ("evil", None)]:
        yield tree, key, ".".join((*path, key))
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def test_of_what_a_server_sends_numbers_alone_are_taken(config):
    words = (*TINY, "algorithm=scaffold", "metrics=[drift,updates]", "data=cifar10", "client_store.folder=x")
    own = clients_config(config(*words))
    sent, taken = deepcopy(own), set()
    for group, key, path in places(sent):
        before = group.get(key)
        for value in (NODE, TEXT, [TEXT], [1, NODE], "/etc/passwd", "http://x/y", None, 7, 0.5, True, [3, [1.5]], []):
            group[key], odd = value, []
            new = adopted(own, sent, odd)
            assert new == own or (isinstance(value, int | float | list) and TEXT not in str(new)), path
            if new != own:
                taken.add(path)
            elif value != before and not OWN.match(path):
                assert any(text.startswith((f"{path} is", f"{path}.")) for text in odd), path
        group[key] = before
        if key == "evil":
            del group[key]
    assert {"client.optimizer.lr", "client.epochs", "model.hidden", "data.limit_test", "client.clip_norm"} < taken
    assert not {"data.dataset.data_dir", "client_store.folder", "metrics.updates.folder", "data.dataset.name"} & taken


@pytest.mark.parametrize("own", [{}, {"arrays": "own.npz"}], ids=str)
def test_nothing_that_a_server_sends_is_called_or_resolved(asked, tmp_path, own):
    """Neither of the config, nor of what goes beside it, nor of a round's message."""
    OmegaConf.register_new_resolver("sentinel", sentinel, replace=True)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", x=rng.integers(0, 16, (60, 1, 8, 8), dtype=np.uint8), y=np.arange(60) % 10)
    assert "failure" not in asked(own)[1]

    def everywhere(config, value):
        for group, key, _ in [*places(config)]:
            group[key] = value if not isinstance(group.get(key), dict) else group[key]

    for value in (NODE, TEXT, [TEXT, NODE]):
        assert "another run: " in asked(own, edit=lambda config, value=value: everywhere(config, value))[1]["failure"]
    for key, value in (
        ("share", [TEXT]), ("share", [NODE]), ("num_clients", TEXT), ("num_clients", NODE), ("resumed", NODE),
        ("classes", [NODE]), ("classes", [TEXT]), ("classes", TEXT), ("transform", NODE), ("transform", {"mean": TEXT}),
        ("transform", {"mean": [NODE]}),
    ):  # fmt: skip
        said = asked(own, **{key: value})[1]
        assert "failure" in said or key in ("resumed", "transform") or "arrays" not in own
    for run in ("../other", "..", TEXT):
        assert "has no name that a folder can have" in asked(own, run=run)[1]["failure"]
    site, _ = asked(own)
    download = vars(Download(0, 1, 0.1, site.model, np.array([0])))
    question = {"run": "x", "clients": [0], "states": {}, "message": pack("download", download)}
    assert "failure" not in site.answer("fit", question)
    for value in (NODE, TEXT, [TEXT, NODE], {TEXT: NODE}):
        for key in download:
            site.answer("fit", question | {"message": pack("download", download | {key: value})})
        for key, verb in itertools.product(("clients", "states", "run"), ("fit", "reply", "test")):
            site.answer(verb, question | {key: value})
    assert not CALLED


def test_a_site_does_what_its_own_clients_are_asked_and_no_more(federated):
    _, line = federated("rounds=1")
    site = line.programs["a"]
    for about, sentence in (
        ({"run": "other"}, "knows nothing of the run other"),
        ({"run": site.run, "clients": [0, 1]}, "a does not hold the clients [1]"),
    ):
        assert sentence in site.answer("fit", about)["failure"]


def test_a_server_deletes_no_file_but_states_of_the_clients_that_it_asks(federated, tmp_path):
    _, line = federated("algorithm=scaffold", "rounds=1")
    site, other = line.programs["a"], tmp_path / "other"
    other.mkdir()
    (other / "scan-7.bin").write_bytes(b"mine")
    (mine,) = site.stacks.stores.opened
    message = pack_download(Download(1, 1, 0.1, site.model, np.array([0])))
    for states in (
        {str(other): [["*", None, 0, []]]}, {str(other): [[0, None, 0, []]]}, {mine: [["*", None, 0, []]]},
        {mine: [[3, None, 0, []]]}, {mine: [[0, None, 0, ["1"]]]},
    ):  # fmt: skip
        about = {"run": site.run, "clients": [0], "states": states, "message": message}
        assert "no state of this run" in site.answer("fit", about)["failure"]
    for round in (-1, "../../other/x"):
        message = pack_download(Download(round, 1, 0.1, site.model, np.array([0])))
        about = {"run": site.run, "clients": [0], "states": {}, "message": message}
        assert "which is none" in site.answer("fit", about)["failure"]
    assert [path.name for path in other.iterdir()] == ["scan-7.bin"]
    assert list(site.stacks.stores.opened) == [mine]


def test_a_reply_is_to_the_round_that_a_site_has_trained_in(federated, tmp_path):
    """Whatever round its server says: the state that it changes is a file of that name."""
    _, line = federated("algorithm=fedsub", "rounds=1", "participation.per_round=7")
    site = line.programs["a"]
    message = pack_download(Download(5, 1, 0.1, site.model, np.array([0])))
    assert "failure" not in site.answer("fit", {"run": site.run, "clients": [0], "states": {}, "message": message})
    (upload,) = site.stacks.stores.opened["fedsub"].folder.glob("0-5.bin")
    before, mean = upload.read_bytes(), unpack(site.answer("fit", {
        "run": site.run, "clients": [0], "states": {}, "message": message,
    })["uploads"][0], "upload")["delta"]  # fmt: skip
    reply = pack("reply", {"fedsub": {name: t[0] for name, t in mean.items()}})
    site.answer("reply", {"run": site.run, "clients": [0], "round": "x/../../../escaped", "message": reply})
    assert not list(tmp_path.rglob("escaped*"))
    assert upload.read_bytes() != before


def edited(**changes):
    """A site's answer, each upload of which says something else."""

    def edit(answer):
        contents = [unpack(message, "upload") for message in answer["uploads"]]
        told = [{key: change(content[key]) for key, change in changes.items()} for content in contents]
        return answer | {"uploads": [pack("upload", c | new) for c, new in zip(contents, told, strict=True)]}

    return edit


def outside(answer):
    """Files of the server, in two steps: the version that is replaced would be deleted."""
    return answer | {"states": {"scaffold": [["/etc/host", 7, 0, []]]}}


def stated(version, checksum=0):
    return lambda answer: answer | {"states": {"scaffold": [[1, version, checksum, []]]}}


ANSWERS = {
    "no uploads": (lambda answer: answer | {"uploads": []}, r"uploads of the clients \[\], and asked were"),
    "one client twice": (lambda answer: answer | {"uploads": answer["uploads"] * 2}, "uploads of the clients"),
    "no states": (lambda answer: {"uploads": answer["uploads"]}, "failed: 'states'"),
    "another's state": (lambda answer: answer | {"states": {"scaffold": [[0, 1, 2, []]]}}, "no state of this run"),
    "another store": (lambda answer: answer | {"states": {"../x": [[1, 1, 2, []]]}}, "no state of this run"),
    "a path": (outside, "no state of this run"),
    "a version before the first": (stated(-1), "no state of this run"),
    "a version beyond all": (stated(2**63), "no state of this run"),
    "a checksum beyond all": (stated(1, 2**64 - 1), "no state of this run"),
    "no loss": (edited(loss=lambda _: None), "failed: 'NoneType'"),
    "losses of others": (edited(loss=lambda t: t.repeat(2)), "an upload has loss as"),
    "whole numbers for truth": (edited(finite=lambda t: t.repeat(2)), "an upload has finite as"),
    "half a sample": (edited(num_samples=lambda n: [0.5 for _ in n]), "with num_samples="),
    "samples of others": (edited(num_seen=lambda n: [*n, *n]), "with num_seen="),
    "complex": (edited(delta=lambda d: {n: t.to(torch.complex64) for n, t in d.items()}), "in torch.complex64"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_that_is_not_as_it_must_be_is_a_failure_of_its_site(federated, simulated, monkeypatch, caplog, kind):
    """Alone: the others' uploads count, and nothing that it says of states does."""
    change, sentence = ANSWERS[kind]

    def garbled(site, verb, answer):
        return change(answer) if (site, verb) == ("b", "fit") else answer

    lost = dict.fromkeys(range(2), CLIENTS_OF_B)
    words = ("algorithm=scaffold", "participation.per_round=7", "rounds=2")
    survivors(federated, simulated, monkeypatch, lost, *words, garbled=garbled)
    assert re.search(f"round 2: b failed: .*{sentence}|round 2: b {sentence}", caplog.text)


SERVERS = {  # what a part of the server reads: words, and what comes in its place
    "table": (("algorithm=fedvarp",), lambda answer: answer | {"states": {"fedvarp": [[1, 7, 0, []]]}}),
    "note": (("algorithm=fedgc",), edited(notes=lambda _: {})),
    "sums": (("metrics=drift", "metrics.drift.every=1"), edited(notes=lambda _: {"drift": {"": torch.zeros(9)}})),
    "bit": (CLIP, edited(extra=lambda _: {})),
}  # fmt: skip


@pytest.mark.parametrize("kind", SERVERS)
def test_what_the_servers_parts_read_is_looked_at_before_them(federated, simulated, monkeypatch, kind):
    words, change = SERVERS[kind]

    def garbled(site, verb, answer):
        return change(answer) if (site, verb) == ("b", "fit") else answer

    lost = dict.fromkeys(range(2), CLIENTS_OF_B)
    survivors(federated, simulated, monkeypatch, lost, *words, "participation.per_round=7", "rounds=2", garbled=garbled)


@pytest.mark.parametrize("sent", [torch.ones(2), {"1": 3.0}, {"1": {"x": torch.ones(2)}}, {"99": {}, "x": {}}], ids=str)
def test_local_models_that_are_none_are_not_drawn(federated, sent):
    def garbled(site, verb, answer):
        return edited(notes=lambda _: {"surface": sent})(answer) if (site, verb) == ("b", "fit") else answer

    words = ("metrics=surface", "metrics.surface.every=1", "metrics.surface.grid=3", "metrics.surface.figures=false")
    result, _ = federated(*words, "rounds=1", "participation.per_round=7", garbled=garbled)
    names = np.load(result.folder / "surface_round_1.npz")["names"].tolist()
    assert names[:3] == ["client 0", "client 2", "client 3"]


def test_a_site_does_not_keep_the_servers_table(federated):
    def garbled(site, verb, answer):
        return answer | {"stores": ["fedvarp"]} if verb == "configure" else answer

    with pytest.raises(ValueError, match="a refuses this run: it keeps 'fedvarp', which no client"):
        federated("algorithm=fedvarp", garbled=garbled)


def test_paths_of_a_site_go_from_its_file(tmp_path):
    (tmp_path / "gcfed.yaml").write_text("{arrays: own.npz, states: /states}")
    own = Settings.read(tmp_path / "gcfed.yaml")
    assert (own.arrays, own.states, own.folder) == (str(tmp_path / "own.npz"), "/states", None)


def test_the_server_sees_itself_whose_numbers_are_finite(federated):
    """A client that calls its numbers finite, and they are not, is left out like others."""
    lies = edited(
        delta=lambda d: {name: t * float("nan") for name, t in d.items()}, finite=lambda t: torch.ones_like(t)
    )

    def garbled(site, verb, answer):
        return lies(answer) if (site, verb) == ("b", "fit") else answer

    result, _ = federated("participation.per_round=7", "federation.least=1", garbled=garbled)
    rows = read_rows(result.folder / "metrics.csv")
    assert [(row["train/nonfinite_clients"], row["train/refused_steps"]) for row in rows] == [(2, 0)] * 4
    assert rows[-1]["test/loss"] != rows[0]["test/loss"]


def test_numbers_in_the_place_of_tensors_are_a_failure_of_their_site(federated, monkeypatch):
    garbled = lambda upload: pack("upload", vars(upload) | {"delta": dict.fromkeys(upload.delta, 1.0)})  # noqa: E731
    monkeypatch.setattr("gcfed.federation.site.pack_upload", garbled)
    with pytest.raises(ConnectionError, match=r"0 of 5 clients came .*a failed: 'float' object has no attribute"):
        federated("rounds=1")


# ----------------------------------------------------------------------------------------------- data and tests
def test_sites_train_on_what_is_theirs(federated, simulated, tmp_path):
    """Arrays that hold what a partition would deal give what the simulation gives, whatever the server holds itself."""
    words = ("data.limit_train=null", "participation.num_clients=3", "participation.per_round=3", "partition=shards")
    reference = simulated(*words)
    data = reference.trainer.datamodule
    x, y = data.dataset.train.x, data.dataset.train.y
    own = {}
    for k, name in enumerate(("a", "b", "c")):
        mine = data.client(k)
        np.savez(tmp_path / f"{name}.npz", x=x[mine], y=y[mine], x_test=x[mine[:1]], y_test=y[mine[:1]])
        own[name] = {"arrays": str(tmp_path / f"{name}.npz"), "clients": [k]}
    result, line = federated(*words, "partition=iid", own=own)
    assert torch.equal(final_weights(reference), final_weights(result))
    assert [len(line.programs[name].clients) for name in line.sites] == [1, 1, 1]


def test_clients_of_a_site_share_its_own_data_and_unknown_classes_are_refused(federated, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 16, (90, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "b.npz", x=x, y=np.arange(90) % 3 + 7)
    _, line = federated("rounds=1", own={"b": {"arrays": str(tmp_path / "b.npz")}})
    data = line.programs["b"].stacks.program.data
    assert data.sizes(np.arange(7)).tolist()[0::3] == [0, 0, 0]
    assert data.sizes(np.array(CLIENTS_OF_B)).sum() == 89  # one is set aside
    assert set(data.labels.tolist()) == {7, 8, 9}
    np.savez(tmp_path / "b.npz", x=x, y=np.arange(90) % 3 + 8)
    with pytest.raises(ValueError, match="has the class 10, and the run's are 0, 1"):
        federated("rounds=1", folder="other", own={"b": {"arrays": str(tmp_path / "b.npz")}})


def test_no_site_standardizes_alone(federated, tmp_path):
    rng = np.random.default_rng(0)
    for name, n in (("server", 70), ("b", 30)):
        np.savez(tmp_path / f"{name}.npz", x=rng.normal(size=(n, 5)), y=np.arange(n) % 2)
    words = ("data=arrays", f"data.path={tmp_path}/server.npz", "data.limit_test=null", "rounds=1")
    own = {"b": {"arrays": str(tmp_path / "b.npz")}}
    with pytest.raises(ValueError, match=r"b refuses this run: .*data.standardize=true is by the mean of all samples"):
        federated(*words, own=own)
    federated(*words, "data.standardize=false", folder="as they are", own=own)


def test_data_that_have_changed_are_refused_when_a_run_goes_on(federated, tmp_path):
    x = np.random.default_rng(0).integers(0, 16, (60, 1, 8, 8), dtype=np.uint8)
    own = {"b": {"arrays": str(tmp_path / "b.npz")}}
    np.savez(tmp_path / "b.npz", x=x, y=np.arange(60) % 10)
    federated("rounds=1", own=own)
    np.savez(tmp_path / "b.npz", x=x, y=np.arange(60) % 9)
    with pytest.raises(ValueError, match="the data of b are not those that the run began with"):
        federated(f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt", own=own)


class Dropping(MLP):
    """A network with dropout, which must act wherever it trains and nowhere else."""

    def head(self, h):
        return super().head(F.dropout(h, 0.5, self.training))


OWN_TESTS = ("federation.evaluate=clients", "data.client_test=0.3", "data.limit_train=600")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_clients_test_the_global_model_on_their_own_samples(federated, simulated, precision):
    """The row has the mean over all their samples, as one test on all of them together gives it; and they train on."""
    words = (*OWN_TESTS, f"precision={precision}")
    words += (f"model._target_={__name__}.Dropping",)
    result, _ = federated(*words)
    assert torch.equal(final_weights(simulated(*words)), final_weights(result))
    data, net = result.trainer.datamodule, result.module.net.eval()
    index = torch.from_numpy(data.tests_of_clients.indices)
    with torch.no_grad(), result.trainer.precision_plugin.forward_context():
        x, y = data.fetch(index, None)
        logits = net(x).float()
    row = result.loop.last_row
    assert row["test/acc"] == pytest.approx(float((logits.argmax(1) == y).double().mean()), abs=1e-6)
    assert row["test/loss"] == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-5)
    assert len(index) != data.num_test


def test_a_site_that_does_not_test_as_it_must_is_left_out_and_named(federated, tmp_path, caplog):
    """And where nobody has tested, the row has no test: no run ends by that, nor stops early, but by the last."""
    lies = {1: [float("nan"), 5], 2: [1e300, 5], 3: [0.5, -5], 4: [10**400, 5], 5: [1.0], 6: [0.5, 0.5]}
    rounds = iter(lies.values())

    def garbled(site, verb, answer):
        if (site, verb) != ("b", "test"):
            return answer
        return answer | {"scores": answer["scores"] | {"test/loss": next(rounds, answer["scores"]["test/loss"])}}

    def upset(site, verb, about):
        return "no power" if verb == "test" and about["round"] == len(lies) + 1 else None

    words = (*OWN_TESTS, "callbacks=early_stopping")
    result, _ = federated(*words, f"rounds={len(lies) + 2}", garbled=garbled, upset=upset)
    *some, nobody, _ = rows = read_rows(result.folder / "metrics.csv")
    assert len(rows) == len(lies) + 2
    assert all(0 < row["test/loss"] < 10 and 0 <= row["test/acc"] <= 1 for row in some)
    assert not [name for name in nobody if name.startswith("test/")]
    assert np.isfinite(rows[-1]["test/acc_ema"])
    for round in lies:
        assert f"round {round}: not all sites have tested the model: b failed: " in caplog.text
    everyone = "a failed: no power; b failed: no power; c failed: no power"
    assert f"round {len(lies) + 1}: not all sites have tested the model: {everyone}" in caplog.text
    with pytest.raises(ConnectionError, match="no site has tested the last model"):
        federated(*words, f"rounds={len(lies) + 1}", folder="short", upset=upset)
    result, _ = federated(
        *words, f"rounds={len(lies) + 1}", f"ckpt_path={tmp_path}/short/checkpoints/last.ckpt", folder="short"
    )
    assert result.loop.last_row["test/acc"] > 0


def test_a_site_without_clients_stands_by(federated, tmp_path, caplog):
    """Also with data of its own; and an answer that comes late is told by the round of its question."""

    def upset(site, verb, about):
        return "late" if (site, verb, about["round"]) == ("b", "test", 1) else None

    x = np.random.default_rng(0).integers(0, 16, (60, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "c.npz", x=x, y=np.arange(60) % 10)
    words = (*OWN_TESTS, "participation.num_clients=2", "participation.per_round=2", "rounds=2")
    result, line = federated(*words, own={"c": {"arrays": str(tmp_path / "c.npz")}}, upset=upset)
    assert line.programs["c"].clients == []
    assert np.isfinite(result.loop.last_row["test/loss"])
    assert "not all sites have tested the model: b did not answer" in caplog.text
    assert "b answers round 1 (test), and this is round 2: refused" in caplog.text


def test_settings_have_defaults(tmp_path):
    assert Settings.read(tmp_path / "none.yaml") == Settings()
