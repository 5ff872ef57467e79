"""Module that the fork server imports at its start (`fork_server.py`).

It imports vLLM and patches it, so that forked processes need not. It starts no thread and no CUDA
context: neither would survive the fork.
"""

from vllm.platforms import current_platform
from vllm.utils.system_utils import set_process_title
from vllm.v1.engine import core, core_client  # noqa: F401
from vllm.v1.executor import multiproc_executor  # noqa: F401

from actors.upstream import vllm_forced_tokens  # noqa: F401
from actors.upstream.vllm_processes.busy_wait import shorten_busy_wait
from actors.upstream.vllm_processes.fork_server import stay_with_this_server, use_fork_server
from connectors.vllm_hma import connector  # noqa: F401

if current_platform.is_cpu():
    from actors.upstream.cpu_build import vllm_cpu_worker  # noqa: F401

use_fork_server()
shorten_busy_wait()
stay_with_this_server()
# Set the title here: setproctitle must locate the title's memory before the environment changes,
# which happens after a fork.
set_process_title("ForkServer")
