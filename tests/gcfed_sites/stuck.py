"""A client part that does not end at site-2."""

import time
from pathlib import Path

from gcfed.federated.parts import ClientPart


class Stuck(ClientPart):
    def on_download(self, download):
        if download.round_index == 1 and "site-2" in Path.cwd().parts:
            time.sleep(600.0)
