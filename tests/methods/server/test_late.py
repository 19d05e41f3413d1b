"""Clients on a simulated clock: schedules, late updates, what is refused, and checkpoints."""

import heapq
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from harness import (
    ALGORITHMS,
    FEW_INNER_STEPS,
    LATE,
    assert_near,
    final_weights,
    make_net,
    random_federation,
    sgd,
    train_rounds,
    weights,
)
from plain_reference import batches, local_sgd

from gcfed.federated.parts import ClientPart
from gcfed.federated.state.store import ClientStores
from gcfed.methods.personal.tensors import Personal
from gcfed.methods.server.fedvarp import FedVARP
from gcfed.methods.server.staleness import FedAsync, FedBuff
from gcfed.participation.buffered import Buffered
from gcfed.participation.clock import Clock
from gcfed.participation.faults import Faults
from gcfed.participation.sampling import Oort, PowerOfChoice, UniformSampler
from gcfed.participation.schedule import ClientRecord
from gcfed.run import train
from gcfed.utils.rng import generator


@pytest.fixture
def trained(config, tmp_path):
    """Trains by overrides.

    Returns the global model's tensors, and the rows without times of this machine.
    """
    runs = []

    def run(*overrides):
        runs.append(overrides)
        done = train(
            config("data=digits", "logger=csv", *overrides, folder=tmp_path / str(len(runs))),
            quiet=True,
        )
        return final_weights(done), done.frame.loc[:, lambda f: ~f.columns.str.startswith("time/")]

    return run


# The algorithms whose messages belong to one round.
REFUSED = {"fedsub", "ssf", "fedcurv"}
LIMITS = sorted({*ALGORITHMS} - REFUSED - {*LATE})


def timetable(sampler, faults=None, steps=range(1, 7), seed=1, **clock):
    """The schedule of clients with these numbers of steps."""
    planned = np.array(steps)
    return sampler.schedule(
        faults or Faults(),
        Clock(**clock),
        len(planned),
        seed,
        planned.__getitem__,
        np.ones_like,
    )


#: Six clients need 1 to 6 seconds.
schedule = partial(timetable, step=1.0, jitter=0.0)


def test_six_clients_answer_in_the_order_of_their_speeds():
    """All six begin at once.

    Computed by hand: at 4 s three answer, and the third counts in the next step.
    """
    queue = schedule(Buffered(2, concurrency=6))
    found = [queue.turn(t) for t in range(4)]
    assert [turn.clients.tolist() for turn in found] == [[0, 1], [0, 2], [1, 3], [0, 4]]
    assert [turn.versions.tolist() for turn in found] == [[0, 0], [1, 0], [1, 0], [2, 0]]
    assert [(turn.seconds, turn.num_asked, turn.num_lost) for turn in found] == [
        (2, 6, 0),
        (3, 2, 0),
        (4, 2, 0),
        (5, 2, 0),
    ]
    assert queue.versions_in_use(4) == {0, 2, 3}


@pytest.mark.parametrize(
    ("faults", "seconds", "cohort"),
    [
        (Faults(), 6.0, [0, 1, 2, 3, 4, 5]),
        (Faults(extra=2), 4.0, [0, 1, 2, 3]),
        (Faults(deadline=3), 3.0, range(6)),
    ],
)
def test_a_synchronous_round_ends_with_the_last_client_that_counts(faults, seconds, cohort):
    rounds = schedule(UniformSampler(6), faults)
    turns = [rounds.turn(t) for t in range(3)]
    assert [turn.seconds for turn in turns] == [seconds, 2 * seconds, 3 * seconds]
    assert all(turn.clients.tolist() == [*cohort] for turn in turns)


def test_the_server_steps_with_fewer_uploads_if_no_other_client_can_answer():
    """Three clients, each of them asked once per version. Lost ones get the next version."""
    queue = timetable(Buffered(3, concurrency=3), Faults(dropout=0.5), [1] * 3)
    turns = [queue.turn(t) for t in range(40)]
    assert {len(turn.clients) for turn in turns} == {0, 1, 2, 3}
    assert all(turn.num_asked == 3 == len(turn.clients) + turn.num_lost for turn in turns)


