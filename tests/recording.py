"""Records what a metric should see: the broadcast and the local models of each round."""

from harness import sgd, train_rounds

from gcfed.federated.parts import ClientPart

EXACT = {"rel": 1e-9, "abs": 1e-12}
NAN_CLIENT = 3


class Recorder(ClientPart):
    """Keeps, for each round, every client's own weights and the broadcast, as
    NumPy arrays by name.
    """

    def __init__(self, poisoned=False):
        self.rounds = []
        self.poisoned = poisoned

    def on_download(self, download):
        self.rounds.append(
            ({name: t.numpy().copy() for name, t in download.broadcast_model.items()}, {})
        )

    def prepare(self, stack, own, download):
        if self.poisoned and NAN_CLIENT in stack.clients:
            next(iter(stack.full.values()))[stack.clients.tolist().index(NAN_CLIENT)] = float("nan")

    def on_clients_end(self, stack, download):
        for row, client in enumerate(stack.clients.tolist()):
            self.rounds[-1][1][client] = {
                name: t[row].numpy().copy() for name, t in stack.full.items()
            }


def of_metric(row):
    """The columns that a metric added to a row."""
    return {
        key: value
        for key, value in row.items()
        if key.split("/")[0] not in ("round", "train", "comm", "time")
    }


def measured(metric, net, data, *, poisoned=False, methods=(), **run):
    """Runs a metric, with other methods. Returns rows, each round's models, the final weights."""
    recorder = Recorder(poisoned)
    rows = []
    settings = {"solver": sgd(), "rounds": 3} | run
    trained = train_rounds(
        net,
        data,
        methods=[*methods, recorder, metric],
        on_round=lambda _, row: rows.append(of_metric(row)),
        **settings,
    )
    return rows, recorder.rounds, trained
