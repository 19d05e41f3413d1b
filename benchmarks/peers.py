"""Times pfl-research and BlazeFL on our clients: ``python benchmarks/peers.py digits PFL_PYTHON BLAZEFL_PYTHON``.

Each simulator runs FedAvg in one process with one thread, from the same weights, on the same clients and cohorts, with
plain SGD. The two arguments are interpreters: one with ``pfl[pytorch]``, one with ``blazefl``, numpy and tqdm. The
simulators run in turn. A figure is the processor time of a whole round without its test, because other programs
disturb it less than the time on a clock. This file also runs in those environments, so it imports torch alone.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
ROUNDS = {"digits": 40, "w6": 6}
SAME = (
    "gc=none", "algorithm=fedavg", "client.optimizer.momentum=0", "client.optimizer.weight_decay=0", "eval_every=1000",
    "trainer=cpu", "trainer.devices=1", "logger=csv", "extras.figures=false", "callbacks.checkpoint.every=1000",
)  # fmt: skip


class CNN(nn.Sequential):
    """Two 3×3 convolutions of 32 and 64 channels, one 2×2 max-pooling, dropout, a hidden layer of 128, dropout.

    It is the CNN of Reddi et al., Adaptive Federated Optimization (arXiv 2003.00295), which pfl-research
    (``simple_cnn``) and FLUTE (``cv_cnn_femnist``) train in their benchmarks. It starts as torch does.
    """

    graphable = True

    def __init__(self, input_shape: tuple[int, int, int], num_classes: int) -> None:
        channels, height, width = input_shape
        super().__init__(
            OrderedDict(
                conv1=nn.Conv2d(channels, 32, 3),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(32, 64, 3),
                relu2=nn.ReLU(),
                pool=nn.MaxPool2d(2),
                drop1=nn.Dropout(0.25),
                flatten=nn.Flatten(),
                fc1=nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
                relu3=nn.ReLU(),
                drop2=nn.Dropout(0.5),
                fc2=nn.Linear(128, num_classes),
            )
        )


def network(case: Any) -> nn.Module:
    """The network of a case with its first weights: the CNN, or an MLP as wide as these weights."""
    weights = [w for w in case.weights if w.dim() == 2]
    layers = [layer for w in weights for layer in (nn.Linear(w.shape[1], w.shape[0]), nn.ReLU())]
    convolves = len(weights) < len(case.weights) / 2
    net = CNN(case.x[0].shape, len(case.weights[-1])) if convolves else nn.Sequential(nn.Flatten(), *layers[:-1])
    with torch.no_grad():
        for parameter, weight in zip(net.parameters(), case.weights, strict=True):
            parameter.copy_(weight)
    return net


def clock() -> Callable[[], float]:
    """Returns a function that gives the processor seconds since its last call."""
    last = [time.process_time()]

    def lap() -> float:
        last.append(time.process_time())
        return last[-1] - last[-2]

    return lap


def export(file: str, rounds: int) -> Any:
    """A callback that writes a run's clients, cohorts and weights to a file, and times its rounds."""
    from lightning.pytorch import Callback

    from gcfed.federated.loop import FederatedLoop

    class Export(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            loop, data = FederatedLoop.of(trainer), trainer.datamodule
            ids = [torch.as_tensor(data.client(k)) for k in range(data.num_clients)]
            x, y = data.fetch(torch.arange(int(torch.cat(ids).max()) + 1), None)
            x_test, y_test = data.fetch_test((0, data.num_test))
            cohorts = [loop.sampler(t, data.num_clients, loop.seed).tolist() for t in range(rounds)]
            solver, weights = loop.solver, [p.detach() for p in pl_module.net.parameters()]
            torch.save({
                "clients": ids, "x": x.contiguous(), "y": y, "x_test": x_test.contiguous(), "y_test": y_test,
                "weights": [w.contiguous() for w in weights], "cohorts": cohorts, "lr": solver.lr(0),
                "batch_size": solver.batch_size, "epochs": solver.epochs,
            }, file)  # fmt: skip
            self.lap, self.seconds = clock(), list[float]()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds.append(self.lap())

    return Export()


def ours(workload: str, file: str) -> tuple[list[float], nn.Module]:
    from omegaconf import open_dict

    from benchmarks.workloads import compose_workload
    from gcfed.run import train

    cfg = compose_workload(workload, *SAME, f"rounds={ROUNDS[workload]}")
    with open_dict(cfg):
        cfg.paths.output_dir = str(Path(file).with_suffix(""))
        cfg.callbacks.export = {"_target_": "benchmarks.peers.export", "file": file, "rounds": ROUNDS[workload]}
    result = train(cfg, quiet=True)
    callbacks: Any = result.trainer.callbacks
    return next(callback.seconds for callback in callbacks if hasattr(callback, "seconds")), result.module.net


def pfl(case: Any) -> tuple[list[float], nn.Module]:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Timed(TrainingProcessCallback):
        def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
            seconds.append(lap())
            return False, Metrics()

    net: Any = network(case)
    net.loss = lambda x, y: F.cross_entropy(net.train()(x), y)
    net.metrics = lambda x, y: {}
    members = iter([client for cohort in case.cohorts for client in cohort])
    users = {k: Dataset([case.x[ids], case.y[ids]], user_id=str(k)) for k, ids in enumerate(case.clients)}
    data = FederatedDataset(users.__getitem__, lambda: next(members))
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    each = {"local_num_epochs": case.epochs, "local_learning_rate": case.lr, "local_batch_size": case.batch_size}
    params = NNAlgorithmParams(
        central_num_iterations=len(case.cohorts), evaluation_frequency=10**9, val_cohort_size=None,
        train_cohort_size=len(case.cohorts[0]),
    )  # fmt: skip
    seconds, lap = list[float](), clock()
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    FederatedAveraging().run(params, backend, model, NNTrainHyperParams(**each), callbacks=[Timed()])
    return seconds, net


def blazefl(case: Any) -> tuple[list[float], nn.Module]:
    from blazefl.contrib.fedavg import FedAvgBaseClientTrainer, FedAvgBaseServerHandler

    def loader(type_: Any, cid: int, batch_size: int, generator: Any) -> DataLoader:
        data = clients[cid]
        return DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), batch_size, False))

    clients = [TensorDataset(case.x[ids], case.y[ids]) for ids in case.clients]
    data: Any = SimpleNamespace(get_dataloader=loader)
    models: Any = SimpleNamespace(select_model=lambda name: network(case))
    n, share = len(clients), (len(case.cohorts[0]) + 0.5) / len(clients)
    server = FedAvgBaseServerHandler(models, "net", data, len(case.cohorts), n, share, "cpu", case.batch_size, 0)
    trainer = FedAvgBaseClientTrainer(models, "net", data, "cpu", n, case.epochs, case.batch_size, case.lr, 0)
    seconds, lap = list[float](), clock()
    for cohort in case.cohorts:
        trainer.local_process(server.downlink_package(), cohort)
        for package in trainer.uplink_package():
            server.load(package)
        seconds.append(lap())
    return seconds, server.model


