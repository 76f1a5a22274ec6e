"""Cells behind a real sglang-router process: registration, balance, a killed worker, health, token.

Cells have a stand-in engine (frontend_support.py); those that get killed are processes of their own. What the router
does with requests is written down here as assertions, since hosts and adapters rely on it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from frontend_support import FakeEngine, byte_level_tokenizer, served

from megatron_rollout.frontend.app import build_app
from megatron_rollout.frontend.ports import find_free_port, hold_port
from megatron_rollout.frontend.server import serve

pytest.importorskip("sglang_router")
pytestmark = pytest.mark.timeout(180)
START_S = 90  # the router needs some 10 s here; a busy machine more
TOKENIZER = byte_level_tokenizer()
CELL = [sys.executable, str(Path(__file__).with_name("frontend_support.py"))]


def metric(url: str, name: str) -> float:
    lines = httpx.get(url + "/metrics").text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0.0)


class Router:
    def __init__(self, client: httpx.Client) -> None:
        self.client = client

    def add(self, url: str, **fields: str) -> None:
        answer = self.client.post("/workers", json={"url": url, "worker_type": "regular", **fields})
        assert answer.status_code == 202  # queued: the router probes the worker before it takes it

    def clear(self) -> None:
        for worker in self.client.get("/workers").json()["workers"]:
            self.client.delete(f"/workers/{worker['id']}")
        self.until(lambda health: not health)

    def health(self) -> dict[str, bool]:
        return {worker["url"]: worker["is_healthy"] for worker in self.client.get("/workers").json()["workers"]}

    def until(self, condition, timeout_s: float = 40.0) -> None:
        until = time.monotonic() + timeout_s
        while not condition(self.health()):
            assert time.monotonic() < until, self.health()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def router():
    port = find_free_port()
    options = {
        "--host": "127.0.0.1", "--port": port, "--prometheus-port": find_free_port(), "--policy": "round_robin",
        "--health-check-interval-secs": 1, "--health-failure-threshold": 2, "--health-success-threshold": 1,
        "--worker-startup-check-interval": 1, "--log-level": "error",
    }  # fmt: skip
    command = [sys.executable, "-m", "sglang_router", "launch", *(str(x) for pair in options.items() for x in pair)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
    try:
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if client.get("/liveness").status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() < until, "the router did not start"
            time.sleep(0.2)
        yield Router(client)
    finally:
        client.close()
        process.kill()
        process.wait(10)


@pytest.fixture(autouse=True)
def no_workers_left(router):
    yield
    router.clear()


@pytest.fixture
def processes():
    """Starts cells as processes, all at once; returns [(process, URL)]. None outlives the test."""
    started: list[subprocess.Popen] = []

    def start(count: int, *options: str) -> list[tuple[subprocess.Popen, str]]:
        new = [subprocess.Popen([*CELL, *options], stdout=subprocess.PIPE, text=True) for _ in range(count)]
        started.extend(new)
        urls = [process.stdout.readline().strip() for process in new]
        assert all(urls), "a cell did not start"
        return list(zip(new, urls, strict=True))

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


BODY = {
    "text": "the cat", "return_logprob": True,
    "sampling_params": {"max_new_tokens": 100, "sampling_seed": 5, "temperature": 0.7, "no_stop_trim": True},
}  # fmt: skip


def healthy(*urls: str):
    return lambda health: all(health.get(url) for url in urls)


def test_load_is_balanced_and_a_killed_worker_loses_nothing(router, processes):
    (process, one), (_, two) = processes(2, "--step-s", "0.005")
    router.add(one)
    router.add(two)
    router.until(healthy(one, two))

    def ask(index: int) -> tuple[int, int, str]:
        body = {**BODY, "sampling_params": {**BODY["sampling_params"], "sampling_seed": index}}
        answer = router.client.post("/generate", json=body)
        meta = answer.json()["meta_info"]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        return answer.status_code, meta["completion_tokens"], answer.json()["text"]

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        first = list(pool.map(ask, range(16)))
        counts = [metric(url, "megatron_rollout_samples_total") for url in (one, two)]
        assert sum(counts) == 16 and min(counts) >= 6

        answers = [pool.submit(ask, index) for index in range(32)]
        while metric(one, "megatron_rollout_running_requests") < 3:
            time.sleep(0.01)
        process.kill()  # with requests in flight
        second = [answer.result(timeout=60) for answer in answers]
    assert Counter((status, tokens) for status, tokens, _ in second) == {(200, 100): 32}
    assert second[:16] == first  # what was re-run elsewhere drew the same noise: the seed belongs to the sample
    router.until(lambda health: health.get(one) is False and health.get(two) is True)


def stale_engine() -> FakeEngine:
    engine = FakeEngine(TOKENIZER)
    engine.serving, engine.state, engine.reason = False, "STALE", "weights have not landed"
    return engine


def test_a_cell_without_current_weights_gets_no_request_until_a_refit(router):
    refit = {"model_path": "m", "weight_version": "4"}
    with served(FakeEngine(TOKENIZER)) as good, served(stale_engine()) as stale:
        router.add(good.url)
        router.add(stale.url)
        router.until(healthy(good.url))
        time.sleep(2)  # two probes of the stale one
        assert stale.url not in router.health()  # /health 503: registration waits, and goes through by itself later
        assert httpx.post(stale.url + "/update_weights_from_disk", json=refit).status_code == 200
        router.until(healthy(good.url, stale.url))

        stale.stop(5)
        router.until(lambda health: not health[stale.url])
        engine = stale_engine()  # on the same URL, as a recovery brings it up
        restarted = serve(build_app(engine), hold_port("127.0.0.1", stale.port).detach())
        time.sleep(2)
        assert router.health()[restarted.url] is False  # would be healthy by itself, were /health 200
        for _ in range(4):
            assert router.client.post("/generate", json=BODY).status_code == 200
        assert engine.submitted == []
        httpx.post(restarted.url + "/update_weights_from_disk", json=refit)
        router.until(healthy(good.url, restarted.url))
        restarted.stop(5)
        engine.close()


def test_what_the_router_passes_on(router):
    """Known fields of /generate and the worker's token pass; unknown fields and the extras of the chat do not."""
    engine = FakeEngine(TOKENIZER)
    with served(engine, token="secret") as cell:
        router.add(cell.url, api_key="secret")
        router.until(healthy(cell.url))
        headers = {"authorization": "Bearer other", "x-my-header": "1"}
        # a client's own token goes along beside the worker's, which comes first
        generate = router.client.post("/generate", json={**BODY, "rid": "mine", "my_field": 1}, headers=headers)
        assert generate.status_code == 200 and generate.json()["meta_info"]["id"] == "mine"
        sent = engine.submitted[-1].sampling
        assert (sent.seed, sent.temperature, sent.max_new_tokens) == (5, 0.7, 100)
        assert httpx.post(cell.url + "/generate", json=BODY).status_code == 401

        bad = {**BODY, "sampling_params": {"top_p": 1.5}}
        refused = router.client.post("/generate", json=bad)
        assert refused.status_code == 400 and "top_p must be in [0, 1], got 1.5" in refused.text

        chat = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        extras = {"input_ids": [5, 6], "seed": 3, "logprobs": True, "top_logprobs": None}
        choice = router.client.post("/v1/chat/completions", json={**chat, **extras}).json()["choices"][0]
        assert len(choice["logprobs"]["content"]) == len(choice["generation_token_ids"]) == 3
        assert choice["prompt_token_ids"] != [5, 6]  # input_ids did not pass, the rest did
        assert engine.submitted[-1].sampling.seed == 3

        assert router.client.get("/get_loads").json()["workers"][0]["load"] == 0
        assert router.client.post("/flush_cache").status_code == 200
        # batches of ids pass; batches of texts and completions of token ids do not
        batch = {"input_ids": [[5, 6], [7]], "sampling_params": {"max_new_tokens": 1}}
        assert len(router.client.post("/generate", json=batch).json()) == 2
        assert router.client.post("/generate", json={"text": ["a", "b"]}).status_code == 422
        assert router.client.post("/v1/completions", json={"model": "fake-model", "prompt": [5]}).status_code == 422


def test_streams_through_the_router(router):
    with served(FakeEngine(TOKENIZER)) as cell:
        router.add(cell.url)
        router.until(healthy(cell.url))
        whole = router.client.post("/generate", json=BODY).json()
        with router.client.stream("POST", "/generate", json={**BODY, "stream": True}) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["text"] == whole["text"]
