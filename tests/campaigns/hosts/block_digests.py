"""Digests of a worker's KV cache by block, for campaigns that look for unexpected writes."""

from __future__ import annotations

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group

from connectors.transport.digest import HostMemory
from connectors.vllm_hma.connector import TandemConnector


class BlockDigests:
    """Mixed into vLLM's workers (``worker_extension_cls``); called by ``collective_rpc``."""

    def block_digests(self) -> list[str]:
        """Return a digest of each block's pages in all layers, by block id."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, TandemConnector)
        layout = connector.worker.runtime.agent_metadata.layout
        memory, found = HostMemory(layout), []
        for block in range(layout.num_blocks):
            stream = memory.new_stream()
            for group in layout.groups:
                for pages in group.layers:
                    stream.feed(np.array([pages.address + block * pages.block_stride_bytes]), pages.last_offset)
            found.append(stream.digest().hex())
        return found
