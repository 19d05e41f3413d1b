"""Every YAML file composes and instantiates. Every experiment has its paper's setting."""

import random

import numpy as np
import pytest
import torch
from conftest import options, refuses
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import gcfed
from gcfed.assemble import build_methods, build_module, declared_result
from gcfed.check import check
from gcfed.data.partition import DirichletBalanced
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.folders.identity import identity
from gcfed.methods.centralization import GlobalGC, LocalGC
from gcfed.methods.upload.quantization import Quantization
from gcfed.optim.partial import probe_optimizer
from gcfed.participation.sampling import DynamicPopulation, number_of_clients
from gcfed.utils.compose import composed, shorthand
from gcfed.utils.instantiate import build, build_all
from gcfed.utils.keys import GROUPS, OPTIONAL_GROUPS
from gcfed.utils.resolvers import CONFIGS, ROOT, VERSION_BASE

# Data sets that no experiment uses, and the options that they need instead of the defaults.
OWN = ["model=cnn", "data.num_classes=3", "data.input_shape=[1,8,8]"]
GOES_WITH = dict.fromkeys(("own", "arrays", "csv", "image_folder", "huggingface"), OWN) | {
    "emnist_balanced": ["model=cnn"],
    "fashion_mnist": ["model=fedgc_cnn"],
    "mnist": ["model=femnist_cnn"],
}
EXPERIMENTS = {
    path.stem: path.read_text() for path in sorted((ROOT / "configs/experiment").glob("*.yaml"))
}


@pytest.mark.parametrize("draw", range(12))
def test_any_choice_of_files_is_composed_as_by_hydra(draw):
    """Hydra merges the files node by node. Equal: keys, their order, values and flags."""
    rng = random.Random(draw)
    groups = rng.sample([group for group in GROUPS if options(group)], rng.randint(1, 9))
    words = [f"{group}={rng.choice(options(group))}" for group in groups]
    with initialize_config_dir(str(CONFIGS.resolve()), **VERSION_BASE):
        expected = compose("train", words)
    found = composed(words)
    assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
    assert found._metadata.flags == expected._metadata.flags


def test_a_group_that_is_null_in_train_yaml_may_be_null_on_the_command_line():
    """A script that builds a command line can then leave such a group out."""
    defaults = OmegaConf.load(CONFIGS / "train.yaml").defaults
    choices = dict(
        choice for entry in defaults if OmegaConf.is_dict(entry) for choice in entry.items()
    )
    nulls = [group for group, option in choices.items() if option is None]
    assert sorted(nulls) == list(OPTIONAL_GROUPS)
    words = [f"{group}=null" for group in nulls]
    assert gcfed.configure(words).seed == 1
    assert composed(shorthand(words)) == composed([])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("gc=Null", "gc=none"),
        ("gc=null,gcfed,null", "gc=none,gcfed,none"),
        ("gc=choice(gcfed, null)", "gc=choice(gcfed, none)"),
        ("experiment=null,digits_mlp_gcfed", "experiment=[],digits_mlp_gcfed"),
        ("gc=nullable", "gc=nullable"),
        ("metrics=[drift,null,gap]", "metrics=[drift,null,gap]"),
    ],
)
def test_null_may_be_one_of_the_options_of_a_sweep(word, expected):
    assert shorthand([word]) == [expected]


def test_a_search_that_is_null_does_not_search():
    with refuses("optimized_metric=test/acc has no effect without a search"):
        gcfed.configure("hparams_search=null", "optimized_metric=test/acc")


def instantiate(cfg):
    """Builds all objects of a run except its Trainer, without files of data."""
    assert build(cfg.partition) is not None
    data = build(cfg.data)
    assert callable(data.load)
    data.num_clients = data.num_clients or 660  # files decide the number of natural clients
    data.sizes = lambda clients=range(data.num_clients): np.full(len(clients), 100)
    data.two_samples = lambda: None
    if "relative_error" in cfg.metrics:  # it asks for the optimum
        data.setup()
    per_round = number_of_clients(
        cfg.participation.per_round, data.num_clients, "participation.per_round"
    )
    with torch.device("meta"):  # the weights do not matter here
        module = build_module(cfg)
    assert isinstance(module.configure_optimizers(), torch.optim.Optimizer)
    loop = FederatedLoop(
        sampler=build(cfg.participation.sampler, per_round=per_round),
        solver=build(cfg.client),
        aggregator=build(cfg.aggregator),
        rounds=cfg.rounds,
        seed=cfg.seed,
        eval_every=cfg.eval_every,
        stores=build(cfg.client_store),
    )
    methods = build_methods(cfg)
    with pytest.MonkeyPatch.context() as patch:
        # the probe would need data
        patch.setattr("gcfed.federated.engine.bound_run.set_traits", lambda *_: None)
        loop.bind([*methods, *build_all(cfg, "metrics")], data, module)
    build_all(cfg, "callbacks")
    return module, loop, methods


