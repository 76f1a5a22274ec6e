"""A host's engine actor, by Megatron: what Miles and slime expect of `SGLangEngine`, in front of one rollout cell.

The actor starts the ranks of its cell as processes on its node and speaks to the leader over HTTP. `miles.py` and
`slime.py` give its methods their host's signatures; nothing here imports a host.

Whether a cell may serve the weights that it starts with depends on the run, not on the cell: those of `--hf-checkpoint`
are right as long as the trainer has pushed none. So every actor notes the version that its cell took, outside all
actors (`RunVersion`), and a cell that starts later begins without weights: its `/health` answers 503, and the router
keeps away from it, until a weight update has gone through. `init` does not wait for that: it could never return.
"""

from __future__ import annotations

import ipaddress
import logging
from typing import Any, Protocol

import httpx

from megatron_rollout.frontend.ports import HeldPort, base_url, bind_socket, hold_port
from megatron_rollout.frontend.settings import FrontendSettings
from megatron_rollout.local_cell import LocalCell
from trainer_hooks.host_args import rollout_spec, visible_device
from trainer_hooks.host_router import deregister, register

logger = logging.getLogger(__name__)

#: What a cell that answers 503 says while it only lacks weights: it is well, and a restart would not help.
_WAITS_FOR_WEIGHTS = "waiting for weights"
#: What a control call may take: a little more than the server's own deadline, whose message is better.
_CONTROL_S = FrontendSettings().control_timeout_s + 15.0
_START_S = 1800.0
#: SGLang's memory tag without a counterpart: what graphs take is released with the other two.
_GRAPH_TAG = "cuda_graph"


class CallRefused(RuntimeError):
    """The cell answered with an error; the message has the call, the status and the cell's own words."""


class Unsupported(NotImplementedError):
    """The host asked for what a Megatron cell does not do; the message says what to use instead."""


class Versions(Protocol):
    """The newest version that any cell of a run has taken."""

    def newest(self) -> int | None: ...

    def took(self, version: int) -> None: ...


class RunVersion:
    """`Versions` of one run and model, kept by Ray itself (its key-value store), so that no actor's death loses it.

    model: tells the models of a run apart (each has a router of its own in both hosts).
    """

    def __init__(self, model: str) -> None:
        import ray

        self._key = f"{ray.get_runtime_context().get_job_id()}/{model}".encode()

    def newest(self) -> int | None:
        from ray.experimental.internal_kv import _internal_kv_get

        value = _internal_kv_get(self._key, namespace=_NAMESPACE)
        return None if value is None else int(value)

    def took(self, version: int) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        if version > (self.newest() or 0):
            _internal_kv_put(self._key, str(version).encode(), overwrite=True, namespace=_NAMESPACE)


_NAMESPACE = b"megatron_rollout"


