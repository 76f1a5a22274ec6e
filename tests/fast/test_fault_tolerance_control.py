"""The control server over real HTTP (F10), in front of a loop that is this test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from megatron_rollout.health import IllegalTransition
from trainer_hooks.cells.control import ControlQueue, InjectFault, ResumeCell, SuspendCell
from trainer_hooks.cells.control_server import ControlServer

STATUS: dict[str, Any] = {
    "rollout_id": 7,
    "version": 8,
    "tokens_per_s": 120.5,
    "quorum": {"quorum_id": 3, "members": [[0, 1], [1, 2]]},
    "trainer": [
        {"cell": 0, "state": "alive", "incarnation": 1, "restarts": 0, "cause": ""},
        {"cell": 1, "state": "alive", "incarnation": 2, "restarts": 1, "cause": ""},
    ],
    "rollout": [{"cell": 0, "state": "stale", "incarnation": 0, "version": 8, "pair": 1, "cause": ""}],
    "events": [{"time": 1.0, "kind": "quorum", "text": "<b>quorum_id</b> 3"}],
}


class Bench:
    def __init__(self, **options: Any) -> None:
        self.queue = ControlQueue()
        self.done: list[Any] = []
        self.refuse: Exception | None = None
        self.server = ControlServer(self.queue, lambda: STATUS, command_timeout_s=2.0, **options)
        self.client = httpx.Client(base_url=self.server.url, timeout=20)
        self._ends = threading.Event()
        self._loop = threading.Thread(target=self._turns, daemon=True)
        self._loop.start()

    def _turns(self) -> None:
        while not self._ends.is_set():
            for pending in self.queue.take(0.05):
                with pending as command:
                    if self.refuse is not None:
                        raise self.refuse
                    self.done.append(command)

    def patch(self, path: str, body: Any = None, token: str | None = None, **kw: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        content = {"content": kw["content"]} if "content" in kw else {"json": body}
        return self.client.patch(path, headers=headers, **content)

    def stop_loop(self) -> None:
        self._ends.set()
        self._loop.join(10)

    def close(self) -> None:
        self.stop_loop()
        self.queue.close()
        self.client.close()
        self.server.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_F10_what_is_refused_changes_nothing(bench: Bench) -> None:
    body = {"action": "suspend"}
    other = Bench()
    try:
        assert bench.patch("/cells/trainer/0", body).status_code == 401
        assert bench.patch("/cells/trainer/0", body, other.server.token).status_code == 401
    finally:
        other.close()
    token = bench.server.token
    answer = bench.patch("/cells/trainer/9", body, token)
    assert answer.status_code == 404 and "trainer cells are 0, 1" in answer.json()["error"]
    assert bench.patch("/cells/driver/0", body, token).status_code == 404
    assert bench.patch("/cells/trainer/0", token=token, content=b"suspend").status_code == 400
    assert bench.patch("/cells/trainer/0", ["suspend"], token).status_code == 400
    assert bench.patch("/cells/trainer/0", {"action": "kill"}, token).status_code == 400
    assert bench.patch("/cells/trainer/0", {**body, "cell": 1}, token).status_code == 400
    assert bench.patch("/cells/trainer/0", token=token, content=b" " * 100_000).status_code == 413
    assert bench.done == []


def test_a_change_is_a_command_for_the_loop(bench: Bench) -> None:
    token = bench.server.token
    assert bench.patch("/cells/trainer/1", {"action": "suspend"}, token).status_code == 200
    assert bench.patch("/cells/rollout/0", {"action": "resume"}, token).status_code == 200
    assert bench.done == [SuspendCell("trainer", 1), ResumeCell("rollout", 0)]
    bench.refuse = IllegalTransition("trainer cell 1 is Stopped")
    answer = bench.patch("/cells/trainer/1", {"action": "suspend"}, token)
    assert (answer.status_code, answer.json()) == (409, {"error": "trainer cell 1 is Stopped"})


def test_a_loop_that_does_not_come_is_reported_and_nothing_is_done_later(bench: Bench) -> None:
    bench.stop_loop()
    answer = bench.patch("/cells/trainer/1", {"action": "suspend"}, bench.server.token)
    assert answer.status_code == 503 and "will not be done" in answer.json()["error"]
    assert bench.queue.take() == []


def test_faults_exist_only_where_they_are_enabled(bench: Bench) -> None:
    fault = {"side": "trainer", "cell": 0, "how": "SIGKILL"}
    headers = {"authorization": f"Bearer {bench.server.token}"}
    assert bench.client.post("/faults", json=fault, headers=headers).status_code == 404
    enabled = Bench(fault_injection=True)
    try:
        assert enabled.client.post("/faults", json=fault).status_code == 401
        headers = {"authorization": f"Bearer {enabled.server.token}"}
        for wrong in ({**fault, "how": "politely"}, {"side": "trainer"}, {**fault, "why": "x"}):
            assert enabled.client.post("/faults", json=wrong, headers=headers).status_code == 400
        assert enabled.client.post("/faults", json={**fault, "cell": 5}, headers=headers).status_code == 404
        assert enabled.client.post("/faults", json=fault, headers=headers).status_code == 200
        assert enabled.done == [InjectFault("trainer", 0, "SIGKILL", "now")]
    finally:
        enabled.close()


def test_what_people_and_prometheus_see(bench: Bench) -> None:
    page = bench.client.get("/")
    assert page.headers["content-type"].startswith("text/html") and "setInterval" in page.text
    assert bench.client.get("/status").json() == STATUS
    assert bench.client.get("/cells").json() == {side: STATUS[side] for side in ("trainer", "rollout")}
    metrics = bench.client.get("/metrics").text
    assert "trainer_hooks_quorum_id 3.0" in metrics
    assert 'trainer_hooks_cell_state{cell="0",side="rollout",state="stale"} 1.0' in metrics
    assert 'trainer_hooks_cell_incarnation{cell="1",side="trainer"} 2.0' in metrics


def test_loopback_unless_told_otherwise(bench: Bench) -> None:
    assert bench.server.url.startswith("http://127.0.0.1:")
