"""Starting Ray on this machine, patiently."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

#: Ray gives its own node 30 s to come up, which a busy machine may miss.
_ATTEMPTS = 4


def start_ray(**options: Any) -> None:
    """`ray.init(**options)`, tried again where the node only was too slow. Raises the last failure."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else every worker runs uv again
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: whatever else runs would starve the cells
    import ray

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False, **options)
            return
        except Exception as error:  # Ray raises a bare Exception here; anything but slowness is raised on
            ray.shutdown()
            _kill_ray_children()
            if "timed out during startup" not in str(error) or attempt == _ATTEMPTS:
                raise
            logger.warning("Ray's node did not start in time (%d of %d attempts)", attempt, _ATTEMPTS)


def _kill_ray_children() -> None:
    """End the processes of a node that did not come up: Ray forgets those."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):  # it has ended by itself
                if b"/ray/" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)