def test_uploads_beyond_the_bound_of_staleness_are_lost():
    """Client 5 is six times as slow as client 0, so its first upload would be 4 steps late."""
    bounded = schedule(Buffered(1, concurrency=6, max_staleness=2))
    turns = [bounded.turn(t) for t in range(30)]
    free = schedule(Buffered(1, concurrency=6))
    others = [free.turn(t) for t in range(30)]
    assert max(t - turn.versions.max() for t, turn in enumerate(others)) > 2
    assert max(t - turn.versions.max() for t, turn in enumerate(turns)) == 2
    assert sum(turn.num_lost for turn in turns) > 0 == sum(turn.num_lost for turn in others)


def test_uploads_that_come_too_late_are_told_from_clients_that_never_answer():
    """Of two clients that are lost, one may have sent its upload, which costs bytes."""

    def lost(faults):
        queue = schedule(Buffered(1, concurrency=6, max_staleness=2), faults)
        turns = [queue.turn(t) for t in range(60)]
        return sum(turn.num_lost for turn in turns), sum(turn.num_too_late for turn in turns)

    num_lost, num_too_late = lost(Faults())
    assert num_lost == num_too_late > 0
    num_lost, num_too_late = lost(Faults(dropout=0.3))
    assert num_lost > num_too_late > 0


def test_bytes_of_uploads_that_come_too_late_are_counted(trained):
    """No client drops out, so each that is lost has sent its upload."""
    _, rows = trained(
        "algorithm=fedbuff",
        "participation.per_round=2",
        "participation.sampler.concurrency=12",
        "participation.sampler.max_staleness=1",
        "participation.clock.spread=1.0",
        "data.limit_train=300",
        "model.hidden=[8]",
        "client.epochs=1",
        "rounds=12",
    )
    of_one = 4 * (64 * 8 + 8 + 8 * 10 + 10)
    assert rows["late/lost"].sum() > 0
    sent = rows["train/clients"] + rows["late/lost"]
    assert (rows["comm/up_bytes"] == of_one * sent).all()


def test_a_version_is_in_use_while_an_answer_to_it_may_be_used():
    """Not of a client that will never answer, nor of one whose answer will be too late."""
    rule = Buffered(2, concurrency=6, max_staleness=3)
    queue = schedule(rule, Faults(dropout=0.4), spread=1.0)
    dropped = late = 0
    for t in range(80):
        queue.turn(t)
        for answer in queue.busy:
            is_late = t + 1 - answer.version > 3
            dropped += not answer.comes
            late += is_late
        useful = [a for a in queue.busy if a.comes and t + 1 - a.version <= 3]
        assert queue.versions_in_use(t + 1) == {answer.version for answer in useful}
    assert dropped > 0 < late


def test_messages_take_time():
    """One step of a second and 1,500 bytes at a millisecond each."""
    rounds = schedule(UniformSampler(6), steps=[1] * 6, byte=1e-3)
    rounds.download_bytes = 1000.0
    rounds.upload_bytes = 500.0
    assert [rounds.turn(t).seconds for t in range(2)] == [2.5, 5.0]


def test_factors_of_real_devices_come_from_a_file(tmp_path):
    np.save(tmp_path / "devices.npy", np.array([1.0, 10.0]))
    rounds = schedule(UniformSampler(6), steps=[1] * 6, trace=str(tmp_path / "devices.npy"))
    _, seconds = rounds.ask(np.arange(6), 0)
    assert {*seconds.tolist()} == {1.0, 10.0}
    assert rounds.ask(np.arange(6), 7)[1].tolist() == seconds.tolist()  # they last


@pytest.mark.parametrize(
    "factors", [np.array([]), np.array([1.0, 0.0]), np.array([np.inf]), np.array([{}]), None]
)
def test_a_trace_that_is_no_list_of_factors_is_refused(factors, tmp_path):
    if factors is not None:
        np.save(tmp_path / "devices.npy", factors, allow_pickle=True)
    with pytest.raises(ValueError, match=r"trace=.*devices.npy"):
        Clock(trace=str(tmp_path / "devices.npy"))


def test_clients_are_asked_in_their_part_of_the_day():
    """A client's window lasts 0.3 of a day of 100 s, and begins at a time of its own."""
    begins = (1 - generator(3, "phase").random(40)) * 100
    for sampler in (UniformSampler(4), Buffered(4, concurrency=8)):
        rounds = schedule(sampler, steps=[1] * 40, seed=3, available=0.3, day=100.0)
        seen = set()
        for t in range(300):
            turn = rounds.turn(t)
            assert len(turn.clients) == 4
            asked_at = turn.seconds - 1.0  # a step takes a second
            of_day = (asked_at - begins[turn.clients]) % 100
            fresh = turn.versions == t
            # Those of an older version were asked before.
            assert ((of_day < 30.001) | (of_day > 99.99) | ~fresh).all()
            seen |= {*turn.clients.tolist()}
        assert len(seen) == 40


