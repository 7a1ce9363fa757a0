"""For engines with several worker processes on a machine with two cores.

vLLM's message queue spins with `os.sched_yield` for a second after each message and so starves the
very workers that it waits for. A directory with this file on PYTHONPATH makes it sleep instead.
"""

import os
import time


def _sleep_instead() -> None:
    time.sleep(100e-6)


os.sched_yield = _sleep_instead
