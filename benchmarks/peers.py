"""Times pfl-research and BlazeFL on our clients: ``python benchmarks/peers.py digits PFL_PYTHON
BLAZEFL_PYTHON``.

Each simulator runs FedAvg in one process with one thread, from the same weights, on the same
clients and cohorts, with plain SGD, this project's network, and its crops and flips. The arguments
are interpreters of two environments: this project and ``pfl[pytorch]``; this project, ``blazefl``
and tqdm. The simulators take short turns, because a machine's speed drifts. A figure is the
processor time of a whole round without its test; other programs disturb it little.
"""

import argparse
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from omegaconf import open_dict
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.workloads import compose_workload  # noqa: E402
from gcfed.federated.engine.loop import FederatedLoop  # noqa: E402
from gcfed.run import train  # noqa: E402

ROUNDS = {"digits": 40, "w1": 3, "w6": 6}
SAME = (
    "algorithm=fedavg",
    "aggregator=weighted_mean",
    "client.optimizer.momentum=0",
    "client.optimizer.weight_decay=0",
    "eval_every=1000",
    "trainer=cpu",
    "trainer.devices=1",
    "logger=csv",
    "callbacks.checkpoint.every=1000",
)


class CNN(nn.Sequential):
    """Two 3×3 convolutions of 32 and 64 channels, one 2×2 max-pooling, dropout, a hidden layer of
    128, dropout.

    It is the CNN of Reddi et al., Adaptive Federated Optimization (arXiv 2003.00295), which
    pfl-research (``simple_cnn``) and FLUTE (``cv_cnn_femnist``) train in their benchmarks. It
    starts as torch does.
    """

    recordable = True

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


class Augmented(nn.Module):
    """A network whose training batches are stored images: it first crops, flips and normalises
    them, as we do.
    """

    def __init__(self, net: nn.Module, transform: Any) -> None:
        super().__init__()
        self.net, self.transform, self.rng = net, transform, np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = self.transform(x, torch.from_numpy(self.transform.draw(self.rng, (len(x),))))
        return self.net(x)


class Export(Callback):
    """Writes a run's clients, cohorts and network to a file, and times its rounds."""

    def __init__(self, file: str, rounds: int) -> None:
        self.file, self.rounds = file, rounds

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loop, data = FederatedLoop.of(trainer), trainer.datamodule
        ids = [torch.as_tensor(data.client(k)) for k in range(data.num_clients)]
        (x, y), net = data.fetch(torch.arange(len(data.labels)), None), copy.deepcopy(pl_module.net)
        if data.draw(np.random.default_rng(0), (1,)) is not None:
            x, net = torch.from_numpy(data.splits["training"].x), Augmented(net, data.transform)
        x_test, y_test = data.fetch_test((0, data.num_test))
        cohorts = [
            loop.sampler(t, data.num_clients, loop.seed).tolist() for t in range(self.rounds)
        ]
        case = SimpleNamespace(
            clients=ids,
            x=x.contiguous(),
            y=y,
            x_test=x_test.contiguous(),
            y_test=y_test,
            cohorts=cohorts,
            net=net.to(memory_format=torch.contiguous_format),
            lr=loop.solver.lr(0),
            epochs=loop.solver.epochs,
            batch_size=loop.solver.batch_size,
        )
        torch.save(case, f"{self.file}.new")
        Path(f"{self.file}.new").rename(self.file)  # the others wait for it
        self.stamps = [time.process_time()]

    def on_train_batch_end(self, *_: Any) -> None:
        self.stamps.append(time.process_time())


def ours(workload: str, file: str) -> tuple[list[float], nn.Module]:
    cfg = compose_workload(workload, *SAME, f"rounds={ROUNDS[workload]}")
    with open_dict(cfg):
        cfg.paths.output_dir = str(Path(file).with_suffix(""))
        cfg.callbacks.export = {
            "_target_": "benchmarks.peers.Export",
            "file": file,
            "rounds": ROUNDS[workload],
        }
    result = train(cfg, quiet=True)
    callbacks: Any = result.trainer.callbacks
    return next(c.stamps for c in callbacks if hasattr(c, "stamps")), result.module.net


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
            stamps.append(time.process_time())
            return False, Metrics()

    net: Any = case.net
    net.loss = lambda x, y: F.cross_entropy(net.train()(x), y)
    net.metrics = lambda x, y: {}
    members = iter([client for cohort in case.cohorts for client in cohort])
    users = {
        k: Dataset([case.x[ids], case.y[ids]], user_id=str(k)) for k, ids in enumerate(case.clients)
    }
    data = FederatedDataset(users.__getitem__, lambda: next(members))
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    each = {
        "local_num_epochs": case.epochs,
        "local_learning_rate": case.lr,
        "local_batch_size": case.batch_size,
    }
    params = NNAlgorithmParams(
        central_num_iterations=len(case.cohorts),
        evaluation_frequency=10**9,
        val_cohort_size=None,
        train_cohort_size=len(case.cohorts[0]),
    )
    stamps = [time.process_time()]
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    FederatedAveraging().run(
        params, backend, model, NNTrainHyperParams(**each), callbacks=[Timed()]
    )
    return stamps, net