def test_a_population_that_is_never_awake_together_is_refused():
    for_one = Clock(step=1.0, available=1e-10)
    with pytest.raises(ValueError, match=r"participation.clock.available=1e-10: at most 0"):
        for_one.require_enough(10, 1, seed=1)
    rounds = timetable(UniformSampler(5), steps=[1] * 10, step=1.0, available=0.01)
    with pytest.raises(ValueError, match=r"participation.clock.available=0.01: at most"):
        rounds.validate()


def test_power_of_choice_takes_unseen_clients_and_then_the_largest_losses():
    sampler = PowerOfChoice(2, pool=6)
    known = {client: ClientRecord(float(client), 0, 1, 0.0) for client in range(6)}
    assert sampler.choose(1, 6, 1, known).tolist() == [4, 5]
    del known[0], known[3]
    assert sampler.choose(1, 6, 1, known).tolist() == [0, 3]
    smaller = PowerOfChoice(2, pool=3)
    pool = generator(9, "cohort", 4).choice(6, 3, replace=False)
    known = {client: ClientRecord(float(client), 0, 1, 0.0) for client in range(6)}
    assert smaller.choose(4, 6, 9, known).tolist() == sorted(pool.tolist())[1:]


def test_oort_prefers_large_losses_many_samples_and_fast_devices():
    """Computed by hand: √n · loss + √(0.1 ln(t + 1) / (last + 1)), and T/t squared if slow."""
    sampler = Oort(2, explore=0.0, explore_least=0.0, preferred=10.0, cutoff=0.999)
    assert sampler.utility(ClientRecord(2.0, 4, 9, 5.0), 9) == pytest.approx(
        6.0 + (0.1 * np.log(10) / 5) ** 0.5
    )
    assert sampler.utility(ClientRecord(2.0, 0, 9, 20.0), 0) == pytest.approx(6.0 / 4)
    known = {
        0: ClientRecord(1.0, 0, 4, 1.0),  # 2
        1: ClientRecord(1.0, 0, 100, 100.0),  # 10, a hundredth of it
        2: ClientRecord(3.0, 0, 1, 1.0),  # 3
        3: ClientRecord(0.1, 0, 1, 1.0),
    }
    assert sampler.choose(0, 5, 1, known).tolist() == [0, 2]
    curious = Oort(2, explore=0.5, explore_least=0.5)
    assert 4 in curious.choose(0, 5, 1, known)
    assert curious.choose(0, 5, 1, {}).tolist() == sorted({*curious.choose(0, 5, 1, {}).tolist()})


def test_oort_draws_also_if_losses_are_below_zero():
    """A user's loss, such as a Gaussian likelihood, may be negative."""
    known = {client: ClientRecord(-1.0 - client / 100, 0, 1, 0.0) for client in range(5)}
    sampler = Oort(5, explore=0.0, explore_least=0.0)
    assert sampler.choose(0, 5, 1, known).tolist() == [0, 1, 2, 3, 4]


def test_a_client_that_did_not_count_stays_unseen():
    """Client 2 sends a NaN in each round; its loss is unknown, and not 0."""

    class Breaks(ClientPart):
        def on_clients_end(self, stack, download):
            for row, client in enumerate(stack.clients.tolist()):
                if client == 2:
                    stack.full["0.weight"][row] = float("nan")

    learned = []

    class Listens(PowerOfChoice):
        def choose(self, round, num_clients, seed, known):
            learned.append(dict(known))
            return super().choose(round, num_clients, seed, known)

    train_rounds(
        make_net(),
        random_federation((7, 12, 5, 9)),
        sgd(),
        rounds=4,
        methods=[Breaks()],
        sampler=Listens(2, pool=4),
    )
    assert 2 not in learned[-1]
    assert len(learned[-1]) >= 2
    assert all(trained.loss > 0 for trained in learned[-1].values())


def test_a_clients_duration_is_that_of_its_turn():
    """Later messages have another size."""
    rounds = schedule(PowerOfChoice(2, pool=6), steps=[1] * 6, byte=1e-3)
    rounds.download_bytes = rounds.upload_bytes = 1000.0
    turn = rounds.turn(0)
    rounds.download_bytes = 2000.0
    rounds.learn(dict.fromkeys(turn.clients.tolist(), 1.0), 0)
    assert {trained.seconds for trained in rounds.known.values()} == {3.0}


