"""The HTTP service: builds the Ray Serve application and holds the embedded demo model."""
