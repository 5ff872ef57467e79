"""Side-by-side measurements, as ratios within one interleaved run.

Each prints a table and writes JSON.
"""
