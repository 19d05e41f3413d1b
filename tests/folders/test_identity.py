"""Which keys of a config change the identity of a run."""

import pytest
import yaml
from conftest import composer
from omegaconf import OmegaConf

from gcfed.folders.identity import differences, digest, hyperparameters, identity, leaves


def composed(*overrides):
    return composer(overrides)


@pytest.fixture(scope="module")
def base():
    return composed()


def test_settings_that_change_no_result_keep_the_identity(base):
    cfg = composed(
        "gc.lam=null",
        "server.lr=1",
        "metrics=drift",
        "debug=profiler",
        "~logger.csv",
        "+tags.note=mine",
    )
    assert differences(leaves(base), leaves(cfg)) == ""
    assert identity(cfg) == identity(base)


#: The keys that change no result. A new key changes the identity unless it is listed here and in
#: the module.
SECTIONS = (
    "paths",
    "extras",
    "trainer",
    "logger",
    "callbacks",
    "metrics",
    "federation",
    "tags",
    "labels",
)
LEAVES = {
    "name",
    "rounds",
    "eval_every",
    "ckpt_path",
    "targets",
    "optimized_metric",
    "client.stack",
    "client.graphs",
    "client_store._target_",
    "client_store.folder",
    "data.eval_batch_size",
    "data.dataset.data_dir",
    "data.dataset.download",
    "participation.faults._target_",
}
SAMPLE = (
    "data=cifar10 model=resnet18 algorithm=scaffold quantization=fedpaq attack=alie"
    " participation=dynamic metrics=all logger=many callbacks=[best,early_stopping] federation=wire"
    " aggregator=krum server=fedadam partition=rotation"
)


def changed(value):
    """Another value of the same kind, if it has one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, 1]
    return f"{value}x" if isinstance(value, str) and "${" not in value else 7


def nodes(tree, prefix=""):
    """Dotted key and unresolved value of each leaf. An empty group is a leaf."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from nodes(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_each_leaf_of_a_config_changes_the_identity_unless_it_is_listed():
    cfg = composed(*SAMPLE.split(), "paths.output_dir=run")
    before = leaves(cfg)
    differ = {}
    digests = [digest(before, but) for but in (None, "seed")]
    for key, value in nodes(OmegaConf.to_container(cfg)):
        OmegaConf.update(cfg, key, changed(value), merge=False)
        after = leaves(cfg)
        differ[key] = (digest(after) != digests[0], digest(after, "seed") != digests[1])
        OmegaConf.update(cfg, key, value, merge=False)
    assert leaves(cfg) == before
    # gc=none
    neutral = {key for key in differ if key in LEAVES or key.split(".")[0] in SECTIONS} | {
        "gc.boundary"
    }
    assert differ == {key: (key not in neutral, key not in neutral | {"seed"}) for key in differ}
    assert differ.keys() >= LEAVES
    assert len(differ) > 150


def test_runs_that_differ_by_seed_are_repetitions(base):
    """Interpolations of the seed also count: a regression draws its data from it."""

    def setting(cfg):
        return digest(leaves(cfg), without="seed")

    assert setting(composed("seed=2")) == setting(base)
    assert identity(composed("seed=2")) != identity(base)
    drawn = "data.dataset.seed=1"
    one, two, other = (
        composed("experiment=matrix_regression_ssf", *o)
        for o in ([], ["seed=2"], ["seed=2", drawn])
    )
    assert setting(one) == setting(two) != setting(other)


def test_settings_of_an_absent_method_do_not_count(base):
    idle = composed("gc=none").copy()
    idle.gc.boundary = "conv1"
    assert identity(idle) == identity(composed("gc=none"))
    assert identity(composed("~gc")) == identity(composed("gc=none"))  # model=mlp sets gc.boundary
    assert identity(composed("+methods.fedgc.layerwise=tensor")) == identity(base)


def test_the_file_in_the_folder_has_the_identity_of_the_config():
    cfg = composed("experiment=matrix_regression_ssf", "paths.output_dir=there")
    text = OmegaConf.to_yaml(cfg, resolve=True)
    assert (
        identity(yaml.safe_load(text))
        == identity(cfg)
        == identity(composed("experiment=matrix_regression_ssf"))
    )


def test_hyperparameters_are_scalars_under_the_keys_of_the_command_line():
    table = hyperparameters(
        composed("algorithm=fedprox", "gc=gcfed", "gc.lam=0.5", "+task.gamma=3", "server=fedadam")
    )
    wanted = {
        "data": "digits",
        "method": "fedprox_gcfed",
        "gc.lam": 0.5,
        "client.optimizer": "SGD",
        "rounds": 100,
    }
    assert (wanted | {"server.betas": "[0.9, 0.99]"}).items() <= table.items()
    # nothing of a clock that is off, and no number twice
    assert {key for key in table if key.startswith("participation.")} == {
        "participation.num_clients",
        "participation.per_round",
    }
    late = hyperparameters(composed("participation.clock.step=0.1"))
    assert late["participation.clock.day"] == 86400
    sections = {key.partition(".")[0] for key in table if "." in key}  # no data, model or task
    assert sections == {
        "aggregator",
        "client",
        "gc",
        "methods",
        "participation",
        "partition",
        "server",
    }


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        ("algorithm=gcfed", "algorithm=fedavg gc=gcfed", "gcfed"),
        ("algorithm=gcfed gc=none", "algorithm=fedavg", "fedavg"),
        ("algorithm=gcfed gc=local", "algorithm=fedavg gc=local", "fedavg_local"),
        ("algorithm=scaffold gc=gcfed", "gc=gcfed algorithm=scaffold", "scaffold_gcfed"),
    ],
)
def test_equal_methods_have_one_name_among_the_hyperparameters(one, other, name):
    configs = [composer([*words.split(), "paths.output_dir=run"]) for words in (one, other)]
    assert identity(configs[0]) == identity(configs[1])
    tables = [hyperparameters(cfg) for cfg in configs]
    assert tables[0] == tables[1]
    assert tables[0]["method"] == name
