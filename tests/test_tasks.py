"""Labels are classes or vectors: losses, the columns of tests, and regressions in the engine."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import refuses
from harness import (
    ArrayData,
    Cohorts,
    assert_near,
    final_weights,
    make_net,
    random_federation,
    sgd,
    train_rounds,
)
from plain_reference import batches, cohort
from torch import nn

from gcfed.aggregators.mean import MeanAggregator
from gcfed.federated.engine.loop import FederatedLoop
from gcfed.federated.network.lent_network import Traits
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.probing.probe import probe
from gcfed.folders.identity import identity
from gcfed.methods.objective.fedlc import FedLC
from gcfed.methods.objective.fedmlb import FedMLB
from gcfed.methods.objective.fedntd import FedNTD
from gcfed.methods.objective.fedreg import FedReg
from gcfed.methods.objective.proximal import Proximal
from gcfed.metrics.local_models import Clients
from gcfed.models.mlp import MLP
from gcfed.run import train
from gcfed.tasks import CLASSIFICATION, Batch, Classification, SquaredError, Task


def test_cross_entropy_of_padded_sequences():
    logits = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    y = torch.randint(5, (2, 3, 4))
    y[0, 1, 2:] = -100
    losses = Classification().losses(logits, y)
    by_hand = -logits.softmax(-1).log().gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(losses, by_hand * (y >= 0))
    scores = Classification().scores(logits, y)
    assert tuple(scores) == Classification.columns
    assert torch.equal(scores["test/acc"].bool(), logits.argmax(-1) == y)
    assert torch.equal(Classification().real(y), y >= 0)


def test_the_mean_of_a_batch_leaves_padding_out_and_is_zero_without_a_real_label():
    values = torch.tensor([[1.0, 3.0, 5.0], [2.0, 4.0, 8.0], [7.0, 9.0, 6.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    y = torch.where(mask > 0, 0, -100)
    batch = Batch(torch.zeros(3, 3, 6), y, mask, mask.sum(1))
    assert batch.mean(values).tolist() == [2.0, 0.0, 6.0]


def test_squared_error_by_hand():
    outputs = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    y = torch.tensor([[0.0, 4.0], [3.0, 4.0]])
    assert SquaredError().losses(outputs, y).tolist() == [2.5, 12.5]
    scores = SquaredError().scores(outputs, y)
    assert [scores[column].tolist() for column in SquaredError.columns] == [
        [2.5, 12.5],
        [2.5, 12.5],
    ]
    assert SquaredError().real(y).tolist() == [True, True]
    task = SquaredError()
    # standardised targets: only the RMSE has the user's units
    task.target_std = torch.tensor([2.0, 10.0])
    scores = task.scores(outputs, y)
    assert [scores[column].tolist() for column in task.columns] == [[2.5, 12.5], [202.0, 818.0]]


def vectors(sizes=(9, 4, 7, 6)):
    """Clients of unequal sizes with vectors as targets."""
    random = np.random.default_rng(2)
    ends = np.cumsum((0, *sizes))
    x, y = (torch.from_numpy(random.standard_normal((ends[-1], width))) for width in (6, 3))
    return ArrayData(x, y, [np.arange(a, b) for a, b in pairwise(ends)])


def linear():
    torch.manual_seed(3)
    return nn.Linear(6, 3, bias=False, dtype=torch.float64)


def by_hand(w, data, solver, lr, gradient, cohorts):
    """FedAvg on a linear layer. ``gradient(w, x, y)`` is the gradient of its loss."""
    for t, clients in enumerate(cohorts):
        ends = []
        for client in clients:
            v = w.clone()
            for x, y in batches(data, solver, client, t):
                v = v - lr * gradient(v, x, y)
            ends.append(v)
        w = torch.stack(ends).mean(0)
    return w.flatten()


@pytest.mark.parametrize("k", [1, 3])
def test_a_regression_equals_a_plain_loop(k):
    """The clients have 9, 4, 7 and 6 samples in batches of four. A stack pads the last batches."""
    data = vectors()
    solver = sgd(lr=0.05)
    rounds = 2
    ours = train_rounds(linear(), data, solver, rounds=rounds, k=k, task=SquaredError())
    cohorts = [cohort(data, t, 3) for t in range(rounds)]
    w = by_hand(
        linear().weight.detach(),
        data,
        solver,
        0.05,
        lambda w, x, y: (x @ w.T - y).T @ x / len(x),
        cohorts,
    )
    assert_near(ours, w, 1e-12)


class Focal(Classification):
    """Lin et al., ICCV 2017."""

    def __init__(self, gamma=2.0):
        self.gamma = gamma

    def losses(self, outputs, y):
        losses = super().losses(outputs, y)
        return (1 - (-losses).exp()) ** self.gamma * losses


@pytest.mark.parametrize("k", [1, 3])
def test_clients_minimise_a_users_own_loss(k):
    """The gradient has a closed form.

    With K = 1 and whole batches, the engine uses torch's own mean.
    """
    data = random_federation((8, 4, 12))
    solver = sgd(lr=0.3, epochs=1)
    gamma = 3.0
    net = nn.Linear(6, 4, bias=False, dtype=torch.float64)
    w = net.weight.detach().clone()
    ours = train_rounds(net, data, solver, rounds=1, k=k, task=Focal(gamma))

    def gradient(w, x, y):
        p = (x @ w.T).softmax(1)
        q = p[torch.arange(len(y)), y].unsqueeze(1)
        # derivative by the cross-entropy
        by_loss = (1 - q) ** gamma - gamma * (1 - q) ** (gamma - 1) * q * q.log()
        return (by_loss * (p - nn.functional.one_hot(y, 4))).T @ x / len(x)

    assert_near(ours, by_hand(w, data, solver, 0.3, gradient, [range(3)]), 1e-12)


def test_a_users_own_loss_is_used_in_tests_and_changes_the_identity(config, tmp_path):
    focal = (f"task._target_={__name__}.Focal", "+task.gamma=3", "rounds=1", "data.limit_train=200")
    cfg = config(*focal, folder=tmp_path)
    result = train(cfg)
    assert (
        len({identity(c) for c in (cfg, config(*focal, "task.gamma=4"), config(*focal[2:]))}) == 3
    )
    x, y = result.trainer.datamodule.fetch_test((0, result.trainer.datamodule.num_test))
    with torch.no_grad():
        q = result.module.net(x).softmax(1)[torch.arange(len(y)), y]
    assert result.metrics["test/loss"] == pytest.approx(
        -((1 - q) ** 3 * q.log()).mean().item(), rel=1e-4
    )


@pytest.mark.parametrize("columns", [("test/acc",), ("test/loss", "auc")])
def test_a_task_with_invalid_columns_is_refused(config, tmp_path, monkeypatch, columns):
    monkeypatch.setattr(Focal, "columns", columns)
    with refuses(
        r"^columns of task=Focal must begin with test/, and one be test/loss: they",
    ):
        train(config(f"task._target_={__name__}.Focal", folder=tmp_path))


def test_a_loss_or_score_that_sums_would_broadcast_is_refused(monkeypatch):
    x = torch.randn(8, 6)
    y = torch.randn(8, 1)
    net = nn.Linear(6, 1)
    with refuses(
        r"^task=SquaredError: losses has the shape \[8, 8\] .*: it must be \[8\]\.$",
    ):
        # all pairs of outputs and targets
        probe(nn.Sequential(net, nn.Unflatten(1, (1, 1))), x, y, SquaredError())
    monkeypatch.setattr(
        SquaredError, "scores", lambda _, outputs, y: {"test/mae": (outputs - y).abs()}
    )
    with refuses(r"^task=SquaredError: test/mae has the shape \[8, 1\]"):
        probe(net, x, y, SquaredError())


@pytest.mark.parametrize("method", [FedNTD, FedLC, FedReg, Clients])
def test_methods_that_need_classes_refuse_regressions(method, monkeypatch):
    # the probe would refuse the labels
    monkeypatch.setattr("gcfed.federated.engine.bound_run.set_traits", lambda *_: None)
    loop = FederatedLoop(
        sampler=Cohorts(2),
        solver=sgd(),
        aggregator=MeanAggregator(),
        rounds=1,
        seed=1,
    )
    module = SimpleNamespace(net=make_net(), task=SquaredError(), traits=Traits())
    data = random_federation()
    loop.bind([Proximal()], data, module)
    with refuses(f"{method.__name__} works on the logits of classes, and task=SquaredError"):
        loop.bind([method()], data, module)


@pytest.mark.parametrize("task", [CLASSIFICATION, SquaredError()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_tests_sum_batches_in_float64(dtype, task):
    outputs = torch.randn(7, 4, dtype=dtype)
    wanted = torch.promote_types(dtype, torch.float32)
    y = torch.arange(7) % 4 if task is CLASSIFICATION else torch.randn(7, 4, dtype=wanted)
    data = SimpleNamespace(fetch_test=lambda batch, split: batch)
    module: Any = SimpleNamespace(
        trainer=SimpleNamespace(datamodule=data),
        net=nn.Identity(),
        task=task,
        eval_precision=None,
        test_sums={},
    )
    for part in (slice(0, 5), slice(5, 7)):
        FederatedModule.validation_step(module, (outputs[part], y[part]), 0)
    found = FederatedModule.scores(module)
    assert module.test_sums["test/loss"].dtype == torch.float64
    errors = outputs.to(wanted) - y if task is not CLASSIFICATION else None
    loss = (
        nn.functional.cross_entropy(outputs.to(wanted), y)
        if errors is None
        else errors.square().sum(1).mean() / 2
    )
    assert found["test/loss"] == pytest.approx(
        loss.item(), rel=1e-6 if wanted == torch.float32 else 1e-13
    )
    if errors is not None:
        assert found["test/rmse"] == pytest.approx(errors.square().mean().sqrt().item())


def begin_test(task, **scaling):
    """Lets a module begin a test on data that have this scaling."""
    data = SimpleNamespace(scaling=scaling, to_device=lambda *_: None)
    module: Any = FederatedModule(make_net(), partial(torch.optim.SGD, lr=1.0), task=task)
    module._trainer = SimpleNamespace(datamodule=data)
    module.on_validation_start()


def test_a_task_has_the_units_of_its_present_data():
    """A task may serve data in raw units after standardised ones."""
    task = SquaredError()
    outputs = torch.zeros(1, 2, dtype=torch.float64)
    y = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    begin_test(task, y_std=np.array([3.0, 5.0]))
    assert task.scores(outputs, y)["test/rmse"].tolist() == [(9 + 100) / 2]
    begin_test(task)
    assert task.scores(outputs, y)["test/rmse"].tolist() == [(1 + 4) / 2]


class AllAtOnce(Classification):
    """Computes the losses of all clients by one call."""

    def client_losses(self, outputs, y):
        return 3 * super().client_losses(outputs, y)


def tripled(task):
    """The task, whose object has losses of its own."""
    losses = task.losses
    task.losses = lambda outputs, y: 3 * losses(outputs, y)
    return task


@pytest.mark.parametrize("make", [AllAtOnce, lambda: tripled(Classification())])
def test_every_way_to_a_users_losses_is_the_loss_of_a_lone_client(make):
    """torch's own mean must not replace them."""
    generator = torch.Generator().manual_seed(3)
    outputs = torch.randn(1, 5, 4, generator=generator, dtype=torch.float64)
    y = torch.tensor([[0, 3, 1, 2, 2]])
    batch = Batch(torch.zeros(1, 5, 6), y, None, torch.tensor([5.0]))
    task = make()
    wanted = 3 * nn.functional.cross_entropy(outputs[0], y[0])
    torch.testing.assert_close(task.mean_losses(outputs, batch)[0], wanted)
    torch.testing.assert_close(task.mean_loss_of_one(outputs[0], batch), wanted)
    assert task.least_loss() == -float("inf")


