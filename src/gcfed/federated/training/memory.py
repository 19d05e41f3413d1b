"""The memory of local steps: where their tensors are, and which stacks train in the same memory.

======== ======================================== ================================================
steps    where                                    the next K clients train in the same memory
======== ======================================== ================================================
recorded on a GPU, as CUDA graphs, if the         within the run, so that they replay the recordings
         methods, the network and the optimizer
         allow it
reused   on a CPU, if the model is small          within the round
new      otherwise                                never
======== ======================================== ================================================

Other clients can train in the same memory only if what steps read is in it (``recordable =
"run"``), and if the optimizer can start again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from gcfed.data.datamodule import FederatedDataModule
from gcfed.federated.network.module import FederatedModule
from gcfed.federated.network.stack import ClientStack, StackStart
from gcfed.federated.protocol.messages import Params
from gcfed.federated.training.batches import BatchPlan
from gcfed.federated.training.local_training import LocalTraining
from gcfed.federated.training.recorded_training import RecordedTraining
from gcfed.federated.training.recorder import Recordable, Recorder, can_record
from gcfed.federated.training.solver import LocalSolver
from gcfed.models.facts import may_draw
from gcfed.optim.partial import is_recordable_optimizer, probe_optimizer, starts_at_zero

SMALL = 1 << 20  # entries of a model for which memory is reused on a CPU
#: Most cohorts are split into stacks of one size and a smaller one.
STACK_SIZES = 2
StackKey = tuple[int, frozenset[str]]  # K and ``reads``: stacks that can use the same memory agree


class TrainingMemory:
    """Begins the local training of stacks, in new memory or in that of an earlier stack."""

    def __init__(
        self, module: FederatedModule, data: FederatedDataModule, solver: LocalSolver
    ) -> None:
        self.module = module
        self.data = data
        self.solver = solver
        optimizer = probe_optimizer(solver.optimizer)
        self._can_record = solver.graphs and is_recordable_optimizer(optimizer)
        # A recorded step reads a changing η_l from a tensor, as only fused kernels can.
        is_rate_in_memory = not solver.rate_changes or bool(optimizer.defaults.get("fused"))
        self._can_restart = starts_at_zero(optimizer) and is_rate_in_memory
        self._reuses_unrecorded = False  # whether memory is reused on a CPU in this round
        self._task_weight = 1.0  # this round's; recordings hold it as a number
        self._recorders: dict[int, Recorder] = {}  # stream → its recorder
        # recorder (None: not recorded) → the local training that a next stack can restart
        self._reusable: defaultdict[Recorder | None, dict[StackKey, LocalTraining]]
        self._reusable = defaultdict(dict)

    def begin_round(self, model: Params, task_weight: float) -> None:
        """Forgets what is reused within a round only, and recordings of another weight of the
        task's loss.
        """
        self._reusable.pop(None, None)
        if task_weight != self._task_weight:
            self._reusable.clear()
            self._task_weight = task_weight
        is_small = sum(t.numel() for t in model.values()) <= SMALL
        # The streams of a GPU train at the same time, so their stacks need memory of their own.
        self._reuses_unrecorded = is_small and self.module.device.type == "cpu"

    def clear(self) -> None:
        """Frees all memory."""
        self._recorders.clear()
        self._reusable.clear()

    def begin_training(
        self,
        start: StackStart,
        plan: BatchPlan,
        recordable: Recordable,
        reads: frozenset[str],
    ) -> LocalTraining:
        """The local training of K clients before its first step.

        Args:
            recordable: how long the methods let a recorded step stay valid.
            reads: what a forward pass returns in addition to the logits.
        """
        self.module.lent_network.find_tensors()
        recorder = self.recorder() if recordable else None
        if recorder is not None:
            plan = self._recorded_plan(plan, recordable)
        is_kept = recorder is not None or self._reuses_unrecorded
        if not (is_kept and recordable == "run" and self._can_restart):
            return self._new(start, plan, reads, recorder)
        reusable = self._reusable[recorder]
        key = len(start.clients), reads
        training = reusable.pop(key, None)
        if training is not None and training.stack.fits_network():
            training.restart(start, plan)
        else:
            if len(reusable) == STACK_SIZES:  # the new stack needs the memory of older ones
                oldest = next(iter(reusable))
                del reusable[oldest]
            training = self._new(start, plan, reads, recorder, is_reused=True)
        reusable[key] = training
        return training

    def recorder(self) -> Recorder | None:
        """The recorder of the present stream; None if steps are not recorded."""
        device = self.module.device
        if not (self._can_record and can_record(self.module.net, device)):
            return None
        stream = torch.cuda.current_stream(device).cuda_stream
        if stream not in self._recorders:
            self._recorders[stream] = Recorder()
        return self._recorders[stream]

    def _recorded_plan(self, plan: BatchPlan, recordable: Recordable) -> BatchPlan:
        """The plan with fewer kinds of steps, each of which is recorded once."""
        if not self.module.traits.why_alone:  # padding would change the statistics
            plan = plan.padded()
        if recordable == "run" and not may_draw(self.module.net):
            plan = plan.grouped()  # more rows would change what networks draw
        return plan

    def _new(
        self,
        start: StackStart,
        plan: BatchPlan,
        reads: frozenset[str],
        recorder: Recorder | None,
        is_reused: bool = False,
    ) -> LocalTraining:
        """Local training in new memory."""
        module = self.module
        if recorder is not None and is_reused:
            # the stack gets the models of later rounds in the same memory
            model = {name: t.clone() for name, t in start.broadcast_model.items()}
            start = replace(start, broadcast_model=model)
        stack = ClientStack(
            module.net,
            start,
            reads=reads,
            task=module.task,
            lent_network=module.lent_network,
        )
        optimizer = self.solver.make_optimizer(stack)
        if recorder is None:
            return LocalTraining(stack, plan, optimizer)
        if is_reused and self.solver.rate_changes:
            for group in optimizer.param_groups:
                # float32, as fused kernels on a GPU read it
                group["lr"] = torch.zeros((), device=plan.index.device)
        room = self._most_steps() if is_reused else 0
        return RecordedTraining(recorder, room, stack, plan, optimizer)

    def _most_steps(self) -> int:
        """Number of steps of the client with most samples."""
        largest = self.data.sizes().max(keepdims=True)
        return int(self.solver.num_steps(largest)[0])
