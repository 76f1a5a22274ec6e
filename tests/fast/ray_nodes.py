"""Several Ray nodes on this machine, for tests of placement: `with ray_nodes([...]) as cluster`.

Each node is a raylet of its own with the resources that it is told it has (GPUs may be invented: Ray only counts them).
The cluster lives in a directory of its own, so that neither another test's `ray.init()` finds it nor it finds theirs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

START_S = 150.0
_NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
_NODE |= {"include_log_monitor": False, "no_monitor": True}
_ENVIRONMENT = {
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_register_timeout_seconds": str(int(START_S)),
}


@contextmanager
def ray_nodes(nodes: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` of `nodes` (arguments of `Cluster.add_node`), this process connected to it."""
    before = {name: os.environ.get(name) for name in [*_ENVIRONMENT, "RAY_TMPDIR"]}
    directory = tempfile.mkdtemp(prefix="rn")  # short: Ray puts unix sockets into it
    os.environ.update(_ENVIRONMENT | {"RAY_TMPDIR": directory})
    import ray
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        raise RuntimeError("this process is connected to a Ray cluster already; tests that use several nodes start it")
    cluster = Cluster(shutdown_at_exit=True)
    try:
        for node in nodes:
            add_node(cluster, **node)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def add_node(cluster: Any, **options: Any) -> Any:
    """Start one more node and wait for it, longer than Ray's own 30 s: a busy machine needs more.

    Without Ray's dashboard and its agents: nobody looks at them here, and a raylet ends itself when its agent is not up
    after 15 s.
    """
    from ray._private import services, utils
    from ray._private.node import Node

    look = services.get_node
    until = time.monotonic() + START_S

    def look_patiently(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return look(*args, **kwargs)
            except RuntimeError:  # not registered yet
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    with (
        mock.patch.object(services, "get_node", look_patiently),
        mock.patch.object(utils, "get_dashboard_dependency_error", lambda: ImportError("not wanted")),
        mock.patch.object(Node, "start_api_server", lambda node, **_: None),
    ):
        node = cluster.add_node(wait=False, **_NODE | options)
    cluster.wait_for_nodes(timeout=START_S)
    return node