def blazefl(case: Any) -> tuple[list[float], nn.Module]:
    from blazefl.contrib.fedavg import FedAvgBaseClientTrainer, FedAvgBaseServerHandler

    def loader(type_: Any, cid: int, batch_size: int, generator: Any) -> DataLoader:
        data = clients[cid]
        return DataLoader(
            data, batch_size=None, sampler=BatchSampler(RandomSampler(data), batch_size, False)
        )

    clients = [TensorDataset(case.x[ids], case.y[ids]) for ids in case.clients]
    data: Any = SimpleNamespace(get_dataloader=loader)
    models: Any = SimpleNamespace(select_model=lambda name: copy.deepcopy(case.net))
    n, share = len(clients), (len(case.cohorts[0]) + 0.5) / len(clients)
    server = FedAvgBaseServerHandler(
        models, "net", data, len(case.cohorts), n, share, "cpu", case.batch_size, 0
    )
    trainer = FedAvgBaseClientTrainer(
        models, "net", data, "cpu", n, case.epochs, case.batch_size, case.lr, 0
    )
    stamps = [time.process_time()]
    for cohort in case.cohorts:
        trainer.local_process(server.downlink_package(), cohort)
        for package in trainer.uplink_package():
            server.load(package)
        stamps.append(time.process_time())
    return stamps, server.model


def measure(name: str, workload: str, file: str) -> dict[str, float]:
    """Samples per processor second, the median over rounds after the first, and the accuracy after
    the last.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if name == "ours":
        stamps, net = ours(workload, file)
    while not Path(file).exists():
        time.sleep(0.1)
    case = torch.load(file, weights_only=False)
    if name != "ours":
        stamps, net = {"pfl": pfl, "blazefl": blazefl}[name](case)
    samples = [case.epochs * sum(len(case.clients[k]) for k in cohort) for cohort in case.cohorts]
    rates = [n / (b - a) for n, (a, b) in zip(samples[1:], pairwise(stamps[1:]), strict=True)]
    with torch.no_grad():
        accuracy = (net.eval()(case.x_test).argmax(1) == case.y_test).float().mean().item()
    return {"samples_per_s": median(rates), "accuracy": accuracy}


def turns(workload: str, pythons: dict[str, str]) -> dict[str, dict[str, float]]:
    """Measures the simulators.

    Each has its own process; one of these runs at a time, while the others are stopped.
    """
    running, environment = {}, os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        for name, python in pythons.items():
            command = [python, __file__, workload, "--only", name, "--folder", folder]
            running[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
            ends.callback(running[name].kill)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else stopped processes remain
        while None in [process.poll() for process in running.values()]:
            for process in running.values():
                process.send_signal(signal.SIGCONT)
                with suppress(subprocess.TimeoutExpired):
                    if process.wait(0.2):
                        raise SystemExit(
                            f"{' '.join(process.args)} ended with {process.returncode}"
                        )
                process.send_signal(signal.SIGSTOP)
        return {name: json.loads(Path(folder, name).read_text()) for name in running}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", choices=ROUNDS)
    parser.add_argument(
        "pythons", nargs="*", help="interpreters with this project, and with pfl or with blazefl"
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        figures = measure(args.only, args.workload, f"{args.folder}/case.pt")
        (args.folder / args.only).write_text(json.dumps(figures))
        return
    pythons = dict(zip(("ours", "pfl", "blazefl"), [sys.executable, *args.pythons], strict=False))
    found = [turns(args.workload, pythons) for _ in range(args.repetitions)]
    print(
        f"| {args.workload} | samples/s of a core | ours ÷ this one | accuracy |\n|---|---|---|---|"
    )
    for name in pythons:
        rates = [each[name]["samples_per_s"] for each in found]
        ratios = [
            each["ours"]["samples_per_s"] / rate for each, rate in zip(found, rates, strict=True)
        ]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {name} | {median(rates):,.0f} | {spread} | {found[-1][name]['accuracy']:.3f} |")


if __name__ == "__main__":
    main()
