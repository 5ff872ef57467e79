"""Settings and Ray Serve config files, one per way of running."""
