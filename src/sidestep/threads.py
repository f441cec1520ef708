"""How many threads each process gets. Imports nothing heavy: it must run before torch is imported.

A run has a trainer process and a rollout process. If each starts one thread a core and lets idle
threads spin, they take the cores from each other: on two cores a run of 1.4 s took 49 s.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping


def threads_per_process(cores: int) -> int:
    """Half the cores for each of the two processes, at least one."""
    return max(1, cores // 2)


def available_cores() -> int:
    """Cores this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_thread_environment(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Set OMP_NUM_THREADS and OMP_WAIT_POLICY where the user has not; child processes inherit.

    Returns False if torch is imported already: then the waiting policy of this process stays as it
    was (OpenMP reads it once), and the caller should set the number with torch.set_num_threads.
    """
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_process(available_cores())))
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    return "torch" not in sys.modules
