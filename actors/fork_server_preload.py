"""What the fork server of an engine without a GPU imports before it forks (`fork_server.py`).

Imports only: a thread or a CUDA context that started here would not survive the fork.
"""

from vllm.v1.engine import core, core_client  # noqa: F401
from vllm.v1.executor import multiproc_executor  # noqa: F401
from vllm.v1.worker import cpu_worker  # noqa: F401

import actors.cpu_worker
import actors.forced_tokens
import connectors.vllm_hma.connector  # noqa: F401
from actors.fork_server import use_fork_server

use_fork_server()
