"""Copies of the private state of the connector's objects, for tests, campaigns and benchmarks.

The product has no such copies: operators see metrics (``counts``).
"""

# ruff: noqa: SLF001

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from connectors.protocol.consumer import Consumer
from connectors.protocol.producer import Producer


def snapshot(of: Any) -> SimpleNamespace:
    if isinstance(of, Producer):
        return _producer(of)
    if isinstance(of, Consumer):
        return _consumer(of)
    return _runtime(of) if hasattr(of, "_progress_thread") else _scheduler(of)


def _producer(of: Producer) -> SimpleNamespace:
    deliveries = [(t.transfer_id, d) for t in of._transfers.values() for d in t.deliveries.values()]
    return SimpleNamespace(
        consumers=dict(of._consumers),
        heard_at=dict(of._heard_at),
        transfers={transfer_id: transfer.stage for transfer_id, transfer in of._transfers.items()},
        remembered=frozenset(of._gone),
        offered_blocks=dict(of._allowance.blocks),
        early=dict(of._allowance.early),
        closed=frozenset((transfer_id, each.peer) for transfer_id, each in deliveries if each.closed),
        offers=frozenset((transfer_id, each.peer) for transfer_id, each in deliveries if each.offer is not None),
        writes=frozenset(of._writes),
        failed={peer: frozenset(transfers) for peer, transfers in of._failed.items()},
    )


def _consumer(of: Consumer) -> SimpleNamespace:
    return SimpleNamespace(
        queued=frozenset(of._queue.requests),
        receptions={request_id: reception.stage.value for request_id, reception in of._receptions.items()},
        quarantined=frozenset(of._quarantine),
        partners={name: tuple(each.peer for each in known) for name, known in of._engines.partners.items()},
        used=frozenset((*of._by_transfer, *of._used)),
    )


def _runtime(of: Any) -> SimpleNamespace:
    with of._lock, of._probe._lock, of._handshaker._lock:
        return SimpleNamespace(
            producer=_producer(of._producer),
            consumer=_consumer(of._consumer),
            peers=SimpleNamespace(admitted=frozenset(of._peers._table), planned=frozenset(of._peers._plans)),
            handshaker=SimpleNamespace(
                pending_hellos=frozenset(of._handshaker._pending_hellos), answers=frozenset(of._handshaker._answers)
            ),
            probed=frozenset(suspect.peer for suspect in of._probe._watched),
            alive=of._progress_thread.alive,
        )


def _scheduler(of: Any) -> SimpleNamespace:
    productions = of.productions._productions
    return SimpleNamespace(
        productions={
            request_id: SimpleNamespace(prompt_tokens=each.prompt_tokens, sent=tuple(each.sent))
            for request_id, each in productions.items()
        },
        consumptions=frozenset(of.consumptions._consumptions),
        queued=frozenset(of.consumptions._queued),
        receptions=frozenset(of.consumptions._taken),
        followers=frozenset(of.consumptions._shared._followers),
        moves=frozenset((*of.moves._requests, *of.moves._moving)),
        has_orders=of._outbox.orders != type(of._outbox.orders)(),
        side_channel_port=None if of._server is None else of._server.port,
    )


def side_channel_process(owner: Any) -> Any:
    """Return the subprocess of a ``MetadataProcess``: the current one, or the last."""
    return owner._process


def open_connections(server: Any) -> int:
    return len(server._open)


def serves(server: Any) -> bool:
    return bool(server._thread.is_alive())
