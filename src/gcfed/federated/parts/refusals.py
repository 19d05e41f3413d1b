"""Errors before the first round: parts that cannot work together, and hooks that nobody calls."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache

from lightning.pytorch import Callback

from gcfed.federated.parts import Aggregator, ClientPart, Fact, Order, Part, ServerPart, Setup
from gcfed.participation.buffered import Buffered
from gcfed.utils.near import did_you_mean
from gcfed.utils.ours import is_ours
from gcfed.utils.refusal import Refusal

# hooks of one side only
LIGHTNING_HOOKS = {"on_after_backward": ClientPart, "on_before_optimizer_step": ServerPart}


@cache
def check_hooks(cls: type[Part], title: str) -> None:
    """Raises Refusal for a hook that is never called, because it is misspelt or belongs to the
    other side.
    """
    sides = [side for side in (ClientPart, ServerPart) if issubclass(cls, side)]
    if not sides:
        return
    called = _hooks_called(cls, sides)
    for name in dir(cls):
        is_lightnings = getattr(cls, name) is getattr(Callback, name, None)
        if name.startswith("_") or name in called or is_lightnings:
            continue
        alike = [hook for hook in called if hook.startswith("on_") == name.startswith("on_")]
        near = difflib.get_close_matches(name, alike, 1, 0.85)
        is_of_other_side = hasattr(ClientPart, name) or hasattr(ServerPart, name)
        if is_of_other_side or name.startswith(("on_", "before_", "after_")):
            hint = did_you_mean(near)
            if is_of_other_side:
                other = ClientPart if sides[0] is ServerPart else ServerPart
                hint = f"; it is a hook of {other.__name__}."
            raise Refusal(
                f"{title}.{name} is never called: a {sides[0].__name__} has no such hook{hint}"
            )
        if near and not _is_of_gcfed(cls, name):
            raise Refusal(f"{title}.{name}: did you mean {near[0]}? If not, give it another name.")


def _hooks_called(cls: type[Part], sides: Sequence[type[Part]]) -> set[str]:
    """The names of these sides, without hooks of Lightning that this class does not get."""
    called = {name for side in sides for name in dir(side)}
    for name, side in LIGHTNING_HOOKS.items():
        if not issubclass(cls, side):
            called.discard(name)
    return called


def _is_of_gcfed(cls: type[Part], name: str) -> bool:
    """Whether one of this package's classes has an attribute of this name."""
    return any(name in vars(base) for base in cls.__mro__ if is_ours(base.__module__))


def _check_states(parts: Sequence[Part]) -> None:
    """No two parts may keep a state under one name."""
    keys = [part.state_key for part in parts if isinstance(part, ServerPart)]
    titles = [part.title for part in parts if keys.count(part.state_key) > 1]
    if titles:
        raise Refusal(
            f"methods: {' and '.join(titles)} would keep their state in one place. Keep one of"
            " them."
        )
    keepers: dict[str, Part] = {}
    for part in parts:
        for name in part.keeps:
            other = keepers.setdefault(name, part)
            if other is not part:
                raise Refusal(
                    f"methods: {other.title} and {part.title} both keep {name!r}: rename it in"
                    " keeps."
                )


def _check_facts(parts: Sequence[Part]) -> None:
    """At most one kind of part may have each of these facts."""
    for fact in (Fact.CORRECTS_DRIFT, Fact.MOVES_START, Fact.EDITS_MEAN):
        titles = dict.fromkeys(part.title for part in parts if fact in part.facts)
        if len(titles) > 1:
            raise Refusal(f"methods: each of {' and '.join(titles)} {fact}: keep one.")


def _check_movers(parts: Sequence[Part]) -> None:
    movers = [part for part in parts if _hooks_that_move_weights(part)]
    if len(movers) > 1:
        raise Refusal(
            f"methods: {movers[0].title} and {movers[1].title} both move the weights of a step:"
            " keep one."
        )


def _hooks_that_move_weights(part: Part) -> list[str]:
    if not isinstance(part, ClientPart):
        return []
    return part.overrides("before_step", "after_step")


def _check_part(part: Part, setup: Setup) -> None:
    unknown = sorted(part.facts - set(Fact))
    if unknown:
        raise Refusal(
            f"{part.title}.facts: {unknown[0]!r} is unknown. Choose from {', '.join(Fact)}."
        )
    if setup.transport.remote and Fact.SEES_COHORT in part.facts:
        raise Refusal(
            f"{part.title} {Fact.SEES_COHORT}, which works in simulations only (federation=none):"
            " leave it out."
        )
    if setup.transport.separate_clients and Fact.REHEARSES in part.facts:
        raise Refusal(
            f"metrics: {part.title} rehearses, which works with federation=none only: leave it out."
        )
    hooks = _hooks_that_move_weights(part)
    if hooks and part.order is not Order.MOVES_WEIGHTS:
        raise Refusal(f"{part.title}.{hooks[0]} is called only with order = Order.MOVES_WEIGHTS.")


def check_aggregator(aggregator: object) -> None:
    """Raises Refusal for an object that is no aggregator."""
    name = type(aggregator).__name__
    if not isinstance(aggregator, Aggregator):
        raise Refusal(
            f"aggregator: {name} is no Aggregator: derive it from"
            " gcfed.aggregators.cohort.CohortRule, which has all but the rule, or from"
            " gcfed.federated.parts.Aggregator."
        )


def validate_parts(setup: Setup) -> None:
    """Raises Refusal for parts that cannot work together, with the config key and the reason."""
    setup.aggregator.validate(setup)
    _check_states(setup.parts)
    _check_facts(setup.parts)
    _check_movers(setup.parts)
    if isinstance(setup.sampler, Buffered):
        _refuse_late_clients(setup)
    for part in setup.parts:
        _check_part(part, setup)
        check_hooks(type(part), part.title)  # type: ignore[arg-type]
        part.check_run(setup)


def _refuse_late_clients(setup: Setup) -> None:
    """Raises Refusal for parts that cannot use the answers of late clients."""
    if setup.transport.remote:
        raise Refusal("participation=buffered is simulated: set federation=none.")
    if setup.faults.extra:
        raise Refusal(
            "participation.faults.extra does not combine with participation=buffered: raise"
            " participation.sampler.concurrency instead."
        )
    rate_decays = setup.solver.lr(0) != setup.solver.lr(1)
    one_round = {Fact.ONE_ROUND, Fact.SEES_COHORT, Fact.REHEARSES}
    for part in setup.parts:
        gets_reply = isinstance(part, ClientPart) and part.overrides("on_reply")
        if gets_reply or one_round & part.facts:
            raise Refusal(
                f"{part.title} does not combine with participation=buffered: its messages belong to"
                " one round, and clients are late."
            )
        if Fact.ONE_RATE in part.facts and rate_decays:
            raise Refusal(
                f"{part.title} does not combine with participation=buffered and client.lr_decay or"
                " client.lr_cosine: late clients have an earlier rate."
            )
