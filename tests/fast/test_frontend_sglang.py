"""The SGLang wire against a live server on loopback with a stand-in engine: what slime and Miles send and read."""

from __future__ import annotations

import base64
import json
import threading
import time

import httpx
import pytest
from frontend_support import FakeEngine, byte_level_tokenizer, draw, served

from megatron_rollout.frontend.client import NotServing

pytestmark = pytest.mark.timeout(180)
TOKENIZER = byte_level_tokenizer()


@pytest.fixture(scope="module")
def cell():
    engine = FakeEngine(TOKENIZER)
    with served(engine) as handle, httpx.Client(base_url=handle.url, timeout=60) as client:
        yield engine, client


@pytest.fixture
def own_cell():
    """A cell whose state a test may change."""
    engine = FakeEngine(TOKENIZER, step_s=0.005)
    with served(engine, ping_timeout_s=0.5) as handle, httpx.Client(base_url=handle.url, timeout=60) as client:
        yield engine, client


def generate(client: httpx.Client, **body) -> dict:
    response = client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, **body) -> list[dict]:
    with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_what_slime_sends_gets_what_slime_reads(cell):
    engine, client = cell
    ids = [5, 6, 7]
    out = generate(
        client, input_ids=ids, return_logprob=True,
        sampling_params={
            "temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_new_tokens": 6, "stop": None, "stop_token_ids": None,
            "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
            "sampling_seed": 9,
        },
    )  # fmt: skip
    expected = [draw(tuple(ids), 9, position, engine.vocab) for position in range(6)]
    meta = out["meta_info"]
    assert meta["output_token_logprobs"] == [[logprob, token, None] for token, logprob in expected]
    assert out["output_ids"] == [token for token, _ in expected]
    assert out["text"] == TOKENIZER.decode(out["output_ids"])
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 6, 1)
    assert meta["weight_version"] == "3" and meta["weight_versions"] == [[0, 3]]
    assert meta["input_token_logprobs"] == []
    sampling = engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.seed, sampling.max_new_tokens) == (0.8, 9, 6)


def test_no_logprobs_unless_asked_for(cell):
    _, client = cell
    out = generate(client, text="the cat", sampling_params={"max_new_tokens": 2})
    assert not [name for name in out["meta_info"] if "logprob" in name]


def test_prompt_scoring_as_miles_does_it(cell):
    """max_new_tokens 0, logprobs from logprob_start_len on, the first without a value."""
    _, client = cell
    ids = [5, 6, 7, 8, 9]
    out = generate(
        client, input_ids=ids, return_logprob=True, logprob_start_len=2, top_logprobs_num=2,
        sampling_params={"max_new_tokens": 0, "temperature": 0},
    )  # fmt: skip
    meta = out["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 7, None], [-1.5, 8, None], [-2.0, 9, None]]
    assert meta["output_token_logprobs"] == [] and meta["completion_tokens"] == 0 and out["text"] == ""
    assert meta["finish_reason"]["type"] == "length"


def test_alternatives_and_texts_of_tokens(cell):
    _, client = cell
    out = generate(
        client, text="x", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True,
        sampling_params={"max_new_tokens": 3},
    )  # fmt: skip
    meta = out["meta_info"]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]
    assert [entry[2] for entry in meta["output_token_logprobs"]] == [TOKENIZER.decode([i]) for i in out["output_ids"]]


