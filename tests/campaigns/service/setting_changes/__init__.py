"""Changes every setting of a running service; compares the restarts with `configs/changes.py`."""
