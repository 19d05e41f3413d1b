"""Settings that make no sense: each ends in one sentence that names its key, before anything is trained.

No list of cases: the composed config is walked, and every leaf gets every malformed value; the keys that other options
add get some of them. So do those of a search and of a study, which are no part of a run's config.
"""

import logging
import re
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from math import inf, nan

import pytest
import torch
from conftest import composer
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from gcfed import assemble as assembly
from gcfed.assemble import assemble, build_trainer
from gcfed.check import GROUPS as SECTIONS
from gcfed.check import KEYS, check
from gcfed.study.jobs import read_jobs, settings_of
from gcfed.utils import instantiate
from gcfed.utils.compose import check_groups
from gcfed.utils.resolvers import ROOT

VALUES = (nan, inf, -1, 0, 1e300, "x", "", True, None, [], {})
SOME = (nan, -1, "x", None)
PRESENT = {}  # the config of the present case, resolved
MORE = {"dynamic": ("participation.num_clients=500",), "personal": ("data.client_test=0.2",)}  # what an option needs
OF_OTHER_DATA = {"metrics=relative_error", "partition=colour", "partition=natural"}  # than the digits: test_configs.py
SMALL = ("callbacks.progress=null", "extras.figures=false", "model.hidden=[8]", "trainer.devices=1")
# Options that set keys of their own and are built from the digits alone.
GROUPS = (
    "aggregator", "algorithm", "attack", "callbacks", "client", "client_store", "federation", "gc", "logger", "metrics",
    "participation", "partition", "quantization", "server",
)  # fmt: skip
# Names, what is read before or after the run is built, and what the run sets itself.
ELSEWHERE = (
    "ckpt_path", "labels", "optimized_metric", "tags", "paths.data_dir", "paths.root_dir", "logger.csv.resume_round",
    "logger.tensorboard.resume_round", "logger.wandb.resume_round", "logger.mlflow.resume_round",
)  # fmt: skip


def leaves(tree, prefix=""):
    """Dotted key → value of all that is no mapping with entries."""
    if isinstance(tree, dict) and tree:
        return {k: v for key, sub in tree.items() for k, v in leaves(sub, f"{prefix}{key}.").items()}
    return {prefix[:-1]: tree}


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """overrides → the config, for those that a run is built from: options of all groups at once, where they agree."""
    folder, found, alone, refused = str(tmp_path_factory.mktemp("malformed")), {}, [], set()
    left = {group: sorted(p.stem for p in (ROOT / "configs" / group).glob("*.yaml") if p.stem != "base")
            for group in GROUPS}  # fmt: skip

    def said(together):
        words = [word for group, name in together for word in (f"{group}={name}", *MORE.get(name, ()))]
        cfg = compose("train", [*SMALL, *words, f"paths.output_dir={folder}"])
        refused = attack(cfg, "seed", 1, set())
        if refused is None:
            found[" ".join(words)] = cfg
        return refused

    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"), quick_builds(pytest.MonkeyPatch()):
        assert said([]) is None
        while any(left.values()):
            together = [(group, names.pop(0)) for group, names in left.items() if names]
            while together and (why := said(together)):  # without what the sentence names: later, or alone
                one = next((one for one in together if re.search(rf"\b{one[0]}[=.]", why)), together[0])
                together.remove(one)
                if one in refused:
                    alone.append(one)
                else:
                    refused.add(one)
                    left[one[0]].append(one[1])
        assert {f"{group}={name}" for group, name in alone if said([(group, name)])} == OF_OTHER_DATA
    return found


@contextmanager
def quick_builds(monkeypatch):
    """Parts with the same settings are shared: no case trains them."""
    built, plain, plain_net = {}, instantiate.build, assembly.build_net

    def build(node, **kwargs):
        if any(not isinstance(value, int) for value in kwargs.values()) or not isinstance(node, DictConfig):
            return plain(node, **kwargs)
        path, resolved = str(node._get_full_key(None)), PRESENT.get("resolved")
        if path.startswith("hydra."):
            return plain(node, **kwargs)
        for name in path.split("."):
            resolved = resolved[name]
        key = path, repr(resolved), repr(kwargs)
        if key not in built:
            built[key] = plain(node, **kwargs)
        return built[key]

    class Recording(OmegaConf):
        """The check resolves the config, which takes half of the time: once is enough."""

        @staticmethod
        def to_container(cfg, **kwargs):
            PRESENT["resolved"] = OmegaConf.to_container(cfg, **kwargs)
            return PRESENT["resolved"]

    def build_net(cfg):
        key = repr(PRESENT["resolved"].get("model"))
        if key not in built:
            built[key] = plain_net(cfg)
        return built[key]

    monkeypatch.setattr(instantiate, "build", build)
    monkeypatch.setattr(assembly, "build_net", build_net)
    monkeypatch.setattr("gcfed.check.OmegaConf", Recording)
    monkeypatch.setattr(assembly, "seed_everything", lambda *_, **__: None)
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)
    monkeypatch.undo()


