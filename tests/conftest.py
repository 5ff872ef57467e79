"""Generated cases take as long as they take: the machine may be busy with engines."""

from hypothesis import HealthCheck, settings

settings.register_profile("tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("tandem")
