"""Where a request goes: decode alone or a pair of engines, from what similar work has cost. No I/O, clock or Ray."""
