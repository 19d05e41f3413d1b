"""The interface of a federated method: a client part, a server part, or both.

Each part is a Lightning callback. A file with a method imports this interface from here: the sides
of a method, messages, rounds, stacks, what clients keep, and the tools for rows of K clients. A
method that goes deeper, such as one that trains a second model, imports the module that it uses.
"""

from gcfed.federated.network.rows import client_norms, inner_products, per_client
from gcfed.federated.network.stack import ClientStack
from gcfed.federated.network.tap import Output
from gcfed.federated.parts.client import ClientPart, Prepared
from gcfed.federated.parts.method import Method
from gcfed.federated.parts.part import Accumulator, Aggregator, Fact, Need, Order, Part, Setup
from gcfed.federated.parts.server import ServerPart
from gcfed.federated.protocol.messages import Download, Levels, Params, Upload
from gcfed.federated.protocol.rounds import Received, Round
from gcfed.federated.state.client_states import ClientStates, EditedState, KeptState, like_trained
from gcfed.tasks import Batch

__all__ = [
    "Accumulator",
    "Aggregator",
    "Batch",
    "ClientPart",
    "ClientStack",
    "ClientStates",
    "Download",
    "EditedState",
    "Fact",
    "KeptState",
    "Levels",
    "Method",
    "Need",
    "Order",
    "Output",
    "Params",
    "Part",
    "Prepared",
    "Received",
    "Round",
    "ServerPart",
    "Setup",
    "Upload",
    "client_norms",
    "inner_products",
    "like_trained",
    "per_client",
]
