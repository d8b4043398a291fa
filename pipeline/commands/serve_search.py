"""`drzero serve-search`: the retrieval service alone, until it is interrupted.

    drzero serve-search chroma.path=my/chromadb retrieval.port=8000

The same service, settings and checks as in a run (docs/retrieval.md).
"""

import time
from pathlib import Path

from omegaconf import DictConfig

from ops.services.services import ServiceGroup
from pipeline.stages.services import check_and_resolve, retrieval_spec


def run_serve_search(config: DictConfig) -> None:
    """Serve until interrupted; raises PreflightFailed before the start, ServiceDied if the service ends."""
    config = check_and_resolve(config, "serve_search")
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    with ServiceGroup([retrieval_spec(config)]) as services:
        while True:
            services.check()
            time.sleep(0.5)