def test_batches_and_n(cell):
    engine, client = cell
    out = generate(client, input_ids=[[5], [6, 7]], sampling_params={"max_new_tokens": 3, "sampling_seed": 1}, rid="b")
    assert [item["meta_info"]["prompt_tokens"] for item in out] == [1, 2]
    assert [item["meta_info"]["id"] for item in out] == ["b_0", "b_1"]
    out = generate(
        client, text=["a", "b"], rid=["r0", "r1"], return_logprob=[True, False],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
    )  # fmt: skip
    assert [item["meta_info"]["completion_tokens"] for item in out] == [1, 2]
    assert ["output_token_logprobs" in item["meta_info"] for item in out] == [True, False]
    assert isinstance(generate(client, text=["a"], sampling_params={"max_new_tokens": 1}), list)
    assert isinstance(generate(client, input_ids=[[5]], sampling_params={"max_new_tokens": 1}), list)

    many = generate(client, text="the cat", sampling_params={"n": 4, "max_new_tokens": 8, "sampling_seed": 7})
    again = generate(client, text="the cat", sampling_params={"n": 4, "max_new_tokens": 8, "sampling_seed": 7})
    assert [item["text"] for item in many] == [item["text"] for item in again]
    assert len({item["text"] for item in many}) == 4
    same = generate(client, input_ids=[[5, 6]] * 4, sampling_params={"max_new_tokens": 8, "sampling_seed": 7})
    assert len({item["text"] for item in same}) == 4  # a batch of one prompt is not four times one sample


def test_streams_repeat_what_came_before(own_cell):
    _, client = own_cell
    body = {"text": "x", "return_logprob": True, "sampling_params": {"max_new_tokens": 20, "sampling_seed": 4}}
    whole = generate(client, **body)
    chunks = events(client, **body)
    assert len(chunks) > 3
    for earlier, later in zip(chunks, chunks[1:], strict=False):
        assert later["text"].startswith(earlier["text"])
        entries = earlier["meta_info"]["output_token_logprobs"]
        assert later["meta_info"]["output_token_logprobs"][: len(entries)] == entries
        assert earlier["meta_info"]["finish_reason"] is None
        assert len(entries) == earlier["meta_info"]["completion_tokens"] == len(earlier["output_ids"])
    last = chunks[-1]
    assert last["text"] == whole["text"] and last["output_ids"] == whole["output_ids"]
    assert last["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]

    params = {"max_new_tokens": 20, "sampling_seed": 4, "stream_interval": 8}
    sizes = [chunk["meta_info"]["completion_tokens"] for chunk in events(client, text="x", sampling_params=params)]
    assert len(sizes) <= 3 and sizes[-1] == 20

    batch = events(client, text=["x", "y"], sampling_params={"max_new_tokens": 5})
    assert {chunk["index"] for chunk in batch} == {0, 1}


@pytest.mark.parametrize("keep", [False, True])
def test_g13_stop_string(keep):
    engine = FakeEngine(TOKENIZER, script=TOKENIZER.encode("the cat sat on the mat"))
    with served(engine) as handle, httpx.Client(base_url=handle.url, timeout=60) as client:
        body = {"text": "x", "return_logprob": True}
        body["sampling_params"] = {"max_new_tokens": 50, "stop": ["mat", "cat s"], "no_stop_trim": keep}
        for out in (generate(client, **body), events(client, **body)[-1]):
            assert out["text"] == ("the cat s" if keep else "the ")
            assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": "cat s"}
            assert "cat s" in TOKENIZER.decode(out["output_ids"])
            assert len(out["output_ids"]) == len(out["meta_info"]["output_token_logprobs"])


def test_g11_null_and_absent_fields_have_their_defaults(cell):
    engine, client = cell
    names = (
        "rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num",
        "return_text_in_logprobs", "stream", "image_data", "lora_path", "return_hidden_states", "token_ids_logprob",
        "return_routed_experts", "session_params", "model", "no_logs", "log_metrics", "bootstrap_host",
    )  # fmt: skip
    assert generate(client, text="x", **dict.fromkeys(names))["meta_info"]["completion_tokens"] > 0
    fields = (
        "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "n",
        "sampling_seed", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens", "custom_params",
        "frequency_penalty", "repetition_penalty", "regex", "json_schema", "logit_bias", "min_new_tokens",
        "stream_interval",
    )  # fmt: skip
    generate(client, text="x", sampling_params=dict.fromkeys(fields))
    sampling = engine.submitted[-1].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (128, 1.0, 1.0, -1)
    # what sglang-router 0.3.2 adds of its own, and neutral values of what the engine lacks
    router = {"model": None, "log_metrics": True, "return_hidden_states": False, "background": False, "no_logs": False}
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0, "max_new_tokens": 1}
    generate(client, text="x", sampling_params=neutral, **router)


