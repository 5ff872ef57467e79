"""Side-by-side measurements, as ratios within one interleaved run; each writes JSON."""
