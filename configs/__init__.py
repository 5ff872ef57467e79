"""Settings of the service, and example Ray Serve config files."""