@pytest.mark.parametrize(
    "option", [o for o in options("data") if f"/data: {o}\n" not in "".join(EXPERIMENTS.values())]
)
def test_every_other_data_set_instantiates(config, option):
    """Other tests build the options of the other groups."""
    instantiate(config(*GOES_WITH.get(option, []), f"data={option}"))


@pytest.mark.parametrize("option", options("trainer"))
def test_every_trainer_instantiates(config, option):
    cfg = config(f"trainer={option}")
    if option == "gpu" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    build(cfg.trainer, logger=False, callbacks=[])


@pytest.mark.parametrize(
    ("name", "model", "classes", "clients", "alpha", "rounds", "boundary"),
    [
        ("digits_mlp_gcfed", "MLP", 10, 20, 0.1, 100, "fc3"),
        ("emnist_mlp_gcfed", "MLP", 62, 1000, 0.05, 200, "fc3"),
        ("cifar10_cnn_gcfed", "CNN", 10, 100, 0.1, 800, "fc2"),
        ("cifar100_cnn_gcfed", "CNN", 100, 100, 0.1, 800, "fc2"),
        pytest.param(
            "cifar100_vgg11_gcfed",
            "VGG11",
            100,
            400,
            0.1,
            800,
            "classifier",
            marks=pytest.mark.slow,
        ),
        ("cifar100_resnet18_gcfed", "ResNet18", 100, 400, 0.1, 800, "fc"),
        pytest.param(
            "tinyimagenet_vgg11_gcfed",
            "VGG11",
            200,
            500,
            0.1,
            1000,
            "classifier",
            marks=pytest.mark.slow,
        ),
        ("tinyimagenet_resnet18_gcfed", "ResNet18", 200, 500, 0.1, 1000, "fc"),
    ],
)
def test_experiments_have_the_setting_of_gcfed(
    config, name, model, classes, clients, alpha, rounds, boundary
):
    cfg = config(f"experiment={name}")
    module, loop, (local, server) = instantiate(cfg)
    assert type(module.net).__name__ == model
    assert cfg.data.num_classes == classes
    assert cfg.participation.num_clients == clients
    assert loop.sampler.per_round == 5
    assert cfg.partition.alpha == alpha
    assert loop.rounds == rounds
    assert type(local) is LocalGC
    assert type(server) is GlobalGC
    assert local.lam is None
    assert local.boundary == boundary
    assert server.boundary is None
    solver = loop.solver
    assert solver.epochs == 5
    assert solver.batch_size == 50
    assert solver.lr_decay == 1.0
    optimizer = probe_optimizer(solver.optimizer)
    assert isinstance(optimizer, torch.optim.SGD)
    group = optimizer.defaults
    assert group["lr"] == 0.01
    assert group["momentum"] == 0.9
    assert group["weight_decay"] == 1e-5
    assert loop.aggregator.weighting == "uniform"
    assert isinstance(cfg.server.lr, float)
    assert cfg.server.lr == 1.0


OWN_MODELS = {"apfl", "ditto", "fedper", "fedrep", "lgfedavg", "pfedme"}


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("algorithm/*.yaml")))
def test_personal_methods_declare_their_clients_models_as_their_result(config, name):
    """FedBABU is none of them: its paper judges the global model, or models that are fine-tuned."""
    column = "personal/local_acc" if name in OWN_MODELS else ""
    assert declared_result(config(f"algorithm={name}")) == column
    # with other ingredients, too
    assert declared_result(config(f"algorithm={name}", "gc=gcfed", "attack=scale")) == column


def test_adapters_that_stay_on_the_clients_are_the_result(config):
    for average, column in (("fedsa", "personal/local_acc"), ("ffa", ""), ("svd", "")):
        assert declared_result(config("gc=none", f"model.lora.average={average}")) == column