@pytest.fixture(autouse=True)
def nothing_is_built_twice(monkeypatch):
    with quick_builds(monkeypatch):
        yield


@contextmanager
def changed(cfg, key, value):
    """The config with this value for a while: copies would take half of the time."""
    path, _, name = key.rpartition(".")
    parent = OmegaConf.select(cfg, path) if path else cfg
    before = deepcopy(parent._content.get(name))
    with open_dict(cfg):
        OmegaConf.update(cfg, key, value, merge=False)
    yield
    parent._content.pop(name)
    if before is not None:
        parent._content[name] = before


def attack(cfg, key, value, built):
    """What the run says against this value: a sentence, or None if it is built with it."""
    with changed(cfg, key, value):
        try:
            check(cfg)
            parts = assemble(cfg)
            if (layout := f"{cfg.get('trainer')} {cfg.get('logger')}") not in built:
                built.add(layout)
                build_trainer(cfg, parts, parts.callbacks)
        except (ValueError, FileNotFoundError) as error:
            return str(error)
    return None


def names(sentence, key, plain):
    """Whether it names the key, one that follows it or that it follows, or the node and the setting."""
    near = [key, *(k for k in plain if plain[key] == f"${{{k}}}")]
    for k, v in plain.items():
        followed = v[2:-1] if isinstance(v, str) and v.startswith("${") else ""
        if followed == key or (followed and key.startswith(f"{followed}.")):
            near.append(k + key.removeprefix(followed))
    nodes = [k.rpartition(".") for k in near]
    return any(k in sentence for k in near) or any(f"{n} " in sentence and f"{k}=" in sentence for n, _, k in nodes)


def meaningful(value, default):
    """Whether a value is of its setting's kind, as far as its default tells."""
    if value in (nan, inf, 1e300, "") or isinstance(value, float):
        return False
    if value is None or default is None:
        return True
    if isinstance(default, list | dict):
        return value in ([], {})
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(default, bool) and isinstance(value, bool)
    return isinstance(value, str) if isinstance(default, str) else isinstance(value, int)


@pytest.mark.slow
def test_every_malformed_leaf_ends_in_one_sentence_with_its_key(composed):
    assert {key for cfg in composed.values() for key in cfg} == {*SECTIONS, *KEYS}
    seen, built, wrong, tried = set(), set(), [], 0
    for overrides, cfg in composed.items():
        plain, resolved = (leaves(OmegaConf.to_container(cfg, resolve=resolve)) for resolve in (False, True))
        for key, default in plain.items():
            if key.startswith(ELSEWHERE) or (key, repr(default)) in seen:
                continue
            seen.add((key, repr(default)))
            for value in SOME if overrides else VALUES:
                tried += 1
                try:
                    said = attack(cfg, key, value, built)
                except Exception as error:
                    wrong.append(f"{overrides} {key}={value}: {type(error).__name__}: {error}")
                    continue
                if said is None and not meaningful(value, resolved.get(key, {})):
                    wrong.append(f"{overrides} {key}={value} is accepted")
                if said is not None and not (names(said, key, plain) and "\n" not in said):
                    wrong.append(f"{overrides} {key}={value}: {said}")
    assert tried > 1000
    assert not wrong, "\n".join(wrong)


def refusals(call, plain, where):
    """What is wrong of a check that gets each leaf of ``plain`` malformed: nothing may be accepted, or not named."""
    for key, default in leaves(plain).items():
        for value in VALUES:
            tree = OmegaConf.create(plain)
            OmegaConf.update(tree, key, value, merge=False)
            try:
                call(OmegaConf.to_container(tree))
                if not meaningful(value, default):
                    yield f"{where}.{key}={value} is accepted"
            except (ValueError, FileNotFoundError) as error:
                if not re.match(rf"{where}\.{key.split('.')[0]}\b", str(error)) or "\n" in str(error):
                    yield f"{where}.{key}={value}: {error}"
            except Exception as error:
                yield f"{where}.{key}={value}: {type(error).__name__}: {error}"


