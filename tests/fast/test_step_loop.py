"""The step loop with a real engine: requests from other threads, commands between steps, failures that say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dist_utils import RankPool

WAIT_S = 120.0


def _loop_case(rank: int, world: int, checkpoint: str, tp: int) -> dict[str, Any]:
    import torch.distributed as dist
    from megatron_ranks import build_rank

    from megatron_rollout.cell_types import CommandError
    from megatron_rollout.requests import GenerationRequest, SamplingParams
    from megatron_rollout.step_loop import StepLoop

    rollout = build_rank(checkpoint, tp=tp)
    if rank == 1:  # a command that fails on one rank only
        rollout.do_half = lambda: (_ for _ in ()).throw(RuntimeError("rank 1 cannot"))
    else:
        rollout.do_half = lambda: "leader can"
    loop = StepLoop(rollout, group=dist.group.WORLD if world > 1 else None, name="test")
    loop.start()
    if rank:
        loop.join(WAIT_S)
        return {"ended": not loop.is_alive()}
    result: dict[str, Any] = {}
    sampling = SamplingParams(temperature=0, max_new_tokens=12)
    deltas: list[int] = []
    futures = [loop.submit(GenerationRequest(f"a{i}", (1, 2, 3 + i), sampling)) for i in range(6)]
    streamed = loop.submit(GenerationRequest("s", (4, 5), sampling), lambda d: deltas.extend(d.output_ids))
    result["version"] = loop.call("set_weight_version", version=3).result(WAIT_S)
    outputs = [f.result(WAIT_S) for f in futures]
    result["lengths"] = {len(o.output_ids) for o in outputs}
    result["streamed"] = deltas == list(streamed.result(WAIT_S).output_ids)[: len(deltas)] and len(deltas) >= 11
    loop.call("pause").result(WAIT_S)
    held = loop.submit(GenerationRequest("held", (9, 9), sampling))
    result["paused"] = not held.done()
    loop.abort(["held"])
    result["aborted"] = held.result(WAIT_S).finish_reason
    loop.call("resume").result(WAIT_S)
    for name, expected in (("no_such_command", ValueError), ("half", CommandError if world > 1 else None)):
        try:
            value = loop.call(name).result(WAIT_S)
            result[name] = value
        except Exception as error:  # what kind is what the test looks at
            result[name] = (expected is not None and isinstance(error, expected), str(error))
    last = loop.submit(GenerationRequest("last", (1,), sampling)).result(WAIT_S)
    result["versions"] = last.weight_versions
    loop.stop()
    result["ended"] = not loop.is_alive()
    return result


def test_one_rank(one_rank: RankPool, checkpoints: dict[str, Path]) -> None:
    (result,) = one_rank.run(_loop_case, str(checkpoints["llama"]), 1)
    assert result["lengths"] == {12}
    assert result["streamed"] and result["paused"] and result["ended"]
    assert result["aborted"] == "abort"
    assert result["no_such_command"][0]
    assert result["half"] == "leader can"
    assert result["versions"] == ((0, 3),)


def test_a_cell_of_two_ranks_stays_in_step(two_ranks: RankPool, checkpoints: dict[str, Path]) -> None:
    result, follower = two_ranks.run(_loop_case, str(checkpoints["llama"]), 2)
    assert result["lengths"] == {12}
    assert result["streamed"] and result["paused"] and result["ended"] and follower["ended"]
    assert result["no_such_command"][0]
    assert result["half"][0] and "rank 1" in result["half"][1] and "cannot" in result["half"][1]


def _failure_case(rank: int, world: int, checkpoint: str) -> dict[str, Any]:
    from megatron_ranks import build_rank

    from megatron_rollout.cell_types import EngineFailed
    from megatron_rollout.requests import GenerationRequest, SamplingParams
    from megatron_rollout.step_loop import StepLoop

    rollout = build_rank(checkpoint)

    def broken() -> None:
        raise FloatingPointError("the logits are not finite")

    rollout.engine.step = broken
    loop = StepLoop(rollout, name="test")
    loop.start()
    futures = [loop.submit(GenerationRequest(f"x{i}", (1,), SamplingParams(max_new_tokens=4))) for i in range(3)]
    causes = []
    for future in futures:
        error = future.exception(WAIT_S)
        causes.append((isinstance(error, EngineFailed), str(error)))
    loop.join(WAIT_S)
    try:
        loop.submit(GenerationRequest("late", (1,)))
        late = "accepted"
    except EngineFailed as error:
        late = str(error)
    command = loop.call("ping").exception(WAIT_S)
    return {"causes": causes, "late": late, "command": isinstance(command, EngineFailed)}


def test_g06_an_engine_error_fails_every_request_with_its_cause(
    one_rank: RankPool, checkpoints: dict[str, Path]
) -> None:
    (result,) = one_rank.run(_failure_case, str(checkpoints["llama"]))
    assert all(right and "logits are not finite" in cause for right, cause in result["causes"])
    assert "logits are not finite" in result["late"]
    assert result["command"]