def test_the_default_is_gc_fed_and_other_algorithms_have_no_gc(config):
    assert config() == config("experiment=digits_mlp_gcfed")
    for words, name, target in (
        ([], "gcfed", True),
        (["gc=none"], "fedavg", False),
        (["algorithm=fedavg", "gc=gcfed"], "gcfed", True),
        (["gc=local"], "fedavg_local", True),
        (["algorithm=scaffold"], "scaffold", False),
        (["algorithm=scaffold", "gc=gcfed"], "scaffold_gcfed", True),
    ):
        cfg = config(*words)
        assert (cfg.name, cfg.gc._target_ is not None) == (f"digits_mlp_{name}", target)
    assert identity(config("algorithm=fedavg", "gc=gcfed")) == identity(config())
    assert identity(config("algorithm=fedavg", "gc=local")) == identity(config("algorithm=fedzmg"))
    assert config("algorithm=fedzmg", "gc=gcfed").labels.gc == "GC-Fed"


@pytest.mark.parametrize(
    ("name", "classes", "batch_size", "large_batch_size", "mean"),
    [
        ("cifar10_resnet18_fedacg", 10, 50, 10, 0.4914),
        ("cifar100_resnet18_fedacg", 100, 50, 10, 0.5071),
        ("tinyimagenet_resnet18_fedacg", 200, 100, 20, 0.4802),
    ],
)
def test_experiments_have_the_setting_of_fedacg(
    config, name, classes, batch_size, large_batch_size, mean
):
    cfg = config(f"experiment={name}")
    module, loop, methods = instantiate(cfg)
    assert type(module.net).__name__ == "ResNet18"
    assert cfg.data.num_classes == classes
    assert cfg.participation.num_clients == 100
    assert loop.sampler.per_round == 5
    assert loop.rounds == 1000
    assert build(cfg.partition) == DirichletBalanced(0.3)
    lookahead, proximal = methods
    assert lookahead.momentum == 0.85
    assert cfg.server.momentum == 0.85
    assert cfg.server.lr == 1.0
    assert proximal.mu == 0.01
    solver = loop.solver
    assert solver.epochs == 5
    assert solver.batch_size == batch_size
    assert solver.lr_decay == 0.998
    assert solver.clip_norm == 10.0
    assert module.net.bn1.num_groups == 2
    transform = cfg.data.transform
    assert transform.rotation == 10
    assert transform.crop_padding == 4
    assert transform.mean[0] == mean
    group = probe_optimizer(solver.optimizer).defaults
    assert group["lr"] == 0.1
    assert group["momentum"] == 0.0
    assert group["weight_decay"] == 1e-3
    assert loop.aggregator.weighting == "uniform"

    # Other commands in the comments of the experiment.
    note = (ROOT / "configs" / "experiment" / f"{name}.yaml").read_text()
    assert f"participation.per_round=10 client.batch_size={large_batch_size}" in note
    loop = instantiate(
        config(f"experiment={name}", "algorithm=fedavg", "partition=iid", "quantization=fedpaq")
    )[1]
    assert [type(part) for part in loop.run.simulation.program.parts] == [Quantization]
    assert probe_optimizer(loop.solver.optimizer).defaults["momentum"] == 0.0
    dynamic = (
        "participation=dynamic",
        "participation.num_clients=500",
        "participation.per_round=10",
    )
    assert instantiate(config(f"experiment={name}", *dynamic))[1].sampler == DynamicPopulation(
        10, 250, 100, 0.5
    )


def cases(*tests):
    """The first arguments of parametrized tests."""
    marks = [mark for test in tests for mark in test.pytestmark if mark.name == "parametrize"]
    return {
        (case.values if hasattr(case, "values") else case)[0]
        for mark in marks
        for case in mark.args[1]
    }


PAPERS = cases(
    test_experiments_have_the_setting_of_gcfed, test_experiments_have_the_setting_of_fedacg
)


@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() - PAPERS))
def test_every_other_experiment_instantiates(config, name):
    """Another algorithm can also run in it.

    The settings of the experiment's own method do not prevent this.
    """
    instantiate(config(f"experiment={name}"))
    check(config(f"experiment={name}", "algorithm=fedavg", "metrics=none"))


@pytest.mark.parametrize(("hidden", "last"), [("64", "fc2"), ("[]", "fc1"), ("[64,32,16]", "fc4")])
def test_the_boundary_follows_the_hidden_widths(config, hidden, last):
    assert config(f"model.hidden={hidden}").gc.boundary == last
