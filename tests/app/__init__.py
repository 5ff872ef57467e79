"""The HTTP edge and the demo model."""