def test_every_malformed_setting_of_a_search_and_of_a_study_ends_in_one_sentence_with_its_key():
    pytest.importorskip("optuna")
    from gcfed.study.space import Settings, read_tuning

    sweeper = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/hydra/sweeper/optuna.yaml"))
    sweeper = {key: value for key, value in sweeper.items() if key[0] != "_"} | {"params": {"x": "interval(0.0, 1.0)"}}
    del sweeper["sampler"]["n_startup_trials"]  # Optuna's own
    tuned = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/study/tuned_cifar10.yaml").study)
    study = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/study/base.yaml").study) | {"table": "gcfed_table5"}
    search = tuned["search"] | {"n_jobs": 1, "direction": "maximize", "seeds": [1], "params": {"x": "interval(0, 1)"}}
    search |= {"knobs": {"gc=gcfed": {"y": "choice(1, 2)"}}}
    wrong = [
        *refusals(partial(settings_of, "hydra.sweeper", Settings), sweeper, "hydra.sweeper"),
        *refusals(lambda node: read_jobs("full", node), study, "study"),
        *refusals(read_tuning, search, "study.search"),
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("n_trials", 1.5), ("n_jobs", 1.5), ("seed", [1]), ("seeds", [1, 1]), ("seeds", []), ("direction", None),
     ("storage", 3), ("params", 3), ("params", {"gc.lam": "interval(nan, 1)"}), ("bogus", 1)],
)  # fmt: skip
def test_settings_of_a_search_that_are_of_the_right_kind_and_mean_nothing(setting, value):
    pytest.importorskip("optuna")
    from gcfed.study.space import Settings

    settings = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/hydra/sweeper/optuna.yaml"))
    settings = {key: value for key, value in settings.items() if key[0] != "_"}
    with pytest.raises(ValueError, match=rf"^hydra\.sweeper\.{setting}|^gc\.lam=.*cannot be searched"):
        settings_of("hydra.sweeper", Settings, settings | {setting: value})


def test_every_group_refuses_an_unknown_option_and_runs_without_or_says_why_not(tmp_path):
    defaults = [entry for entry in OmegaConf.load(ROOT / "configs/train.yaml").defaults if entry != "_self_"]
    chosen = {group: option for entry in defaults for group, option in entry.items() if option and group != "hydra"}
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        for group in chosen:
            with pytest.raises(HydraException, match=rf"Could not find '{group}/nonsense'"):
                compose("train", [*SMALL, f"{group}=nonsense"])
            for option in (
                "null",
                "3",
                "[a,null]",
                "nan",
                "[nan,inf]",
                "-inf",
                "true",
                "{a:1}",
                "[[a]]",
                "a,null",
                "1e3",
            ):
                word = f"{group}={option}"
                with pytest.raises(ValueError, match=rf"^{re.escape(word)} names no option of {group}: choose \w"):
                    check_groups([word])
            check_groups([f"{group}=a", f"{group}=[a,'null']", f"{group}=a,b", f"~{group}", f"+{group}=[]"])
            cfg = compose("train", [f"~{group}"])
            with open_dict(cfg):
                OmegaConf.update(cfg, "paths.output_dir", str(tmp_path))
            said = attack(cfg, "seed", 1, set())
            assert said is None or (group in said and "\n" not in said), (group, said)


@pytest.mark.parametrize(
    ("key", "value"),
    [("data.dataset.data_dir", 3), ("server.tau", 1e30), ("data.transform.flip", 3), ("partition.min_size", 1.5),
     ("rond", 3), ("gc.boundary", 3), ("trainer.accelerator", "gpu"), ("trainer.limit_val_batches", 0),
     ("model.hidden", [0]), ("name", "../../escape"), ("attack.clients", 0.2), ("quantization.bits", 4),
     ("participation.faults.dropout", 1), ("client_store.folder", ""), ("targets", [2]), ("optimized_metric", 3),
     ("methods.proximal", {"mu": 1}), ("callbacks.checkpoint.dirpath", "")],
)  # fmt: skip
def test_what_a_walk_over_the_leaves_does_not_try(tmp_path, monkeypatch, key, value):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = composer([*SMALL, "algorithm=fedadam", f"paths.output_dir={tmp_path}"])
    said = attack(cfg, key, value, set())
    assert said is not None
    assert said.startswith(key)