@pytest.mark.parametrize("participation", ["power_of_choice", "oort"])
def test_losses_choose_the_same_clients_with_two_processes_and_after_a_kill(
    participation, trained, tmp_path
):
    words = [f"participation={participation}", "client.steps=3", "client.epochs=null"]
    words += ["participation.num_clients=30", "participation.clock.step=1.0"]
    whole, rows = trained(*words, "rounds=6", "trainer.devices=1")
    shared, others = trained(*words, "rounds=6", "trainer.devices=2")
    assert torch.equal(whole, shared)
    assert rows["clock/seconds"].equals(others["clock/seconds"])
    trained(*words, "rounds=3")
    checkpoint = f"ckpt_path={tmp_path}/3/checkpoints/last.ckpt"
    (tmp_path / "3").rename(tmp_path / "4")
    resumed, _ = trained(*words, "rounds=6", checkpoint.replace("/3/", "/4/"))
    assert torch.equal(whole, resumed)
    uniform, _ = trained(*words, "rounds=6", "participation=uniform")
    assert not torch.equal(whole, uniform)


def test_no_client_has_a_version_twice_and_places_are_full():
    steps = [1 + k % 5 for k in range(20)]
    queue = timetable(Buffered(3, concurrency=8), Faults(dropout=0.3), steps, seed=3, spread=1.0)
    seen = []
    for t in range(60):
        turn = queue.turn(t)
        seen += zip(turn.clients.tolist(), turn.versions.tolist(), strict=True)
        assert len(turn.clients) == 3
        assert (turn.versions <= t).all()
        assert len(queue.busy) + 3 + turn.num_lost >= 8
    assert len({*seen}) == len(seen)
    assert all(a <= b for a, b in pairwise([queue.turn(60).seconds, queue.turn(61).seconds]))


def test_a_schedule_goes_on_from_its_state():
    def make():
        rule = Buffered(2, concurrency=5)
        return timetable(rule, Faults(dropout=0.2), range(1, 10), spread=1.0)

    whole = make()
    first = make()
    second = make()
    turns = [whole.turn(t) for t in range(20)]
    for t in range(9):
        first.turn(t)
    second.load_state_dict(first.state_dict())
    for t in range(9, 20):
        turn = second.turn(t)
        assert turn.clients.tolist() == turns[t].clients.tolist()
        assert turn.versions.tolist() == turns[t].versions.tolist()
        assert turn[2:] == turns[t][2:]


def eager(rule, data, solver, rounds, seed=5, per_round=3, concurrency=4):
    """The ordinary way: clients train when they are asked, and their updates wait."""
    net = make_net()
    w = weights(net)
    heap = []
    buffer = []
    asked = 0
    now = 0.0
    t = 0
    cache = {}
    mean = torch.zeros_like(w)
    while t < rounds:
        taken = {event[2] for event in heap} | {client for client, *_ in buffer}
        idle = [k for k in range(data.num_clients) if k not in taken]
        if free := min(concurrency - len(heap), len(idle)):
            places = generator(seed, "cohort", asked).choice(
                len(idle), free, replace=False, shuffle=False
            )
            for k in (idle[i] for i in sorted(places)):
                end, count = local_sgd(net, w, batches(data, solver, k, t), lr=0.1)
                draw = generator(seed, "fault", t, k)
                draw.random()
                speed = np.exp(0.7 * generator(seed, "device", k).normal()) * draw.exponential()
                heapq.heappush(heap, (now + (0.5 + 2 * count) * speed, asked, k, t, w, end))
            asked += 1
        now, _, k, *sent = heapq.heappop(heap)
        buffer.append((k, *sent))
        if len(buffer) < per_round:
            continue
        if rule == "fedbuff":
            w = (
                w
                + sum((1 + t - v) ** -0.5 * (end - start) for _, v, start, end in buffer)
                / per_round
            )
        elif rule == "hinge":
            late = [0.6 if t - v <= 1 else 0.6 / (10 * (t - v - 1) + 1) for _, v, *_ in buffer]
            w = (
                sum((1 - a) * w + a * end for a, (*_, end) in zip(late, buffer, strict=True))
                / per_round
            )
        else:
            w = (
                w
                + mean
                + sum(end - start - cache.get(k, 0.0) for k, _, start, end in buffer) / per_round
            )
            cache |= {k: end - start for k, _, start, end in buffer}
            mean = sum(cache.values()) / data.num_clients
        t = t + 1
        buffer = []
    return w