BAD = [
    ({}, "exactly one of text and input_ids"),
    ({"text": "x", "input_ids": [1]}, "exactly one of text and input_ids"),
    ({"text": [[1]]}, "text: must hold strings only"),
    ({"input_ids": "x"}, "input_ids: must hold token ids only"),
    ({"input_ids": [[1], []]}, "input_ids[1]: must be a string or a non-empty list of token ids, got []"),
    ({"input_ids": [[1], [500]]}, "input_ids[1]: token 500 at position 0 is outside the vocabulary of 320"),
    ({"input_ids": [1.5]}, "input_ids[0]: must be a string or a non-empty list of token ids, got 1.5"),
    ({"text": "x", "sampling_params": {"temperature": -0.5}}, "temperature must be a finite number >= 0, got -0.5"),
    ({"text": "x", "sampling_params": {"top_p": 1.5}}, "top_p must be in [0, 1], got 1.5"),
    ({"text": "x", "sampling_params": {"max_new_token": 5}}, "max_new_token: extra inputs are not permitted, got 5"),
    ({"text": "x", "sampling_params": {"min_p": 0.1}}, "min_p is not supported by the Megatron engine (got 0.1)"),
    (
        {"text": "x", "sampling_params": {"custom_params": {"return_top_p_token_ids": True}}},
        "custom_params is not supported",
    ),
    ({"text": "x", "sampling_params": 5}, "sampling_params"),
    ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params: 1 for 2 prompts"),
    ({"text": ["x", "y"], "rid": ["a", "a"]}, "rid: needs 2 different non-empty ids, got 1"),
    ({"text": ["x", "y"], "return_logprob": [True]}, "return_logprob: 1 values for 2 prompts"),
    ({"text": "x", "return_logprob": True, "logprob_start_len": 99}, "logprob_start_len: 99 is outside the prompt"),
    ({"text": "x", "return_logprob": True, "top_logprobs_num": 999}, "top_logprobs_num: 999 is more than"),
    ({"text": "x", "image_data": ["u"]}, "image_data is not supported"),
    ({"text": "x", "lora_path": "a"}, "lora_path is not supported"),
    ({"text": "x", "return_routed_experts": True}, "return_routed_experts is not supported"),
    ({"input_ids": [5] * 257}, "input_ids: the prompt has 257 tokens, the model's context 256"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=range(len(BAD)))
def test_bad_requests_are_refused_in_one_line(cell, body, message):
    _, client = cell
    for stream in (False, True):
        response = client.post("/generate", json={**body, "stream": stream})
        assert response.status_code == 400
        said = response.json()["error"]["message"]
        assert message in said and "\n" not in said


def test_bodies_that_are_no_json_object(cell):
    _, client = cell
    for content, message in ((b"{", "not valid JSON"), (b"[1]", "must be a JSON object, got list"), (b"\xff", "JSON")):
        response = client.post("/generate", content=content)
        assert response.status_code == 400 and message in response.json()["message"]
    assert client.post("/nowhere").status_code == 404
    assert "not found" in client.post("/nowhere").json()["error"]["message"]
    assert client.get("/generate").status_code == 405


def test_abort_keeps_what_was_generated(own_cell):
    engine, client = own_cell
    for body in ({"rid": "mine"}, {"abort_all": True}, {"rid": "", "abort_all": True}):
        results = []
        worker = threading.Thread(
            target=lambda results=results: results.append(
                generate(client, text="x", rid="mine", return_logprob=True, sampling_params={"max_new_tokens": 250})
            )
        )
        worker.start()
        wait_for(lambda: engine.status().running_requests == 1)
        loads = client.get("/v1/loads?include=core").json()["loads"]
        assert loads[0]["num_running_reqs"] + loads[0]["num_waiting_reqs"] == loads[0]["num_reqs"] == 1
        time.sleep(0.05)
        assert client.post("/abort_request", json=body).status_code == 200
        worker.join(60)
        meta = results[0]["meta_info"]
        assert meta["finish_reason"]["type"] == "abort" and 0 < meta["completion_tokens"] < 250
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        assert client.get("/v1/loads?include=core").json()["loads"][0]["num_reqs"] == 0
    assert "rid: is required" in client.post("/abort_request", json={}).json()["message"]
    assert client.post("/abort_request", json={"rid": "long gone"}).status_code == 200


def test_abort_of_a_batch_by_the_id_it_was_sent_under(own_cell):
    engine, client = own_cell
    results = []
    body = {"text": ["x", "y", "z"], "rid": "batch", "sampling_params": {"max_new_tokens": 250}}
    worker = threading.Thread(target=lambda: results.extend(generate(client, **body)))
    worker.start()
    wait_for(lambda: engine.status().running_requests == 3)
    response = client.post("/generate", json={"text": "x", "rid": "batch"})
    assert response.status_code == 400 and "'batch' is in flight already" in response.json()["message"]
    client.post("/abort_request", json={"rid": "batch"})
    worker.join(60)
    assert [item["meta_info"]["finish_reason"]["type"] for item in results] == ["abort"] * 3


def wait_for(condition, timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_pause_flush_and_continue_with_a_request_in_flight(own_cell):
    engine, client = own_cell
    results = []
    worker = threading.Thread(
        target=lambda: results.append(generate(client, text="x", sampling_params={"max_new_tokens": 60}))
    )
    worker.start()
    wait_for(lambda: engine.status().running_requests == 1)
    refused = client.get("/flush_cache")
    assert refused.status_code == 400 and "held by 1 requests" in refused.json()["message"]
    assert client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    assert client.get("/health").status_code == 200  # a paused cell serves: requests wait
    assert client.post("/flush_cache").status_code == 200
    assert client.post("/update_weight_version", json={"new_version": "4"}).json()["success"]
    assert client.post("/continue_generation", json={}).status_code == 200
    worker.join(60)
    meta = results[0]["meta_info"]
    assert meta["completion_tokens"] == 60 and meta["weight_version"] == "4"
    assert [version for _, version in meta["weight_versions"]] == [3, 4]
    assert client.get("/flush_cache", params={"timeout": "5"}).status_code == 200
    assert "timeout: must be between" in client.get("/flush_cache", params={"timeout": "x"}).json()["message"]
    assert client.post("/pause_generation", json={"mode": "now"}).status_code == 400


def test_pause_without_a_mode_aborts_as_sglang_does(own_cell):
    engine, client = own_cell
    client.post("/pause_generation", json={})
    assert engine.commands[-1] == ("pause", {"mode": "abort"})


def test_facts(cell):
    _, client = cell
    for path in ("/server_info", "/get_server_info"):
        info = client.get(path).json()
        assert (info["tp_size"], info["pp_size"], info["dp_size"], info["num_gpus"]) == (2, 1, 1, 2)
        assert info["internal_states"][0]["num_reqs"] == 0 and info["served_model_name"] == "fake-model"
    for path in ("/model_info", "/get_model_info"):
        info = client.get(path).json()
        assert info["is_generation"] and info["weight_version"] == "3" and info["model_path"] == "fake-model"
    assert client.get("/get_weight_version").json() == {"weight_version": "3"}
    assert client.get("/get_load").json()[0]["num_reqs"] == 0


def test_weight_endpoints_reach_the_engine_with_their_arguments(own_cell):
    engine, client = own_cell

    def post(path, **body):
        response = client.post(path, json=body)
        assert response.status_code == 200 and response.json()["success"], response.text
        return engine.commands[-1]

    group = {"master_address": "127.0.0.1", "master_port": 2000, "rank_offset": 1, "world_size": 2}
    name, arguments = post("/init_weights_update_group", **group, group_name="g", backend="gloo")
    assert (name, arguments) == ("init_weights_update_group", {**group, "group_name": "g", "backend": "gloo"})
    assert post("/begin_weight_update", selector="all") == ("begin_weight_update", {"selector": "all"})
    update = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "group_name": "g"}
    name, arguments = post("/update_weights_from_distributed", **update, flush_cache=False, weight_version="5")
    assert name == "update_weights_from_distributed"
    assert arguments == {**update, "flush_cache": False, "weight_version": 5, "load_format": None}
    name, arguments = post(
        "/update_weights_from_tensor", serialized_named_tensors=[base64.b64encode(b"ab").decode()], weight_version=None
    )
    assert arguments["serialized_named_tensors"] == [b"ab"] and arguments["weight_version"] is None
    name, arguments = post("/update_weights_from_disk", model_path="m", weight_version="6")
    assert (name, arguments["model_path"], arguments["weight_version"]) == ("update_weights_from_disk", "m", 6)
    assert post("/end_weight_update")[0] == "end_weight_update"
    assert client.get("/get_weight_version").json() == {"weight_version": "6"}
    assert client.post("/weights_checker", json={"action": "checksum"}).json()["checksum"] == "abc"
    assert post("/destroy_weights_update_group", group_name="g")[1] == {"group_name": "g"}
    assert post("/release_memory_occupation")[1] == {"tags": None}
    assert post("/resume_memory_occupation", tags=["weights"])[1] == {"tags": ("weights",)}
    assert client.post("/start_profile", json={"num_steps": 3}).status_code == 200
    assert engine.commands[-1][1]["num_steps"] == 3
    assert client.post("/stop_profile").status_code == 200
    assert client.post("/post_process_weights", json={}).json()["success"]


def test_weight_endpoints_refuse_what_is_wrong(own_cell):
    engine, client = own_cell
    group = {"master_address": "h", "master_port": 1, "rank_offset": 2, "world_size": 2}
    lengths = {"names": ["a"], "dtypes": [], "shapes": []}
    bad = [
        ("/update_weights_from_distributed", lengths, "equal lengths, they have 1, 0 and 0"),
        ("/update_weights_from_distributed", {}, "names: is required; dtypes: is required; shapes: is required"),
        ("/update_weights_from_disk", {"model_path": "m", "weight_version": "new"}, "a version number >= 0, got 'new'"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["?"]}, "not base64"),
        ("/update_weight_version", {"new_version": "default"}, "new_version: must be a version number"),
        ("/init_weights_update_group", group, "rank_offset: 2 is not below world_size 2"),
        ("/release_memory_occupation", {"tags": ["kv"]}, "tags: unknown 'kv'; known are weights, kv_cache"),
        ("/load_lora_adapter", {}, "/load_lora_adapter is not supported"),
    ]
    for path, body, message in bad:
        response = client.post(path, json=body)
        assert response.status_code == 400 and message in response.json()["message"], (path, response.text)
    assert engine.commands == []
    failures = ((ValueError("missing: layers.0"), 400), (NotServing("asleep"), 503), (OSError("disk"), 500))
    for failure, status in failures:
        engine.command_failure = failure
        response = client.post("/update_weights_from_disk", json={"model_path": "m"})
        assert response.status_code == status and str(failure) in response.json()["message"]


def test_health_follows_the_cells_state(own_cell):
    engine, client = own_cell
    assert client.get("/health").status_code == client.get("/health_generate").status_code == 200
    engine.serving, engine.state, engine.reason = False, "STARTING", "weights have not landed"
    for path in ("/health", "/health_generate"):
        response = client.get(path)
        assert response.status_code == 503 and "STARTING: weights have not landed" in response.json()["message"]
    assert client.post("/generate", json={"text": "x"}).status_code == 503
    engine.serving = True
    engine.close()  # the loop no longer turns: alive, but without progress
    assert client.get("/health").status_code == 200
    stuck = client.get("/health_generate")
    assert stuck.status_code == 504 and "ping: the engine did not answer within 0.5 s" in stuck.json()["message"]
