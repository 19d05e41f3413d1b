"""Own parts and settings that go wrong later end in a sentence before the first round."""

import math
import re

import pytest
from conftest import composer, refuses
from harness import sgd
from omegaconf import OmegaConf
from test_api import SMALL

import gcfed
from gcfed.assemble import assemble, check_buildable
from gcfed.check import check
from gcfed.utils.instantiate import BuildError
from gcfed.utils.keys import keys_of
from gcfed.utils.refusal import Refusal, in_own_code, says_all


class NoRule:
    def add(self, upload, round): ...

    def reduce(self, round, like): ...


class Deep:
    def __init__(self, depth, width=1): ...


class ByParity:
    """A partition whose constructor takes no argument."""

    def __call__(self, labels, num_clients, *, seed, groups=None): ...


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ("NoRule", r"NoRule is no Aggregator: derive it from gcfed\.aggregators\.cohort"),
    ],
)
def test_an_aggregator_that_the_server_cannot_call_is_refused(rule, sentence):
    cfg = gcfed.configure(SMALL, f"aggregator._target_={__name__}.{rule}", "~aggregator.weighting")
    with refuses(sentence):
        assemble(cfg)


def test_a_partition_that_takes_no_arguments_is_refused_with_the_keys_to_leave_out():
    cfg = gcfed.configure(SMALL, "partition=dirichlet", f"partition._target_={__name__}.ByParity")
    with pytest.raises(
        BuildError, match=r"ByParity takes no arguments, not alpha.*: add '~.*alpha"
    ):
        assemble(cfg)


@pytest.mark.parametrize(
    ("optimizer", "lr", "warns"),
    [("Adam", 1, True), ("Adagrad", 1, True), ("Adam", 0.01, False), ("SGD", 1, False)],
)
def test_a_server_optimizer_with_steps_of_one_length_is_warned_of(optimizer, lr, warns, caplog):
    server = [f"server._target_=torch.optim.{optimizer}", f"server.lr={lr}"]
    assemble(gcfed.configure(SMALL, "gc=none", server))
    assert ("lower server.lr" in caplog.text) == warns


def test_a_cosine_falls_from_the_rate_to_zero():
    rates = [sgd(lr=0.4, lr_decay=0.9, lr_cosine=8).lr(t) for t in range(10)]
    expected = [0.4 * 0.9**t * math.cos(math.pi * t / 16) ** 2 for t in range(8)]
    assert rates == pytest.approx([*expected, 0, 0])
    assert [sgd(lr=0.4, lr_decay=0.9).lr(t) for t in range(3)] == [0.4, 0.4 * 0.9, 0.4 * 0.9**2]


def test_a_cosine_that_ends_before_the_run_is_refused():
    with refuses(r"client.lr_cosine=5 is below rounds=9: .* from round 6"):
        check(gcfed.configure("rounds=9", "client.lr_cosine=5"))
    check(gcfed.configure("rounds=9", "client.lr_cosine=9"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model._target_=plain.Nothing"],
            r"model._target_=plain.Nothing: plain has no Nothing\. There are .*\.$",
        ),
        (
            ["client.optimizer._target_=torch.optim.Adamm"],
            r"torch.optim has no Adamm: did you mean (Adam|.* or Adam\b)",
        ),
        (["name=a/b"], "name=a/b: it names a folder, so it has no slash"),
        (["model._target_=users_networks.Smal"], r"users_networks has no Smal: did you mean Small"),
        (["model._target_=plain"], "model._target_=plain is a module: name a class or a function"),
        (
            ["model._target_=test_sentences.Deep"],
            r"model: TypeError: .* missing 1 required positional argument: 'depth'",
        ),
        (
            ["model._target_=test_sentences.Deep", "+model.depth=1", "+model.widht=2"],
            r"takes depth, width, not widht: did you mean model.width\?",
        ),
        (["client.optimizer.lr=fast"], "client.optimizer.lr=fast must be a number"),
        (["server.lr=null"], "server.lr=null must be a number"),
        (["partition=dirichlet", "partition.alpha=0"], r"alpha=0 must be above 0\.$"),
        (["targets=90"], r"targets=90 must be a list, such as \[90\]\.$"),
        (
            ["task._target_=test_sentences.NoRule"],
            "task: NoRule is no task: derive it from gcfed.ta",
        ),
        (["model=torchvision"], "^model: ResNet cannot read"),
        (
            ["client.optimizer=adam"],
            r"client.optimizer=adam must be a group of settings: did you mean client=adam\?",
        ),
        (["model.lora=4"], r"^model.lora=4 must be a group of settings\.$"),
        (["client=0.1"], r"^client=0.1: there is no such option\. There are adam, adamw, sgd\.$"),
        (["gc=true"], r"^gc=true: there is no such option\. There are .*gcfed"),
        (
            ["data=csv", "data.ignore=id"],
            r"^data.ignore=id must be a list",
        ),
    ],
)
def test_a_wrong_name_or_value_is_refused_with_its_key_and_a_remedy(overrides, message, caplog):
    with pytest.raises(Refusal, match=message) as refused:
        gcfed.train(gcfed.configure(overrides), quiet=True)
    assert says_all(refused.value)  # a command prints one line
    assert "hydra" not in {record.name.partition(".")[0] for record in caplog.records}


def test_a_value_of_a_wrong_type_is_refused_in_plain_words():
    """For the keys outside of any section, and for those that Lightning's and torch's classes take.
    Our own classes have test_checked.
    """
    whole = composer(["paths.output_dir=run"])
    refused: list[tuple[str, str]] = []
    for key in keys_of(OmegaConf.to_container(whole)):
        is_of_others = key.startswith(("trainer.", "client.optimizer.", "server.lr"))
        if not is_of_others and ("." in key or OmegaConf.is_config(whole[key])):
            continue
        cfg = whole.copy()
        OmegaConf.update(cfg, key, {"a": 1})
        try:
            check_buildable(cfg)
        except ValueError as error:
            refused.append((key, str(error)))
    assert len(refused) > 15
    for key, message in refused:
        assert key.rpartition(".")[2] in message
        assert not re.search(r"Input should|\w+Error\b|instance", message), message


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        Refusal, match=r"accelerator=gpu: torch .* finds no CUDA GPU here: take tra"
    ):
        gcfed.train(gcfed.configure(SMALL, "trainer=gpu"), quiet=True)


def test_an_installed_package_is_not_the_users_own_code(tmp_path):
    """Also in another environment's folder, which ``--system-site-packages`` adds."""
    for folder, is_own in (
        ("lib/site-packages", False),
        ("lib/dist-packages", False),
        ("mine", True),
    ):
        file = tmp_path / folder / "raises.py"
        file.parent.mkdir(parents=True)
        file.write_text("def f():\n    raise OSError('no GPU')\n")
        names = {}
        exec(compile(file.read_text(), str(file), "exec"), names)
        with pytest.raises(OSError, match="no GPU") as error:
            names["f"]()
        assert in_own_code(error.value.with_traceback(error.tb.tb_next)) == is_own


def test_compiled_code_is_not_the_users_own():
    """Its source file is that of the machine that compiled the package."""
    names = {}
    exec(compile("def f():\n    raise OSError('x')\n", "pandas/parsers.pyx", "exec"), names)
    with pytest.raises(OSError, match="x") as error:
        names["f"]()
    assert not in_own_code(error.value.with_traceback(error.tb.tb_next))