def measure(name: str, workload: str, file: str) -> dict[str, float]:
    """Samples per processor second, the median over rounds after the first, and the accuracy after the last."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if name == "ours":
        seconds, net = ours(workload, file)
    case = SimpleNamespace(**torch.load(file))
    if name != "ours":
        seconds, net = {"pfl": pfl, "blazefl": blazefl}[name](case)
    samples = [case.epochs * sum(len(case.clients[k]) for k in cohort) for cohort in case.cohorts]
    rates = [n / s for n, s in zip(samples[1:], seconds[1:], strict=True)]
    with torch.no_grad():
        accuracy = (net.eval()(case.x_test).argmax(1) == case.y_test).float().mean().item()
    return {"samples_per_s": median(rates), "accuracy": accuracy}


def turns(workload: str, pythons: dict[str, str], repetitions: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Measures the simulators in turn, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for i in range(repetitions):
            for name, python in pythons.items():
                file, out = f"{folder}/case_{i}.pt", f"{folder}/{name}_{i}.json"
                command = [python, __file__, workload, "--only", name, "--file", file, "--out", out]
                environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
                yield name, json.loads(Path(out).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=ROUNDS)
    parser.add_argument("pythons", nargs="*", help="interpreters with pfl and with blazefl")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        Path(args.out).write_text(json.dumps(measure(args.only, args.workload, args.file)))
        return
    pythons = dict(zip(("ours", "pfl", "blazefl"), [sys.executable, *args.pythons], strict=False))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    for name, figures in turns(args.workload, pythons, args.repetitions):
        found[name].append(figures)
        print(name, figures, flush=True)
    print(f"| {args.workload} | samples/s of a core | ours ÷ this one | accuracy |\n|---|---|---|---|")
    for name, each in found.items():
        rates = [figures["samples_per_s"] for figures in each]
        # Within a repetition, because the machine's speed drifts.
        ratio = median(own["samples_per_s"] / rate for own, rate in zip(found["ours"], rates, strict=True))
        print(f"| {name} | {median(rates):,.0f} | {ratio:.2f} | {each[-1]['accuracy']:.3f} |")


if __name__ == "__main__":
    main()
