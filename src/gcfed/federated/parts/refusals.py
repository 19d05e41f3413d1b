"""Errors before the first round: parts that cannot work together, and hooks that
are never called.
"""

from __future__ import annotations

import difflib
from functools import cache

from lightning.pytorch import Callback

from gcfed.data.sampling import Buffered
from gcfed.federated.parts import FACTS, ClientPart, Order, Part, ServerPart, Setup

# hooks of one side only
LIGHTNING_HOOKS = {"on_after_backward": ClientPart, "on_before_optimizer_step": ServerPart}


@cache
def check_hooks(cls: type[Part], title: str) -> None:
    """Raises ValueError for a hook that is never called, because it is misspelt or belongs to the
    other side.
    """
    sides = [side for side in (ClientPart, ServerPart) if issubclass(cls, side)]
    called = {name for side in sides for name in dir(side)}
    called -= {name for name, side in LIGHTNING_HOOKS.items() if not issubclass(cls, side)}
    own = [
        name
        for name in dir(cls)
        if getattr(cls, name) is not getattr(Callback, name, None) and name[0] != "_"
    ]
    for name in [name for name in own if name not in called] if sides else ():
        alike = [hook for hook in called if hook.startswith("on_") == name.startswith("on_")]
        near = difflib.get_close_matches(name, alike, 1, 0.85)
        others = hasattr(ClientPart, name) or hasattr(ServerPart, name)
        if others or name.startswith(("on_", "before_", "after_")):
            way = (
                "; the other side has." if others else f": did you mean {near[0]}?" if near else "."
            )
            raise ValueError(
                f"{title}.{name} is never called: a {sides[0].__name__} has no such hook{way}"
            )
        if near and not any(
            name in vars(base) for base in cls.__mro__ if base.__module__.startswith("gcfed.")
        ):
            raise ValueError(
                f"{title}.{name}: did you mean {near[0]}? If not, give it another name."
            )


def validate_parts(setup: Setup) -> None:
    """Raises ValueError for parts that cannot work together, with the config key and the reason."""
    kept = [part.state_key for part in setup.parts if isinstance(part, ServerPart)]
    if twice := [part.title for part in setup.parts if kept.count(part.state_key) > 1]:
        raise ValueError(
            f"methods: {' and '.join(twice)} would keep their state in one place. Keep one of them."
        )
    keepers: dict[str, Part] = {}
    for part in setup.parts:
        for name in part.keeps:
            if (other := keepers.setdefault(name, part)) is not part:
                raise ValueError(
                    f"methods: {other.title} and {part.title} both keep {name!r}: rename it in"
                    " keeps."
                )
    for fact in ("corrects drift", "moves the start", "edits the mean"):
        if (
            len(titles := dict.fromkeys(part.title for part in setup.parts if fact in part.facts))
            > 1
        ):
            raise ValueError(f"methods: each of {' and '.join(titles)} {fact}: keep one.")
    movers = [
        p
        for p in setup.parts
        if isinstance(p, ClientPart) and p.overrides("before_step", "after_step")
    ]
    if len(movers) > 1:
        raise ValueError(
            f"methods: {movers[0].title} and {movers[1].title} both move the weights of a step:"
            " keep one."
        )
    if isinstance(setup.sampler, Buffered):
        _refuse_late_clients(setup)
    for part in setup.parts:
        if unknown := sorted(part.facts - FACTS.keys()):
            raise ValueError(f"{part.title}.facts: {unknown[0]!r} is none of {', '.join(FACTS)}.")
        if setup.transport.remote and (does := {"sees the cohort", "rehearses"} & part.facts):
            only = "which works in simulations only (federation=none)"
            raise ValueError(f"{part.title} {does.pop()}, {only}: leave it out.")
        if part in movers and part.order is not Order.MOVES_WEIGHTS:
            hook = part.overrides("before_step", "after_step")[0]
            raise ValueError(
                f"{part.title}.{hook} is called only with order = Order.MOVES_WEIGHTS."
            )
        check_hooks(type(part), part.title)  # type: ignore[arg-type]
        part.meet(setup)


def _refuse_late_clients(setup: Setup) -> None:
    """Raises ValueError for parts that cannot use the answers of late clients."""
    if setup.transport.remote:
        raise ValueError("participation=buffered is simulated: set federation=none.")
    if setup.cohort < setup.sampler.per_round:
        raise ValueError(
            "participation.faults.extra does not combine with participation=buffered: raise"
            " participation.sampler.concurrency instead."
        )
    rate_decays = setup.solver.lr(0) != setup.solver.lr(1)
    one_round = {"one round's messages", "sees the cohort", "rehearses"}
    for part in setup.parts:
        hears = isinstance(part, ClientPart) and part.overrides("hear")
        if hears or one_round & part.facts:
            raise ValueError(
                f"{part.title} does not combine with participation=buffered: its messages belong to"
                " one round, and clients are late."
            )
        if "one rate" in part.facts and rate_decays:
            raise ValueError(
                f"{part.title} does not combine with participation=buffered and"
                " client.lr_decay or client.lr_cosine:"
                " late clients have an earlier rate."
            )
