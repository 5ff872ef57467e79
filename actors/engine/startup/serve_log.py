"""Keep Serve's log of an engine replica usable after vLLM has configured logging.

vLLM configures logging with `logging.config.dictConfig`, at its import and at the engine's start
(vllm/logger.py). `dictConfig` closes all handlers of the process, and a closed `MemoryHandler`, as
Serve's, has no target: it keeps all records in memory and writes none. When a Ray head has come
back, Serve's controller asks each replica for its log file, and ends a replica whose handler has no
target (`get_component_logger_file_path` in ray/serve/_private/logging_utils.py).
"""

import logging
from logging.handlers import MemoryHandler


def keep_serve_log() -> None:
    """Make `close` of Serve's log handlers only write their records; call it before vLLM's import.

    A file that `dictConfig` has closed opens again with the next record.
    """
    for handler in logging.getLogger("ray.serve").handlers:
        if isinstance(handler, MemoryHandler):
            handler.close = handler.flush  # type: ignore[method-assign]
