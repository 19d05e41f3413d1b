"""Clients' states that lie at sites: a site keeps the files, the server decides which version of each counts."""

from __future__ import annotations

from collections.abc import Sequence

from gcfed.federated.client_store import ClientStore

NONE = -1  # the version of a client that has no state


class Index(ClientStore):
    """At the server: the versions that count. The files lie at the sites."""

    def references(self, clients: Sequence[int]) -> list[list[int]]:
        """For each client the version that counts, and after it all that checkpoints need."""
        kept: dict[int, list[int]] = {client: [self._version.get(client, NONE)] for client in clients}
        for versions in (self._last, self._before):
            for client in kept.keys() & versions.keys():
                kept[client].append(versions[client])
        return list(kept.values())

    def note(self, clients: Sequence[int], versions: Sequence[int]) -> None:
        """Counts these versions from now on."""
        for client, version in zip(clients, versions, strict=True):
            self._version[client] = version
            if version == NONE:
                del self._version[client]

    def _settle(self) -> None:
        """Does nothing: sites wait for their disks."""


def adopt(store: ClientStore, clients: Sequence[int], references: Sequence[Sequence[int]]) -> None:
    """At a site: goes back to the versions that the server counts, and deletes those that nobody needs any more."""
    for client, kept in zip(clients, references, strict=True):
        for path in store.folder.glob(f"{client}-*.bin"):
            if int(path.stem.split("-")[1]) not in kept:
                path.unlink()
    store.take({client: kept[0] for client, kept in zip(clients, references, strict=True) if kept[0] != NONE})


def written(store: ClientStore, clients: Sequence[int]) -> list[int]:
    """At a site: the versions of these clients, once their files are on the disk."""
    store.state_dict()
    versions = [store.version(client) for client in clients]
    return [NONE if version is None else version for version in versions]