@pytest.mark.parametrize("rule", ["fedbuff", "hinge", "cached"])
@pytest.mark.parametrize("world", [1, 2])
def test_late_clients_equal_eager_ones(rule, world):
    data = random_federation((7, 12, 5, 9, 1, 6, 8, 3, 10))
    solver = sgd()
    method = {"fedbuff": FedBuff(), "hinge": FedAsync(0.6, "hinge", 10.0, 1), "cached": FedVARP()}[
        rule
    ]
    late = []
    found = train_rounds(
        make_net(),
        data,
        solver,
        rounds=9,
        methods=[method],
        sampler=Buffered(3, concurrency=4),
        world=world,
        clock=Clock(step=2.0, fixed=0.5, spread=0.7),
        on_round=lambda round, row: late.append(row["late/max"]),
    )
    assert_near(found, eager(rule, data, solver, 9), 1e-13)
    assert world > 1 or max(late) > 1


@pytest.mark.parametrize("side", ["head", "body"])
def test_fedasync_mixes_only_the_tensors_that_clients_send(side):
    """Without delays its step is FedBuff's with the server's rate as weight. With delays the
    tensors that stay on the clients do not move.
    """
    data = random_federation((7, 12, 5, 9))
    net = make_net()
    is_sent = []  # of each entry
    for name, parameter in net.named_parameters():
        is_head = name.startswith("2.")
        is_sent += [is_head == (side == "body")] * parameter.numel()

    def trained(method, concurrency, server_lr=1.0):
        return train_rounds(
            make_net(),
            data,
            rounds=6,
            methods=[method, Personal(side, ["2"])],
            sampler=Buffered(1, concurrency=concurrency),
            server=partial(torch.optim.SGD, lr=server_lr),
        )

    asynchronous = FedAsync(0.25, "constant")
    assert_near(trained(asynchronous, 1), trained(FedBuff("constant"), 1, 0.25), 1e-14)
    delayed = trained(asynchronous, 3)
    assert (delayed != weights(net)).tolist() == is_sent


def test_a_loop_that_nobody_has_bound_continues_the_timetable_of_a_checkpoint(tmp_path):
    """Lightning loads a checkpoint before ``on_fit_start``. The timetable must be there by then."""

    def seconds(rounds, name, **checkpoint):
        found = []
        end = train_rounds(
            make_net(),
            random_federation((5,) * 12),
            sgd(),
            rounds=rounds,
            sampler=Buffered(2, concurrency=6),
            stores=ClientStores(tmp_path / name),
            clock=Clock(spread=1.0),
            on_round=lambda round, row: found.append(row["clock/seconds"]),
            **checkpoint,
        )
        return end, found

    whole, times = seconds(6, "whole")
    _, first = seconds(3, "parts", saved_to=tmp_path / "a.ckpt")
    resumed, rest = seconds(6, "parts", ckpt_path=tmp_path / "a.ckpt")
    assert first + rest == times
    assert torch.equal(resumed, whole)


def test_a_step_without_uploads_has_no_lateness():
    """Its clients drop out. A lateness of 0 would lower the mean over the rounds."""
    rows = []
    train_rounds(
        make_net(),
        random_federation((5,) * 3),
        sgd(),
        rounds=12,
        sampler=Buffered(1, concurrency=1),
        faults=Faults(dropout=0.8),
        on_round=lambda round, row: rows.append(row),
    )
    assert {row["train/clients"] for row in rows} == {0, 1}
    for row in rows:
        has_uploads = row["train/clients"] > 0
        assert ("late/mean" in row) == ("late/max" in row) == has_uploads
        assert "late/lost" in row


@pytest.mark.parametrize("faults", [Faults(), Faults(dropout=0.5)])
def test_versions_that_nobody_has_are_deleted(tmp_path, faults):
    stores = ClientStores(tmp_path)
    alive = []
    train_rounds(
        make_net(),
        random_federation((5,) * 12),
        sgd(),
        rounds=20,
        sampler=Buffered(2, concurrency=6),
        stores=stores,
        faults=faults,
        clock=Clock(spread=1.0),
        on_round=lambda round, row: alive.append(len([*tmp_path.glob("sent/*/*.bin")])),
    )
    assert 0 < max(alive) <= 6 + 2


