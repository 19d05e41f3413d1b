"""Tables, figures and a page of finished runs: ``python src/report.py 'roots=[logs]' out=logs/report``."""

import os
import sys

import hydra
from omegaconf import DictConfig, OmegaConf

import gcfed.configure  # noqa: F401  (its resolvers, before Hydra composes)


@hydra.main(version_base="1.3", config_path="../configs", config_name="report")
def main(cfg: DictConfig) -> None:
    from gcfed.report.build import Incomplete, report

    try:
        report(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    except (ValueError, FileNotFoundError, Incomplete) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"{error} (HYDRA_FULL_ERROR=1 shows where)")


if __name__ == "__main__":
    main()