class WithOwnScale(Task):
    """Its ``scale`` is its own, whatever the data were divided by."""

    scale = 2.0
    target_std = 7.0

    def losses(self, outputs, y):
        return (self.scale * (outputs - y)).abs().mean(-1)


def test_the_attributes_of_a_users_task_stay():
    task = WithOwnScale()
    begin_test(task, y_std=np.array([3.0, 5.0]))
    assert (task.scale, task.target_std) == (2.0, 7.0)


class Sure(Classification):
    """Also tests how sure the network is, in the type of its outputs."""

    columns = (*Classification.columns, "test/sure", "test/is_sure")

    def scores(self, outputs, y):
        sure = outputs.amax(-1)
        return super().scores(outputs, y) | {"test/sure": sure, "test/is_sure": sure > 0.5}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_in_the_type_of_the_outputs_have_exact_means(dtype):
    outputs = torch.rand(999, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    module: Any = SimpleNamespace(
        trainer=SimpleNamespace(datamodule=SimpleNamespace(fetch_test=lambda batch, split: batch)),
        net=nn.Identity(),
        task=Sure(),
        eval_precision=None,
        test_sums={},
    )
    FederatedModule.validation_step(module, (outputs, torch.arange(999) % 4), 0)
    found = FederatedModule.scores(module)
    sure = outputs.double().amax(-1)
    assert found["test/sure"] == pytest.approx(sure.mean().item(), rel=1e-6)
    assert found["test/is_sure"] == pytest.approx((sure > 0.5).double().mean().item(), rel=1e-6)


class ByCount(Classification):
    """Weights each class by its count in the batch."""

    def losses(self, outputs, y):
        counts = torch.bincount(y, minlength=outputs.shape[-1]).clamp(min=1)
        return nn.functional.cross_entropy(outputs, y, reduction="none") / counts[y]


def test_a_loss_that_counts_labels_is_refused_in_a_stack_of_a_network_of_ours():
    """Alone, a client's batch has no padding, so the counts are its own."""
    data = random_federation((8, 4, 12))
    traits = probe(make_net(), data.x, data.y, ByCount(), 3)
    assert "a loss that counts labels" in traits.why_alone
    assert not probe(make_net(), data.x, data.y, Focal(), 3).why_alone
    with refuses(r"client\.stack=3 cannot train.*counts labels"):
        sgd(stack=3).check(traits, data)


def test_a_loss_that_changes_shape_later_is_refused():
    class Short(Classification):
        def losses(self, outputs, y):
            return super().losses(outputs, y)[:1]

    with refuses(r"task=Short: losses has the shape \[1\] for labels \[4\]"):
        Short().client_losses(torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.parametrize("method", [partial(FedReg, iterations=2), FedMLB])
def test_methods_hand_a_users_loss_one_clients_batch(method):
    """Focal loss by torch's function takes ``[B, C]`` only."""

    class OnPaper(Focal):
        def losses(self, outputs, y):
            assert outputs.dim() == 2
            losses = nn.functional.cross_entropy(outputs, y, reduction="none")
            return (1 - (-losses).exp()) ** self.gamma * losses

    def final(task, k):
        torch.manual_seed(1)
        net = MLP(input_shape=(6,), num_classes=4, hidden=[5]).double()
        data = random_federation((8, 4, 12))
        return train_rounds(net, data, sgd(), rounds=2, methods=[method()], k=k, task=task)

    for k in (1, 3):
        assert_near(final(OnPaper(), k), final(Focal(), k), 1e-12)


class EditsInPlace(Classification):
    """Large margins, which change the largest logit, too."""

    def losses(self, outputs, y):
        outputs.mul_(3)
        outputs[torch.arange(len(y)), y] -= 2
        return nn.functional.cross_entropy(outputs, y, reduction="none")


class EditsACopy(EditsInPlace):
    def losses(self, outputs, y):
        return super().losses(outputs.clone(), y)


@pytest.mark.parametrize(("algorithm", "stack"), [("fedavg", 1), ("fedntd", 1), ("fedntd", 3)])
def test_a_loss_may_edit_its_outputs_in_place(config, tmp_path, algorithm, stack):
    """Neither the methods' terms, such as FedNTD's distillation, nor the measurements of a test see
    the edit.
    """

    def run(task):
        words = [f"task._target_={__name__}.{task}", f"algorithm={algorithm}", "rounds=2"]
        words += ["data.limit_train=200", "data.limit_test=100", f"client.stack={stack}"]
        words += ["metrics=classes", "logger=csv"]
        result = train(config(*words, folder=tmp_path / task))
        rows = result.frame.loc[:, lambda frame: ~frame.columns.str.startswith("time/")]
        return final_weights(result), rows

    weights, rows = run("EditsInPlace")
    same_weights, same_rows = run("EditsACopy")
    assert torch.equal(weights, same_weights)
    assert rows.equals(same_rows)
    # the shares of right samples of all classes, over equal classes, are the accuracy
    assert (rows["test/acc"] - rows["classes/mean_acc"]).abs().max() < 0.1


class NotZeroAtPadding(Classification):
    """The last class's loss in place of padding, as by ``y % num_classes``."""

    def losses(self, outputs, y):
        labels = torch.where(y < 0, outputs.shape[-1] - 1, y)
        return super().losses(outputs, labels)


def test_real_losses_are_zero_for_padding():
    logits = torch.randn(2, 3, 5)
    y = torch.tensor([[0, 1, -100], [4, -1, -100]])
    expected = Classification().losses(logits, torch.where(y < 0, -100, y))
    assert torch.equal(NotZeroAtPadding().real_losses(logits, y), expected)
    assert_near(SquaredError().real_losses(logits, logits + 2), torch.full((2, 3), 10.0), 1e-5)
