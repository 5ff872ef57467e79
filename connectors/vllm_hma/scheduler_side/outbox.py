"""Collect the scheduler side's orders until the next step, and its counts for the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.vllm_hma.metrics import TandemStats
from connectors.vllm_hma.orders import Orders


@dataclass(slots=True)
class Outbox:
    orders: Orders = field(default_factory=Orders)
    stats: TandemStats = field(default_factory=TandemStats)

    def take_orders(self) -> Orders:
        taken, self.orders = self.orders, Orders()
        return taken
