"""Check a machine before it serves: `make doctor`, `python -m app.doctor --config FILE`."""