class HostEngine:
    """One engine actor of a host. Constructed without effect; `init` starts the cell.

    Every call has a deadline. A cell over several nodes has one actor a node; only the first's speaks to the leader,
    the calls of the others do nothing.
    """

    def __init__(
        self,
        args: Any,
        rank: int,
        worker_type: str = "regular",
        base_gpu_id: int | None = None,
        sglang_overrides: dict | None = None,
        num_gpus_per_engine: int | None = None,
    ) -> None:
        if worker_type != "regular":
            raise Unsupported(f"worker type {worker_type!r}: a Megatron cell prefills and decodes in one engine")
        self.args = args
        self.rank = rank
        self.worker_type = worker_type
        self.base_gpu_id = base_gpu_id
        self.num_gpus = num_gpus_per_engine or args.rollout_num_gpus_per_engine
        self.overrides = sglang_overrides or {}
        self.nodes = max(1, self.num_gpus // args.num_gpus_per_node)
        self.node_rank = rank % self.nodes
        self.cell: LocalCell | None = None
        self.url: str | None = None
        self.router_url: str | None = None
        self._http: httpx.Client | None = None
        self._versions: Versions | None = None

    # -- start and end --------------------------------------------------------------------------------------------

    @staticmethod
    def _get_current_node_ip_and_free_port(start_port: int = 15000, consecutive: int = 1) -> tuple[str, int]:
        import ray

        host = str(ray.util.get_node_ip_address())
        return host, free_ports(host, start_port, consecutive)

    def start_cell(
        self, dist_init_addr: str, port: int, host: str | None, router_ip: str | None, router_port: int | None
    ) -> None:
        """Start this node's ranks, wait until they are up (not: healthy), and register with the router.

        Raises CellStartFailed with the first cause.
        """
        from megatron_rollout.device import on_gpu

        args = self.args
        host = (host or self._get_current_node_ip_and_free_port()[0]).strip("[]")
        router = (router_ip or args.sglang_router_ip, router_port or args.sglang_router_port)
        self.router_url = base_url(*router) if all(router) else None
        self._versions = self._run_versions("{}:{}".format(*router))
        newest = self._versions.newest()
        if newest is not None:
            logger.info("rank %d starts behind version %d: it serves after the next weight update", self.rank, newest)
        token = cell_token(args)
        self.cell = LocalCell(
            rollout_spec(
                args,
                num_gpus=self.num_gpus,
                device="cuda" if on_gpu() else "cpu",
                overrides=self.overrides,
                load_weights=newest is None,
            ),
            cell=self.rank // self.nodes,
            http=_hold(host, port) if self.node_rank == 0 else None,
            settings=FrontendSettings(host=host, token=token),
            devices=self._devices(),
            node=self.node_rank,
            nodes=self.nodes,
            store=self._store(dist_init_addr),
            seed=args.seed + self.rank,
            timeout_s=_START_S,
        )
        self.cell.start()
        self.url = self.cell.wait()
        if self.url is None:
            return
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=_CONTROL_S,
            trust_env=False,
        )
        if self.router_url is not None:
            register(self.router_url, self.url, token)

    def _run_versions(self, model: str) -> Versions:
        return RunVersion(model)

    def _devices(self) -> list[str] | None:
        if self.base_gpu_id is None:
            return None
        here = min(self.num_gpus, self.args.num_gpus_per_node)
        return [visible_device(self.base_gpu_id + i) for i in range(here)]

    def _store(self, dist_init_addr: str) -> HeldPort | tuple[str, int] | None:
        """Where the cell's ranks meet: on this machine alone any port will do, over several it is the host's."""
        if self.nodes == 1:
            return None
        host, port = split_address(dist_init_addr)
        return hold_port(host, port) if self.node_rank == 0 else (host, port)

    def shutdown(self) -> None:
        """Leave the router and end the cell. Whatever of it is gone already is no error: the host would keep the rest."""
        if self.url is not None and self.router_url is not None:
            deregister(self.router_url, self.url)
        if self.cell is not None:
            self.cell.kill()
        if self._http is not None:
            self._http.close()
            self._http = None

    def simulate_crash(self) -> None:
        """SIGKILL the cell's processes and tell nobody; the actor lives on."""
        if self.cell is not None:
            self.cell.kill()

    # -- calls ----------------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str, *, timeout_s: float | None = None, **request: Any) -> httpx.Response | None:
        """The leader's answer; None on the other nodes of a cell. Raises CallRefused for an error, or the transport's."""
        if self.node_rank != 0:
            return None
        if self._http is None:
            raise RuntimeError(f"{path}: this engine is not started, or was shut down")
        answer = self._http.request(method, path, timeout=timeout_s or _CONTROL_S, **request)
        if answer.is_error:
            raise CallRefused(f"{path} on {self.url}: {answer.status_code}: {_message(answer)}")
        return answer

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._call("POST", path, json={name: value for name, value in body.items() if value is not None})
        return None if answer is None else answer.json()

    def _get(self, path: str, timeout_s: float = 30.0) -> Any:
        answer = self._call("GET", path, timeout_s=timeout_s)
        return None if answer is None else answer.json()

    def health_generate(self, timeout: float = 5.0) -> bool:
        """True while the cell's loop turns; also while it only waits for weights, for which a restart is no cure.

        Raises CallRefused, httpx.HTTPError or RuntimeError otherwise: the host replaces the engine then.
        """
        if self.cell is not None and (death := self.cell.death()):
            raise RuntimeError(death)
        try:
            self._call("GET", "/health_generate", timeout_s=timeout)
        except CallRefused as error:
            if _WAITS_FOR_WEIGHTS not in str(error):
                raise
        return True

    def get_server_info(self) -> Any:
        return self._get("/server_info")

    def get_weight_version(self) -> str | None:
        info = self._get("/model_info")
        return None if info is None else info["weight_version"]

    def get_parallelism_info(self, rank: int) -> Any:
        """Sizes of the cell and the place of its rank `rank` (order: tensor-parallel fastest)."""
        info = self._get("/server_info")
        if info is None:
            return None
        tp, pp = info["tp_size"], info["pp_size"]
        if not 0 <= rank < tp * pp:
            raise ValueError(f"rank {rank} of a cell of {tp * pp} ranks (TP {tp} x PP {pp})")
        sizes = {name: info[name] for name in ("tp_size", "pp_size", "dp_size", "ep_size")}
        return {**sizes, "tp_rank": rank % tp, "pp_rank": rank // tp, "dp_rank": 0, "ep_rank": 0}

    def flush_cache(self) -> None:
        """Drop what no request uses. Raises CallRefused if requests still hold the cache after a minute."""
        self._call("GET", "/flush_cache", params={"timeout": 60})

    def release_memory(self, tags: list[str] | None = None) -> Any:
        """Free what the tags name (all for None), once the requests in flight are gone."""
        chosen = _known_tags(tags)
        if chosen == []:
            return None
        self.flush_cache()
        return self._post("/release_memory_occupation", {"tags": chosen})

    def resume_memory_occupation(self, tags: list[str] | None = None) -> Any:
        chosen = _known_tags(tags)
        return None if chosen == [] else self._post("/resume_memory_occupation", {"tags": chosen})

    def pause(self, mode: str) -> Any:
        return self._post("/pause_generation", {"mode": mode})

    def continue_generation(self) -> Any:
        return self._post("/continue_generation", {})

    def start_profile(
        self,
        output_dir: str | None = None,
        start_step: int | None = None,
        num_steps: int | None = None,
        activities: list[str] | None = None,
        profile_by_stage: bool = False,
        with_stack: bool | None = None,
        record_shapes: bool | None = None,
    ) -> None:
        body = dict(
            output_dir=output_dir,
            start_step=start_step,
            num_steps=num_steps,
            activities=activities,
            profile_by_stage=profile_by_stage,
            with_stack=with_stack,
            record_shapes=record_shapes,
        )
        self._call("POST", "/start_profile", json={name: value for name, value in body.items() if value is not None})

    def stop_profile(self) -> None:
        self._call("POST", "/stop_profile", json={})

    # -- weights --------------------------------------------------------------------------------------------------

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> Any:
        body = dict(
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )
        return self._post("/init_weights_update_group", body)

    def destroy_weights_update_group(self, group_name: str) -> Any:
        """Leave the group. A new cell is asked that too, before it has joined any: no error."""
        try:
            return self._post("/destroy_weights_update_group", {"group_name": group_name})
        except CallRefused as error:
            logger.info("%s", error)
            return None

    def update_from_distributed(
        self, names: Any, dtypes: Any, shapes: Any, weight_version: str | None, **options: Any
    ) -> Any:
        body = {
            "names": list(names),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "shapes": [list(shape) for shape in shapes],
            "weight_version": weight_version,
            **options,
        }
        return self._updated("/update_weights_from_distributed", body)

    def update_from_tensor(self, tensors: list[str], weight_version: str | None, **options: Any) -> Any:
        body = {"serialized_named_tensors": tensors, "weight_version": weight_version, **options}
        return self._updated("/update_weights_from_tensor", body)

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, weight_version: str | None = None
    ) -> Any:
        body = {"model_path": model_path, "load_format": load_format, "weight_version": weight_version}
        return self._updated("/update_weights_from_disk", body)

    def set_version(self, weight_version: str) -> Any:
        answer = self._post("/update_weight_version", {"new_version": weight_version, "abort_all_requests": False})
        self._took(weight_version)
        return answer

    def _updated(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._post(path, body)
        self._took(body["weight_version"])
        return answer

    def _took(self, version: str | int | None) -> None:
        if version is not None and self.node_rank == 0 and self._versions is not None:
            self._versions.took(int(version))

    # -- what a Megatron cell does not do ---------------------------------------------------------------------------

    def pull_weights(self, target_version: int) -> Any:
        raise Unsupported("deltas on disk are not supported: update weights by broadcast or from a full checkpoint")

    def get_remote_instance_transfer_engine_info(self, rank: int) -> Any:
        raise Unsupported("point-to-point transfers are not supported: update weights by broadcast")


def cell_token(args: Any) -> str | None:
    """The run's bearer token, None for none. Raises RuntimeError if nobody has chosen one (`choose_token`)."""
    token = getattr(args, "rollout_http_token", None)
    if token == "auto":
        raise RuntimeError("--rollout-http-token auto was not replaced by a token: the host was not prepared")
    return token or None


def free_ports(host: str, start: int, count: int) -> int:
    """The first of `count` consecutive ports of `host`, from `start` on, that could be bound now.

    Raises OSError if there are none.
    """
    port, free = max(1, start), 0
    while port <= 65535:
        try:
            bind_socket(host, port).close()
        except OSError:
            free = 0
        else:
            free += 1
            if free == count:
                return port - count + 1
        port += 1
    raise OSError(f"no {count} consecutive free ports on {host} from {start} on")


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port"; an IPv6 host may be bare or in brackets."""
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    if ":" in bare:
        ipaddress.IPv6Address(bare)
    return bare, int(port)


def _hold(host: str, port: int) -> HeldPort:
    """The host's port if it is still free, else another: it was only looked at, by another actor, some time ago."""
    try:
        return hold_port(host, port)
    except OSError as error:
        held = hold_port(host)
        logger.warning("%s; serving on %d instead", error, held.port)
        return held


def _known_tags(tags: list[str] | None) -> list[str] | None:
    return None if tags is None else [tag for tag in tags if tag != _GRAPH_TAG]


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
