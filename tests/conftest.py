"""Generated cases take as long as they take: the machine may be busy with engines."""

import os

from hypothesis import HealthCheck, settings

from app.doctor.machine import longest_temporary_directory, ray_temporary_directory

# Ray's sockets lie in TMPDIR, numbered where there are several nodes. Ray does not start where it is long (a CI job's).
if len(ray_temporary_directory()) + len(".99") > longest_temporary_directory():
    os.environ["RAY_TMPDIR"] = "/tmp"

settings.register_profile("tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("tandem")
