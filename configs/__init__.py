"""Settings of the service, their reference page, and example Ray Serve config files."""
