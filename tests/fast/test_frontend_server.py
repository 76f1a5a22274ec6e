"""What holds on both wires: limits, token, disconnects, deadlines, metrics, start and stop. Engine: a stand-in."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest
from frontend_support import FakeEngine, byte_level_tokenizer, draw, served
from prometheus_client.parser import text_string_to_metric_families

from megatron_rollout.frontend.app import build_app
from megatron_rollout.frontend.client import EngineClient, NotServing
from megatron_rollout.frontend.inflight import choice_seed
from megatron_rollout.frontend.ports import bind_socket, hold_port
from megatron_rollout.frontend.server import serve
from megatron_rollout.frontend.settings import FrontendSettings, is_loopback
from megatron_rollout.frontend.wire import finite_logprobs

pytestmark = pytest.mark.timeout(180)
TOKENIZER = byte_level_tokenizer()
LONG = {"text": "x", "sampling_params": {"max_new_tokens": 250}}


def wait_for(condition, timeout_s: float = 10.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_the_stand_in_has_the_interface_of_an_engine():
    engine: EngineClient = FakeEngine(TOKENIZER)
    for name in ("submit", "abort", "call", "status", "tokenizer"):
        assert hasattr(engine, name)
    engine.close()


# settings and token


def test_wider_than_loopback_needs_a_token():
    with pytest.raises(ValueError, match="host '0.0.0.0' is wider than loopback: a token is required"):
        FrontendSettings(host="0.0.0.0")
    assert "secret" not in repr(FrontendSettings(host="::", token="secret"))
    engine = FakeEngine(TOKENIZER)
    sock = bind_socket("0.0.0.0")
    with pytest.raises(ValueError, match="wider than loopback: a token is required"):
        serve(build_app(engine), sock)
    sock.close()
    engine.close()


def test_settings_name_everything_that_is_wrong_at_once():
    with pytest.raises(ValueError) as error:
        FrontendSettings(
            host="0.0.0.0", max_body_bytes=0, request_timeout_s=-1, max_prompt_tokens=0, max_top_logprobs=-1
        )
    for part in ("0.0.0.0", "max_body_bytes", "request_timeout_s", "max_prompt_tokens", "max_top_logprobs"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("::1", True), ("[::1]", True),
     ("::ffff:127.0.0.1", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("node-7", False)],
)  # fmt: skip
def test_what_counts_as_loopback(host, loopback):
    assert is_loopback(host) is loopback


def test_every_route_but_probes_and_metrics_asks_for_the_token():
    with served(FakeEngine(TOKENIZER), token="secret") as handle, httpx.Client(base_url=handle.url) as client:
        for path in ("/health", "/health_generate", "/metrics"):
            assert client.get(path).status_code == 200
        for given in (None, b"Bearer wrong", b"secret", b"Bearer \xff"):
            encoded = {} if given is None else {"authorization": given}
            response = client.post("/generate", json={"text": "x"}, headers=encoded)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert client.post("/update_weights_from_disk", json={}, headers=encoded).status_code == 401
            assert client.get("/v1/models", headers=encoded).status_code == 401
        good = {"authorization": "Bearer secret"}
        assert client.post("/generate", json=LONG, headers=good).status_code == 200


# limits


def test_bodies_over_the_limit_get_413_however_they_come():
    with served(FakeEngine(TOKENIZER), max_body_bytes=2000) as handle, httpx.Client(base_url=handle.url) as client:
        said = client.post("/generate", content=b"x" * 2001)
        assert said.status_code == 413 and "2001 bytes, more than the 2000 accepted" in said.json()["message"]

        def trickle():
            for _ in range(30):
                yield b"x" * 100

        assert client.post("/v1/completions", content=trickle()).status_code == 413
        assert client.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}}).status_code == 200


def test_prompts_over_the_limit_get_400_with_both_numbers():
    with served(FakeEngine(TOKENIZER), max_prompt_tokens=4) as handle, httpx.Client(base_url=handle.url) as client:
        response = client.post("/generate", json={"input_ids": [5] * 5})
        assert response.status_code == 400
        assert "the prompt has 5 tokens, this server accepts 4" in response.json()["message"]
        assert client.post("/v1/completions", json={"prompt": [5] * 5}).status_code == 400
        chat = {"messages": [{"role": "user", "content": "the cat"}]}
        assert "this server accepts 4" in client.post("/v1/chat/completions", json=chat).json()["message"]


# disconnects and deadlines


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_a_client_that_goes_away_frees_the_engine(path, stream):
    engine = FakeEngine(TOKENIZER, step_s=0.01)
    with served(engine) as handle:
        body = {"text": ["x", "y"], "prompt": ["x", "y"], "stream": stream, "max_tokens": 250}
        body["sampling_params"] = {"max_new_tokens": 250}

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=handle.url) as client:
                task = asyncio.create_task(client.post(path, json=body))
                while engine.status().running_requests < 2:
                    await asyncio.sleep(0.005)
                task.cancel()

        asyncio.run(asyncio.wait_for(leave(), 10))
        wait_for(lambda: engine.status().running_requests == 0, timeout_s=20)
        assert len(engine.aborted) >= 2
        text = httpx.get(handle.url + "/metrics").text
        assert value(text, "megatron_rollout_http_disconnects_total") == 1
        assert value(text, "megatron_rollout_http_samples_in_flight") == 0


def test_a_finished_call_aborts_nothing():
    engine = FakeEngine(TOKENIZER)
    with served(engine) as handle, httpx.Client(base_url=handle.url) as client:
        for stream in (False, True):
            client.post("/generate", json={**LONG, "stream": stream})
            client.post("/v1/completions", json={"prompt": "x", "n": 3, "stream": stream})
        assert engine.aborted == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_past_its_deadline_is_aborted_and_says_so(stream):
    engine = FakeEngine(TOKENIZER)
    engine.paused = True
    with served(engine, request_timeout_s=0.2) as handle, httpx.Client(base_url=handle.url) as client:
        response = client.post("/generate", json={**LONG, "text": ["x", "y"], "stream": stream})
        assert response.status_code == 504
        assert "2 of 2 samples had not finished after 0.2 s and were aborted" in response.json()["message"]
        assert engine.status().running_requests == engine.status().waiting_requests == 0


@pytest.mark.parametrize(("failure", "status"), [(ValueError, 400), (NotServing, 503), (RuntimeError, 500)])
def test_one_refused_sample_ends_its_call_and_frees_the_others(failure, status):
    engine = FakeEngine(TOKENIZER, step_s=0.01)

    def submit(request, on_delta=None, original=engine.submit):
        if request.prompt_ids == (9,):
            raise failure("the engine cannot run this")
        return original(request, on_delta)

    engine.submit = submit
    with served(engine) as handle, httpx.Client(base_url=handle.url) as client:
        response = client.post("/generate", json={"input_ids": [[5], [6], [9]]})
        assert response.status_code == status and "cannot run this" in response.json()["message"]
        wait_for(lambda: engine.status().running_requests == 0, timeout_s=20)


# metrics


def value(text: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"{name} {labels} not in\n{text}")


def test_metrics_count_calls_samples_and_show_the_engine():
    engine = FakeEngine(TOKENIZER)
    with served(engine) as handle, httpx.Client(base_url=handle.url) as client:
        client.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 5, "n": 2}})
        client.post("/generate", json={"text": 5})
        text = client.get("/metrics").text
        assert value(text, "megatron_rollout_http_requests_total", route="/generate", status="200") == 1
        assert value(text, "megatron_rollout_http_requests_total", route="/generate", status="400") == 1
        assert value(text, "megatron_rollout_samples_total", finish_reason="length") == 2
        assert value(text, "megatron_rollout_sample_tokens_total") == 10
        assert value(text, "megatron_rollout_generated_tokens_total") == 10
        assert value(text, "megatron_rollout_serving") == 1 and value(text, "megatron_rollout_weight_version") == 3
        engine.serving, engine.weight_version = False, None
        text = client.get("/metrics").text
        assert value(text, "megatron_rollout_serving") == 0 and value(text, "megatron_rollout_weight_version") == -1


def test_two_apps_in_one_process_keep_their_own_books():
    with served(FakeEngine(TOKENIZER)) as a, served(FakeEngine(TOKENIZER)) as b:
        httpx.post(a.url + "/generate", json={"text": "x"})
        assert value(httpx.get(a.url + "/metrics").text, "megatron_rollout_samples_total", finish_reason="length") == 1
        assert "samples_total{" not in httpx.get(b.url + "/metrics").text


# the server


def test_a_stopped_server_lets_calls_finish_frees_its_port_and_can_start_again_there():
    engine = FakeEngine(TOKENIZER, step_s=0.01)
    handle = serve(build_app(engine), hold_port().detach())
    results = []
    body = {"text": "x", "sampling_params": {"max_new_tokens": 50}}
    worker = threading.Thread(target=lambda: results.append(httpx.post(handle.url + "/generate", json=body)))
    worker.start()
    wait_for(lambda: engine.status().running_requests == 1)
    with httpx.Client() as idle:  # its connection is closed by the server, whose side then is in TIME_WAIT
        idle.get(handle.url + "/health")
        handle.stop(10)
    worker.join(5)
    assert results[0].json()["meta_info"]["completion_tokens"] == 50
    assert not handle.alive
    with pytest.raises(httpx.ConnectError):
        httpx.get(handle.url + "/health")
    again = serve(build_app(engine), bind_socket("127.0.0.1", handle.port))
    assert httpx.get(again.url + "/health").status_code == 200
    again.stop(5)
    again.stop(5)
    engine.close()


def test_a_server_that_cannot_start_says_why():
    engine = FakeEngine(TOKENIZER)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)  # cannot listen
    sock.bind(("127.0.0.1", 0))
    with pytest.raises(RuntimeError, match="did not start: "):
        serve(build_app(engine), sock)
    engine.close()


def test_the_server_listens_on_ipv6_too():
    engine = FakeEngine(TOKENIZER)
    try:
        held = hold_port("::1")
    except OSError as error:
        engine.close()
        pytest.skip(f"no IPv6 loopback here: {error}")
    handle = serve(build_app(engine), held.detach())
    assert handle.url == f"http://[::1]:{handle.port}"
    assert httpx.get(handle.url + "/health").status_code == 200
    handle.stop(5)
    engine.close()


# small pure things


def test_choice_seeds_differ_and_depend_on_their_arguments_only():
    seeds = [choice_seed(7, i) for i in range(1000)]
    assert seeds[0] == 7 and len(set(seeds)) == 1000 and seeds == [choice_seed(7, i) for i in range(1000)]
    assert choice_seed(None, 5) is None and choice_seed(7, 1) != choice_seed(8, 1)
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_logprobs_that_json_can_carry():
    inf = float("inf")
    assert finite_logprobs([-1.0, None, -inf, inf, float("nan")]) == [-1.0, None, -9999.0, None, None]
    assert finite_logprobs([-1e308, -1e308]) == [-1e308, -1e308]
    assert finite_logprobs((-1.0, -2.0)) == [-1.0, -2.0] and finite_logprobs([]) == []


def test_a_body_that_does_not_come_is_not_waited_for(caplog):
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    with served(FakeEngine(TOKENIZER), body_timeout_s=0.2) as handle:
        with socket.create_connection((handle.host, handle.port), timeout=10) as slow:
            slow.sendall(head)
            answer = slow.recv(4096)
            assert b" 408 " in answer.split(b"\r\n")[0] and b"within 0.2 s (1 bytes so far)" in answer
        with socket.create_connection((handle.host, handle.port), timeout=10) as gone:
            gone.sendall(head)
        wait_for(lambda: 'status="400"' in httpx.get(handle.url + "/metrics").text)
        text = httpx.get(handle.url + "/metrics").text
        assert value(text, "megatron_rollout_http_requests_total", route="/generate", status="400") == 1
    assert not caplog.records


def test_long_prompts_are_tokenised_beside_the_loop():
    engine = FakeEngine(TOKENIZER, max_context_length=100_000)
    long = "the cat sat " * 3000
    with served(engine) as handle, httpx.Client(base_url=handle.url, timeout=30) as client:
        one = client.post("/generate", json={"text": long, "sampling_params": {"max_new_tokens": 1}}).json()
        assert one["meta_info"]["prompt_tokens"] == len(TOKENIZER.encode(long))
        chat = {"messages": [{"role": "user", "content": long}], "max_tokens": 1}
        ids = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["prompt_token_ids"]
        assert TOKENIZER.decode(ids) == f"<|im_start|>user\n{long}<|im_end|>\n<|im_start|>assistant\n"


def test_256_calls_at_once_streamed_and_not_all_get_all_of_their_tokens():
    """Nothing is lost between the engine's thread and the loop, and a call that does not stream wakes the loop once."""
    engine = FakeEngine(TOKENIZER, max_context_length=1000)

    async def ask(client: httpx.AsyncClient, index: int) -> bool:
        params = {"max_new_tokens": 20 + index % 7, "sampling_seed": index}
        body = {"text": "x", "return_logprob": True, "sampling_params": params, "stream": index % 2 == 0}
        response = await client.post("/generate", json=body)
        lines = response.text.replace("data: ", "").split("\n\n")
        last = json.loads(lines[-3] if index % 2 == 0 else lines[0])
        prompt = tuple(TOKENIZER.encode("x"))
        expected = [draw(prompt, index, i, engine.vocab)[0] for i in range(20 + index % 7)]
        return last["output_ids"] == expected == [entry[1] for entry in last["meta_info"]["output_token_logprobs"]]

    async def ask_all(url: str) -> list[bool]:
        limits = httpx.Limits(max_connections=256)
        async with httpx.AsyncClient(base_url=url, timeout=50, limits=limits) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(256)))

    with served(engine) as handle:
        assert all(asyncio.run(ask_all(handle.url)))
        assert engine.aborted == [] and engine.status().running_requests == 0
