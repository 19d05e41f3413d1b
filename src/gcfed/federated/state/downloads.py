"""The downloads that late clients still have, in files of the clients' stores."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch

from gcfed.federated.protocol.messages import Download
from gcfed.federated.protocol.packing import pack, unpack_download
from gcfed.federated.protocol.rounds import Round
from gcfed.federated.state.store import ClientStores
from gcfed.federated.state.versioned_files import SENT


def keep_download(
    stores: ClientStores, download: Download, used_now: Set[int], used_later: Set[int]
) -> None:
    """Keeps a round's download if a client answers it in a later round. Deletes the others.

    Args:
        used_now, used_later: the versions whose answers this round uses, and later ones may.
    """
    stores.forget(SENT, used_now | used_later)
    if download.round_index in used_later:
        # Bytes, because parts may edit its tensors in place later.
        stores.put(SENT, download.round_index, pack(vars(download)))


def kept_download(
    stores: ClientStores, version: int, round: Round, device: torch.device
) -> Download:
    """The download of an earlier round, for clients that answer it in this round."""
    download = unpack_download(stores.get(SENT, version)).to(device)
    # Tables with a row per client, and measurements, belong to the round that uses the answers.
    return replace(download, cohort=round.cohort, used=round.index)
