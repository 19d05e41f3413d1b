"""What makes a run this run, and what does not."""

import pytest
import yaml
from conftest import composer
from omegaconf import OmegaConf

from gcfed.runs.identity import differences, hyperparameters, identity, leaves, setting


def composed(*overrides):
    return composer(overrides)


@pytest.fixture(scope="module")
def base():
    return composed()


@pytest.mark.parametrize(
    "overrides",
    [
        "rounds=7 eval_every=3 targets=[0.1] extras.figures=false callbacks.progress=null name=mine client.stack=5"
        " paths.data_dir=elsewhere paths.log_dir=elsewhere data.eval_batch_size=7 gc.lam=null server.lr=1"
        " ckpt_path=last",
        "metrics=drift trainer=ddp trainer.devices=2 client_store=disk client_store.folder=elsewhere debug=profiler"
        " ~logger.csv +tags.note=mine",
    ],
)
def test_what_changes_no_number_is_the_same_run(base, overrides):
    cfg = composed(*overrides.split())
    assert differences(leaves(base), leaves(cfg)) == ""
    assert identity(cfg) == identity(base)


@pytest.mark.parametrize(
    "override",
    [
        "gc=none", "gc.lam=0.5", "algorithm=fedprox", "client.epochs=2", "client.optimizer.lr=0.02", "data=synthetic",
        "model.hidden=[64]", "partition.alpha=1", "participation.per_round=4", "precision=64-true", "server.lr=0.5",
        "data.limit_train=100", "client_store.dtype=bfloat16", "quantization=fedpaq",
        "participation.faults.dropout=0.3", "aggregator=median", "attack=sign_flip",
    ],
)  # fmt: skip
def test_what_changes_numbers_is_another_setting(base, override):
    cfg = composed(override)
    assert setting(cfg) != setting(base)
    assert identity(cfg) != identity(base)
    assert differences(leaves(base), leaves(cfg))


def test_runs_that_differ_by_seed_are_repetitions(base):
    """Also where the seed stands in other sections: a regression's data are drawn by it."""
    assert setting(composed("seed=2")) == setting(base)
    assert identity(composed("seed=2")) != identity(base)
    drawn = "data.dataset.seed=1"
    one, two, other = (composed("experiment=matrix_regression_ssf", *o) for o in ([], ["seed=2"], ["seed=2", drawn]))
    assert setting(one) == setting(two) != setting(other)


def test_an_ingredient_that_is_absent_has_no_settings(base):
    assert identity(composed("gc=none", "gc.boundary=fc1")) == identity(composed("gc=none"))
    assert identity(composed("~gc")) == identity(composed("gc=none"))  # of which model=mlp has left the boundary
    assert identity(composed("+methods.fedgc.layerwise=tensor")) == identity(composed())


@pytest.mark.parametrize("experiment", ["digits_mlp_gcfed", "matrix_regression_ssf", "cifar10_resnet18_fedacg"])
def test_the_file_in_the_folder_has_the_identity_of_the_config(experiment):
    cfg = composed(f"experiment={experiment}", "paths.output_dir=there")
    text = OmegaConf.to_yaml(cfg, resolve=True)
    assert identity(yaml.safe_load(text)) == identity(cfg) == identity(composed(f"experiment={experiment}"))


def test_differences_name_the_keys():
    there, here = {"client.epochs": 5, "seed": 1}, {"client.epochs": 2, "seed": 1, "gc.lam": 0.5}
    assert differences(there, here) == "client.epochs is 5 there, 2 here; gc.lam is None there, 0.5 here"
    assert differences(there, here, most=1) == "client.epochs is 5 there, 2 here; and 1 more"


def test_hyperparameters_are_scalars_under_the_keys_of_the_command_line():
    table = hyperparameters(composed("algorithm=fedprox", "gc.lam=0.5", "+task.gamma=3", "+data.dataset.side=9"))
    wanted = {"data": "digits", "algorithm": "fedprox", "gc.lam": 0.5, "client.optimizer": "SGD", "rounds": 100}
    assert wanted.items() <= table.items()
    assert all(isinstance(value, bool | int | float | str) for value in table.values())
    sections = {key.partition(".")[0] for key in table if "." in key}  # not of data, of the model or of the task
    assert sections == {"aggregator", "client", "gc", "methods", "participation", "partition", "server"}


def test_a_list_is_text_where_runs_are_compared():
    assert hyperparameters(composed("server=fedadam"))["server.betas"] == "[0.9, 0.99]"