@pytest.mark.parametrize("algorithm", LIMITS)
def test_equal_clients_make_synchronous_rounds(algorithm, trained):
    """Buffer, concurrency and cohort are equal, and so are all clients' times."""
    few = [
        *FEW_INNER_STEPS.get(algorithm, []),
        f"algorithm={algorithm}",
        "client.epochs=null",
        "client.steps=4",
    ]
    few += ["rounds=3", "eval_every=3", "data.limit_train=300", "model.hidden=[8]"]
    equal = [
        "participation=buffered",
        "participation.sampler.concurrency=5",
        "participation.clock.jitter=0.0",
    ]
    a, rows = trained(*few)
    b, others = trained(*few, *equal)
    assert torch.equal(a, b)
    assert {*others.columns} - {*rows.columns} == {
        "clock/seconds",
        "late/mean",
        "late/max",
        "late/lost",
    }
    assert (others["late/max"] == 0).all()
    assert others[rows.columns].equals(rows)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["privacy=client_dp", "privacy.epsilon=8"], "participation=poisson"),
        (["algorithm=fedsub"], "one round"),
        (["algorithm=ssf"], "one round"),
        (["algorithm=fedcurv"], "one round"),
        (["attack=alie"], "one round"),
        (["metrics=gap"], "one round"),
        (["algorithm=fedcm", "client.lr_decay=0.99"], "earlier rate"),
        (["participation.faults.extra=2"], "concurrency"),
        (["participation.sampler.concurrency=1000"], "num_clients"),
    ],
)
def test_what_cannot_be_late_is_refused(overrides, words, trained):
    with pytest.raises(ValueError, match=words):
        trained("participation=buffered", *overrides)


@pytest.mark.parametrize(
    "chosen",
    [*([f"algorithm={name}"] for name in LATE), ["algorithm=scaffold", "participation=buffered"]],
)
def test_stacks_processes_a_wire_and_a_killed_run_agree(chosen, trained, tmp_path):
    """The contract of all algorithms with late clients, together with GC and lost clients."""
    words = [*chosen, "gc=gcfed", "precision=64-true", "data.limit_train=300"]
    words += ["participation.per_round=3", "participation.sampler.concurrency=6"]
    words += ["participation.clock.spread=1.0", "participation.faults.dropout=0.2"]
    words += ["client.epochs=1", "model.hidden=[8]", "eval_every=6"]
    whole, rows = trained(*words, "rounds=6", "client.stack=1", "trainer.devices=1")
    assert rows["late/max"].max() > 0
    others = [
        trained(*words, "rounds=6", "client.stack=2", "trainer.devices=1"),
        trained(*words, "rounds=6", "trainer.devices=2"),
        trained(*words, "rounds=6", "client.stack=1", "federation=wire", "trainer.devices=1"),
    ]
    trained(*words, "rounds=3", "trainer.devices=1")
    (tmp_path / "5").rename(tmp_path / "6")
    last = f"ckpt_path={tmp_path}/6/checkpoints/last.ckpt"
    others.append(trained(*words, "rounds=6", "trainer.devices=2", last))
    assert torch.equal(others[2][0], whole)  # over the wire, without a stack
    for model, found in others:
        assert_near(model, whole, 1e-9)
        for column in ("clock/seconds", "late/mean", "train/dropped_clients", "comm/down_bytes"):
            assert found[column].equals(rows[column])


def test_measurements_of_late_clients_change_nothing(trained):
    late = [
        "participation=buffered",
        "participation.clock.spread=0.7",
        "client.steps=3",
        "client.epochs=null",
    ]
    late += ["rounds=6"]
    measures = ["metrics=[drift,clients,updates]", "metrics.clients.every=2"]
    plain, _ = trained(*late)
    measured, rows = trained(*late, *measures)
    assert torch.equal(plain, measured)
    assert rows.filter(like="drift/").notna().all(axis=None)


def test_a_forgotten_message_stays_until_there_is_a_newer_checkpoint(tmp_path):
    stores = ClientStores(tmp_path)
    stores.put("sent", 3, b"message")
    stores.state_dict()
    stores.rotate()
    stores.forget("sent", set())
    assert stores.files.path(("sent", 3), 3).read_bytes().startswith(b"message")
    assert stores.rotate() == [stores.files.path(("sent", 3), 3)]


@pytest.mark.parametrize(("words", "warns"), [(["participation.per_round=2"], True), ([], False)])
def test_a_mean_of_several_models_in_fedasync_is_named(config, tmp_path, caplog, words, warns):
    """An experiment's ``participation.per_round`` wins over the algorithm's."""
    train(config("data=digits", "algorithm=fedasync", "rounds=1", *words, folder=tmp_path))
    assert ("FedAsync's paper mixes one model per step" in caplog.text) is warns
