"""Control endpoints of the SGLang wire: health, facts, pause, cache, memory, weights, profiler."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from megatron_rollout.frontend import sglang_schema as schema
from megatron_rollout.frontend.client import EngineStatus
from megatron_rollout.frontend.context import Frontend
from megatron_rollout.frontend.errors import RequestError, bad_request
from megatron_rollout.frontend.sglang_format import update_reply, version_name
from megatron_rollout.frontend.wire import JSONReply

#: How often a flush that was given time looks whether the requests that hold the cache are gone.
_FLUSH_RETRY_S = 0.05
_TAGS = ("weights", "kv_cache")


def _check_serving(frontend: Frontend) -> EngineStatus:
    status = frontend.client.status()
    if not status.serving:
        raise RequestError(503, f"{status.state}: {status.reason or 'not serving'}")
    return status


async def health(frontend: Frontend, request: Request) -> Response:
    """200 while the cell serves (a paused one does). From the status alone: costs the engine nothing."""
    status = _check_serving(frontend)
    return JSONReply({"status": status.state, "weight_version": status.weight_version})


async def health_generate(frontend: Frontend, request: Request) -> Response:
    """As /health, and the engine's loop has answered just now: proof of progress, not only of life."""
    status = _check_serving(frontend)
    await frontend.control("ping", timeout_s=frontend.settings.ping_timeout_s)
    return JSONReply({"status": status.state, "weight_version": status.weight_version})


async def metrics(frontend: Frontend, request: Request) -> Response:
    return Response(frontend.metrics.render(), media_type=frontend.metrics.content_type)


async def server_info(frontend: Frontend, request: Request) -> Response:
    """Topology and limits, by SGLang's names (one cell has neither data nor expert parallelism inside)."""
    status = frontend.client.status()
    return JSONReply(
        {
            **_model_facts(frontend, status),
            "tp_size": status.tensor_parallel_size,
            "pp_size": status.pipeline_parallel_size,
            "dp_size": 1,
            "ep_size": 1,
            "num_gpus": status.tensor_parallel_size * status.pipeline_parallel_size,
            "host": frontend.settings.host,
            "dtype": status.dtype,
            "disaggregation_mode": "null",
            "encoder_only": False,
            "context_length": status.max_context_length,
            "max_total_num_tokens": status.kv_capacity_tokens,
            "max_running_requests": status.max_running_requests,
            "cell": status.cell,
            "status": status.state,
            "internal_states": [_load(status)],
            "backend": "megatron",
        }
    )


async def model_info(frontend: Frontend, request: Request) -> Response:
    status = frontend.client.status()
    return JSONReply({**_model_facts(frontend, status), "is_generation": True, "preferred_sampling_params": None})


def _model_facts(frontend: Frontend, status: EngineStatus) -> dict[str, Any]:
    path = status.model_path or status.model_name
    return {
        "model_path": path,
        "tokenizer_path": path,
        "served_model_name": frontend.model_name(),
        "weight_version": version_name(status.weight_version),
        "vocab_size": status.vocab_size,
    }


def _load(status: EngineStatus) -> dict[str, Any]:
    running, waiting = status.running_requests, status.waiting_requests
    return {
        "dp_rank": 0,
        "num_reqs": running + waiting,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_tokens": status.outstanding_tokens,
        "num_used_tokens": status.used_tokens,
        "num_total_tokens": status.outstanding_tokens,
        "max_total_num_tokens": status.kv_capacity_tokens,
        "max_running_requests": status.max_running_requests,
        "token_usage": status.kv_usage,
        "utilization": status.kv_usage,
    }


async def loads(frontend: Frontend, request: Request) -> Response:
    """`/v1/loads`: the sections other than core have nothing to add here."""
    now = datetime.now(UTC).isoformat()
    return JSONReply({"timestamp": now, "version": "megatron", "loads": [_load(frontend.client.status())]})


async def get_load(frontend: Frontend, request: Request) -> Response:
    """The older form, which sglang-router polls."""
    return JSONReply([_load(frontend.client.status())])


async def abort_request(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, schema.AbortRequest)
    if body.abort_all:
        frontend.client.abort(None)
    elif body.rid:
        frontend.inflight.abort(body.rid)
    else:
        raise bad_request("rid: is required unless abort_all is true", "rid")
    return JSONReply({"success": True})


async def flush_cache(frontend: Frontend, request: Request) -> Response:
    """400 while requests hold the cache (clients poll); `?timeout=` seconds are waited for them first."""
    try:
        wait = float(request.query_params.get("timeout", "0"))
    except ValueError:
        wait = -1.0
    if not 0 <= wait <= frontend.settings.control_timeout_s:
        raise bad_request(f"timeout: must be between 0 and {frontend.settings.control_timeout_s:g} seconds", "timeout")
    until = time.monotonic() + wait
    while not await frontend.control("flush_cache"):
        if time.monotonic() >= until:
            status = frontend.client.status()
            requests = status.running_requests + status.waiting_requests
            raise bad_request(f"the cache is held by {requests} requests; nothing was flushed")
        await asyncio.sleep(_FLUSH_RETRY_S)
    return PlainTextResponse("Cache flushed.\n")


