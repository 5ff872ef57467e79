"""Records and reports the stages of an engine's start."""
