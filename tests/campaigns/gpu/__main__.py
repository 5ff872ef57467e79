"""The campaign ``gpu-check`` as a module: ``python -m tests.campaigns.gpu ON=cpu``.

Bundles for GPU machines without network import the checks by this name.
"""

from __future__ import annotations

import sys

from tests.campaigns.gpu.campaign import CONFORMANCE, ENGINES, STEPS, gpu_check, run
from tests.campaigns.runner import run as run_campaign

__all__ = ["CONFORMANCE", "ENGINES", "STEPS", "run"]

if __name__ == "__main__":
    sys.exit(run_campaign("gpu-check", gpu_check, sys.argv[1:]))