async def pause_generation(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, schema.PauseRequest)
    await frontend.control("pause", mode=body.mode)
    return JSONReply({"message": f"generation paused ({body.mode})", "status": "ok"})


async def continue_generation(frontend: Frontend, request: Request) -> Response:
    await frontend.control("resume")
    return JSONReply({"message": "generation continued", "status": "ok"})


async def get_weight_version(frontend: Frontend, request: Request) -> Response:
    return JSONReply({"weight_version": version_name(frontend.client.status().weight_version)})


async def update_weight_version(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, schema.VersionRequest)
    version = _version(body.new_version, "new_version")
    if body.abort_all_requests:
        frontend.client.abort(None)
    await frontend.control("set_weight_version", version=version)
    return JSONReply(update_reply(True, f"weight version is now {version}", new_version=str(version)))


def _version(value: str | int | None, param: str) -> int | None:
    """Versions are integers here, digits on the wire."""
    if value is None:
        return None
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value)
    raise bad_request(f"{param}: must be a version number >= 0, got {value!r}", param)


async def init_weights_update_group(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, schema.InitGroupRequest)
    if body.rank_offset >= body.world_size:
        raise bad_request(f"rank_offset: {body.rank_offset} is not below world_size {body.world_size}", "rank_offset")
    await frontend.control("init_weights_update_group", **body.model_dump())
    return JSONReply(update_reply(True, f"joined group {body.group_name!r} of {body.world_size} ranks"))


async def destroy_weights_update_group(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, schema.DestroyGroupRequest)
    await frontend.control("destroy_weights_update_group", group_name=body.group_name)
    return JSONReply(update_reply(True, f"left group {body.group_name!r}"))


async def begin_weight_update(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, schema.SelectorRequest)
    await frontend.control("begin_weight_update", selector=body.selector)
    return JSONReply(update_reply(True, "weight update begun"))


async def end_weight_update(frontend: Frontend, request: Request) -> Response:
    await frontend.control("end_weight_update")
    return JSONReply(update_reply(True, "weight update ended"))


async def _update(frontend: Frontend, body: Any, name: str, **arguments: Any) -> Response:
    version = _version(body.weight_version, "weight_version")
    if body.abort_all_requests:
        frontend.client.abort(None)
    await frontend.control(
        name, load_format=body.load_format, flush_cache=body.flush_cache, weight_version=version, **arguments
    )
    return JSONReply(update_reply(True, "weights updated", num_paused_requests=0))


async def update_weights_from_distributed(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, schema.DistributedUpdateRequest)
    tensors = {"names": body.names, "dtypes": body.dtypes, "shapes": body.shapes}
    return await _update(frontend, body, "update_weights_from_distributed", group_name=body.group_name, **tensors)


async def update_weights_from_tensor(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, schema.TensorUpdateRequest)
    try:
        tensors = [base64.b64decode(text, validate=True) for text in body.serialized_named_tensors]
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"serialized_named_tensors: not base64: {error}", "serialized_named_tensors") from None
    return await _update(frontend, body, "update_weights_from_tensor", serialized_named_tensors=tensors)


async def update_weights_from_disk(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, schema.DiskUpdateRequest)
    return await _update(frontend, body, "update_weights_from_disk", model_path=body.model_path)


async def post_process_weights(frontend: Frontend, request: Request) -> Response:
    """A step for quantised weights; there are none here, so it is done."""
    return JSONReply(update_reply(True, "weights are not quantised: nothing to process"))


def _tags(body: schema.TagsRequest) -> tuple[str, ...] | None:
    unknown = sorted(set(body.tags or ()) - set(_TAGS))
    if unknown:
        raise bad_request(f"tags: unknown {', '.join(map(repr, unknown))}; known are {', '.join(_TAGS)}", "tags")
    return None if body.tags is None else tuple(body.tags)


async def release_memory_occupation(frontend: Frontend, request: Request) -> Response:
    await frontend.control("release_memory", tags=_tags(await frontend.body(request, schema.TagsRequest)))
    return JSONReply({"success": True})


async def resume_memory_occupation(frontend: Frontend, request: Request) -> Response:
    await frontend.control("resume_memory", tags=_tags(await frontend.body(request, schema.TagsRequest)))
    return JSONReply({"success": True})


async def weights_checker(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, schema.CheckRequest)
    found = await frontend.control("check_weights", action=body.action)
    return JSONReply(update_reply(True, f"{body.action}: done", **(found or {})))


async def start_profile(frontend: Frontend, request: Request) -> Response:
    body = await frontend.body(request, schema.ProfileRequest)
    await frontend.control("start_profile", **body.model_dump())
    return PlainTextResponse("Profiling started.\n")


async def stop_profile(frontend: Frontend, request: Request) -> Response:
    await frontend.control("stop_profile")
    return PlainTextResponse("Profiling stopped.\n")


async def refuse(frontend: Frontend, request: Request) -> Response:
    """Endpoints of SGLang's for what the engine does not have."""
    raise bad_request(f"{request.url.path} is not supported by the Megatron engine")
