"""The client side of a method: the hooks of a client part, in the order of a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from torch import Tensor

from gcfed.federated.network.stack import ClientStack
from gcfed.federated.network.tap import Output
from gcfed.federated.parts.part import Part
from gcfed.federated.protocol.messages import Download, Params, Upload
from gcfed.federated.state.client_states import ClientStates
from gcfed.federated.training.recorder import Recordable
from gcfed.tasks import Batch

#: What a part prepares for the local steps of a stack: tensors, or mappings of them, by name. They
#: are ``[K, *shape]``, or ``[*shape]`` for all clients.
Prepared = Mapping[str, Any]


class ClientPart(Part):
    """What clients do.

    It sees downloads, its clients' data and their states, and nothing of the server.

    Every hook does nothing by default. They are called in the order below, except for the last two:
    before clients train, these say what clients will send. Those from ``before_step`` to
    ``after_step`` are called in each local step of a stack of K clients.
    Lightning's ``on_after_backward`` comes before ``after_step``. It finds the gradients, ``[n,
    *shape]``, in the stack, ``pl_module.clients``. Finished clients have no row there: n ≤ K, and
    client i is row i. Tensors are on the device, in the model's type and memory format.

    Attributes:
        reads: what ``local_loss`` reads from ``out`` in addition to the logits: ``features``,
            ``stages``.
        recordable: how long a recorded local step (a CUDA graph) stays valid. ``"stack"``: in its
            own stack, because the hooks of a step change only tensors on the device. ``"run"``: in
            later stacks too, because they read only tensors of the stack, of the batch, and of what
            ``prepare`` returned. A subclass does not inherit ``"run"``: it has ``"stack"`` unless
            it declares ``"run"`` itself. Empty: the steps of the run are not recorded.
        task_weight: factor of the task's loss, for methods that balance it against their own term.
    """

    reads: Set[str] = frozenset()
    recordable: Recordable = ""
    task_weight = 1.0

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # Its hooks may read other memory than those of the base class.
        if cls.recordable == "run" and "recordable" not in vars(cls):
            cls.recordable = "stack"

    def overrides(self, *hooks: str) -> list[str]:
        """The names among ``hooks`` that it implements."""
        return [
            hook for hook in hooks if getattr(type(self), hook) is not getattr(ClientPart, hook)
        ]

    def on_download(self, download: Download) -> None:
        """Called once a round with the download, before any stack trains."""

    def prepare(self, stack: ClientStack, own: ClientStates, download: Download) -> Prepared | None:
        """May edit ``stack.full``, where clients start.

        Returns what local steps find in ``stack.prepared[self]``.
        """

    def before_step(
        self, stack: ClientStack, batch: Batch, objective: Callable[[], Tensor]
    ) -> None:
        """Called before the forward pass. May move the weights, and must move them back in
        ``on_after_backward``.

        ``order`` must be ``MOVES_WEIGHTS``. ``objective()`` is the whole objective, ``[n]``, at the
        present weights. Take its gradients by ``stack.gradients``: with ``client.accumulate``, its
        graph has only a batch's last part.
        """

    def calibrate(self, stack: ClientStack, logits_KBC: Tensor) -> Tensor:
        """Returns the logits that the task's loss takes."""
        return logits_KBC

    def local_loss(self, stack: ClientStack, batch: Batch, out: Output) -> Tensor | None:
        """Returns a term of each client's loss, ``[n]``.

        ``client.accumulate`` takes it as a mean over the samples.
        """

    def after_step(self, stack: ClientStack, batch: Batch) -> None:
        """Called after the optimizer's step. May move the weights, with ``order =
        Order.MOVES_WEIGHTS``.
        """

    def on_clients_end(self, stack: ClientStack, download: Download) -> Mapping[str, Params] | None:
        """Called after local training: ``stack.full`` has each client's w_k, ``[K, *shape]``.

        May return new states by the names in ``keeps``. They are stored for clients whose w_k and
        states are finite. A personal model besides w_k goes into ``stack.personal``, where metrics
        find it.
        """
        return None

    def observe(self, stack: ClientStack, download: Download) -> Params | None:
        """Returns a measurement of w_k. The server finds it in ``upload.notes[self.title]``."""
        return None

    def send(self, upload: Upload, own: ClientStates, download: Download) -> None:
        """Called before K uploads are sent: may edit ``upload.delta`` and send more with
        ``upload.send``.
        """

    def keep(
        self, upload: Upload, own: ClientStates, download: Download
    ) -> Mapping[str, Params] | None:
        """Called after the uploads. Returns the clients' new states by the names in ``keeps``,
        tensors ``[K, *shape]``.

        The engine stores them for the clients whose upload is finite, also if the part has edited
        ``own[name]`` in place. ``own.add(…)`` itself leaves out the other clients; its result
        (``EditedState``) is stored without a wait for the device.
        """
        return None

    def on_reply(
        self, reply: Mapping[str, Params], own: ClientStates, download: Download
    ) -> Mapping[str, Params] | None:
        """Receives the server's reply to the cohort, for K of its clients.

        Returns new states, as ``keep`` does.
        """
        return None

    def quantized(self, delta: Params) -> dict[str, int]:
        """The entries of Δ that ``send`` puts into ``upload.levels``: name → bits per number.

        Args:
            delta: tensors like those of one client's Δ, name → ``[*shape]``.
        """
        return {}

    def sent_bytes(self, delta: Params) -> dict[str, int]:
        """The entries of Δ that ``send`` makes smaller than their tensors: name → bytes of one
        client.

        Args:
            delta: tensors like those of one client's Δ, name → ``[*shape]``.
        """
        return {}
