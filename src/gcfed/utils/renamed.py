"""Attributes and modules of earlier versions."""

from __future__ import annotations

from typing import Final, Self

from gcfed.utils.refusal import Refusal

#: Classes of a module that was divided: the earlier name → the name of today.
CLASSES = {
    "gcfed.data.sampling.Buffered": "gcfed.participation.buffered.Buffered",
    "gcfed.data.sampling.ClientRecord": "gcfed.participation.schedule.ClientRecord",
}
#: Modules that have another name now.
MODULES = {
    "gcfed.data.buffered": "gcfed.participation.buffered",
    "gcfed.data.clock": "gcfed.participation.clock",
    "gcfed.data.faults": "gcfed.participation.faults",
    "gcfed.data.sampling": "gcfed.participation.sampling",
    "gcfed.data.schedule": "gcfed.participation.schedule",
}

#: Attributes of users' own parts in earlier versions → their names.
EARLIER_ATTRIBUTES: Final = {"graphable": "recordable"}


def refuse_earlier_attributes(owner: object) -> None:
    """Raises Refusal if an object of the user's own has an attribute that has another name now."""
    for earlier_name, name_now in EARLIER_ATTRIBUTES.items():
        if hasattr(owner, earlier_name):
            name = f"{type(owner).__name__}.{earlier_name}"
            raise Refusal(f"{name} is never read: it is now {name_now}.")


def name_today(target: str) -> str | None:
    """Today's name of a class of an earlier version; None for any other name."""
    if target in CLASSES:
        return CLASSES[target]
    module, _, name = target.rpartition(".")
    return f"{MODULES[module]}.{name}" if module in MODULES else None


class Renamed:
    """Stands in a class for an attribute that has another name now.

    A read or an assignment of the earlier name raises Refusal with the name of today::

        class Download:
            model = Renamed("broadcast_model")
    """

    def __init__(self, name_now: str) -> None:
        self.name_now = name_now

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner.__name__
        self.earlier_name = name

    def __get__(self, instance: object, owner: type) -> Self:
        if instance is None:  # a look at the class
            return self
        raise self._refusal()

    def __set__(self, instance: object, value: object) -> None:
        raise self._refusal()

    def _refusal(self) -> Refusal:
        owner = self.owner
        return Refusal(f"{owner}.{self.earlier_name} is now {owner}.{self.name_now}.")
