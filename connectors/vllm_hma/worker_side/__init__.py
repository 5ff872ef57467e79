"""Worker side of the connector: runs the state machines on one rank's memory."""
