"""One thread for every process the tests start: results then do not depend on the machine's cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
