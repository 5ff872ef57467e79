"""Change every setting of a running service; compare the restarts with `configs/changes.py`."""
