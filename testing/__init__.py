"""Code that tests, campaigns and benchmarks share."""

import os

# HTTP clients of tests reach servers on this machine whatever proxy the environment names.
for _variable in ("no_proxy", "NO_PROXY"):
    os.environ[_variable] = ",".join(filter(None, (os.environ.get(_variable), "127.0.0.1", "::1", "localhost")))
