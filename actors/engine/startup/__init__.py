"""Record and report the stages of an engine's start."""
