"""The OpenAI wire through the official client, against a live server on loopback with a stand-in engine."""

from __future__ import annotations

import math

import openai
import pytest
from frontend_support import FakeEngine, byte_level_tokenizer, draw, served

from megatron_rollout.frontend.inflight import choice_seed

pytestmark = pytest.mark.timeout(180)
TOKENIZER = byte_level_tokenizer()


@pytest.fixture(scope="module")
def cell():
    engine = FakeEngine(TOKENIZER)
    with served(engine) as handle:
        client = openai.OpenAI(base_url=f"{handle.url}/v1", api_key="none", max_retries=0, timeout=60)
        yield engine, client
        client.close()


def scripted(text: str, **options):
    """A cell whose every response is `text`, then end of text."""
    return FakeEngine(TOKENIZER, script=TOKENIZER.encode(text), **options)


def client_of(handle) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{handle.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_models(cell):
    _, client = cell
    assert [m.id for m in client.models.list()] == ["fake-model"]
    assert client.models.retrieve("fake-model").max_model_len == 256
    with pytest.raises(openai.NotFoundError, match="'other' does not exist; this server has 'fake-model'"):
        client.models.retrieve("other")


def test_completion_returns_what_was_sampled(cell):
    engine, client = cell
    ids = (5, 6, 7)
    out = client.completions.create(model="m", prompt=list(ids), max_tokens=8, seed=7, logprobs=2)
    choice = out.choices[0]
    expected = [draw(ids, 7, position, engine.vocab) for position in range(8)]
    assert choice.generation_token_ids == [token for token, _ in expected]
    assert choice.generation_log_probs == [logprob for _, logprob in expected]
    assert choice.prompt_token_ids == list(ids)
    assert choice.text == TOKENIZER.decode(choice.generation_token_ids)
    assert choice.finish_reason == "length"
    assert out.weight_version == choice.weight_version == 3
    assert choice.weight_versions == [[0, 3]]
    assert (out.usage.prompt_tokens, out.usage.completion_tokens, out.usage.total_tokens) == (3, 8, 11)
    table = choice.logprobs
    assert table.token_logprobs == choice.generation_log_probs
    assert len(table.tokens) == len(table.top_logprobs) == len(table.text_offset) == 8
    assert all(table.tokens[i] in table.top_logprobs[i] for i in range(8))


def test_prompts_of_all_forms(cell):
    _, client = cell
    text, ids = "the cat", [9, 8, 7]
    for prompt, prompts in (
        (text, [TOKENIZER.encode(text)]),
        (ids, [ids]),
        ([text, "sat"], [TOKENIZER.encode(text), TOKENIZER.encode("sat")]),
        ([ids, [4]], [ids, [4]]),
        ([text, ids], [TOKENIZER.encode(text), ids]),
    ):
        out = client.completions.create(model="m", prompt=prompt, max_tokens=2)
        assert [choice.prompt_token_ids for choice in out.choices] == prompts
        assert [choice.index for choice in out.choices] == list(range(len(prompts)))


def test_g05_n_samples_differ_and_a_seed_repeats(cell):
    engine, client = cell
    runs = [client.completions.create(model="m", prompt="the cat", n=4, seed=7, max_tokens=12) for _ in range(2)]
    texts = [[choice.text for choice in run.choices] for run in runs]
    usage = runs[0].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(TOKENIZER.encode("the cat")), 48)
    assert texts[0] == texts[1] and len(set(texts[0])) == 4
    assert [r.sampling.seed for r in engine.submitted[-4:]] == [choice_seed(7, i) for i in range(4)]
    assert len({r.group for r in engine.submitted[-4:]}) == 1
    alone = client.completions.create(model="m", prompt="the cat", seed=7, max_tokens=12)
    assert alone.choices[0].text == texts[0][0]  # sample 0 draws the seed's own noise


def test_g04_max_tokens_zero_with_echo_scores_the_prompt(cell):
    _, client = cell
    ids = TOKENIZER.encode("the cat")
    out = client.completions.create(model="m", prompt="the cat", max_tokens=0, echo=True, logprobs=1)
    choice = out.choices[0]
    assert choice.text == "the cat" and choice.generation_token_ids == [] == choice.generation_log_probs
    assert choice.logprobs.token_logprobs == [None, *(-0.5 * i for i in range(1, len(ids)))]
    assert len(choice.logprobs.tokens) == len(ids) and choice.logprobs.top_logprobs[0] is None
    assert out.usage.completion_tokens == 0
    plain = client.completions.create(model="m", prompt="the cat", max_tokens=0)
    assert plain.choices[0].text == "" and plain.choices[0].logprobs is None


def test_echo_with_a_response_has_one_table_for_both(cell):
    _, client = cell
    choice = client.completions.create(model="m", prompt="the cat", max_tokens=3, echo=True, logprobs=0).choices[0]
    assert choice.text == "the cat" + TOKENIZER.decode(choice.generation_token_ids)
    assert choice.logprobs.token_logprobs[-3:] == choice.generation_log_probs
    assert choice.logprobs.text_offset[0] == 0 and choice.logprobs.top_logprobs is None


def test_chat_uses_the_template_and_streams_the_same_text(cell):
    engine, client = cell
    messages = [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]
    plain = client.chat.completions.create(
        model="m", messages=messages, max_tokens=24, seed=3, logprobs=True, top_logprobs=2
    )
    choice = plain.choices[0]
    rendered = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(choice.prompt_token_ids) == rendered
    assert choice.message.content == TOKENIZER.decode(choice.generation_token_ids)
    content = choice.logprobs.content
    assert [entry.logprob for entry in content] == choice.generation_log_probs
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == choice.message.content

    stream = client.chat.completions.create(
        model="m", messages=messages, max_tokens=24, seed=3, logprobs=True, top_logprobs=2, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(c.delta.content for c in choices) == choice.message.content
    assert sum((c.generation_token_ids for c in choices), []) == choice.generation_token_ids
    assert sum((c.generation_log_probs for c in choices), []) == choice.generation_log_probs
    assert sum(len(c.logprobs.content) for c in choices if c.logprobs) == 24
    assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]
    assert choices[-1].weight_version == 3 and choices[0].prompt_token_ids == choice.prompt_token_ids
    assert chunks[-1].usage.completion_tokens == 24


def test_completion_stream_of_several_choices(cell):
    _, client = cell
    whole = client.completions.create(model="m", prompt=["the", "cat"], n=2, seed=1, max_tokens=10, logprobs=0)
    texts, logprobs = [""] * 4, [[] for _ in range(4)]
    offsets: list[list[int]] = [[] for _ in range(4)]
    for chunk in client.completions.create(
        model="m", prompt=["the", "cat"], n=2, seed=1, max_tokens=10, logprobs=0, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs:
                logprobs[choice.index] += choice.logprobs.token_logprobs
                offsets[choice.index] += choice.logprobs.text_offset
    assert texts == [choice.text for choice in whole.choices]
    assert logprobs == [choice.generation_log_probs for choice in whole.choices]
    assert all(list(part) == sorted(part) and part[0] == 0 for part in offsets)


@pytest.mark.parametrize("stream", [False, True])
def test_g13_stop_string_cuts_the_text_but_not_the_tokens(stream):
    with served(scripted("the cat sat on the mat")) as handle, client_of(handle) as client:
        out = client.completions.create(model="m", prompt="x", max_tokens=50, stop="cat s", stream=stream)
        choices = [chunk.choices[0] for chunk in out] if stream else [out.choices[0]]
        ids = sum((choice.generation_token_ids for choice in choices), [])
        logprobs = sum((choice.generation_log_probs for choice in choices), [])
        assert "".join(choice.text for choice in choices) == "the "
        assert len(ids) == len(logprobs) and "cat s" in TOKENIZER.decode(ids)
        assert (choices[-1].finish_reason, choices[-1].matched_stop) == ("stop", "cat s")


@pytest.mark.parametrize("stream", [False, True])
def test_end_of_text_and_stop_token_ids(stream):
    with served(scripted("the cat 😀 sat")) as handle, client_of(handle) as client:

        def text_of(**options):
            out = client.completions.create(model="m", prompt="x", max_tokens=50, stream=stream, extra_body=options)
            choices = [chunk.choices[0] for chunk in out] if stream else [out.choices[0]]
            pieces = [choice.text for choice in choices]
            assert not any("\ufffd" in piece for piece in pieces)
            return "".join(pieces), sum((choice.generation_token_ids for choice in choices), [])

        whole = TOKENIZER.encode("the cat 😀 sat")
        assert text_of() == ("the cat 😀 sat", [*whole, TOKENIZER.eos_token_id])
        stop = TOKENIZER.encode(" cat")[-1]
        text, ids = text_of(stop_token_ids=[stop])
        assert text == TOKENIZER.decode(ids[:-1]) and ids[-1] == stop
        assert text_of(skip_special_tokens=False, no_stop_trim=True)[0] == "the cat 😀 sat<|im_end|>"


def test_g07_logprobs_absent_null_and_top_logprobs_null(cell):
    _, client = cell
    messages = [{"role": "user", "content": "hi"}]
    absent = client.chat.completions.create(model="m", messages=messages, max_tokens=2)
    assert absent.choices[0].logprobs is None
    null = client.chat.completions.create(
        model="m", messages=messages, max_tokens=2, logprobs=True, extra_body={"top_logprobs": None}
    )
    assert [entry.top_logprobs for entry in null.choices[0].logprobs.content] == [[], []]
    assert client.completions.create(model="m", prompt="x", max_tokens=2, logprobs=None).choices[0].logprobs is None


NULLABLE = (
    "n", "seed", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "stream", "stream_options", "logprobs", "top_logprobs", "max_tokens", "max_completion_tokens", "tools",
    "tool_choice", "response_format", "chat_template_kwargs", "user", "frequency_penalty", "presence_penalty",
    "logit_bias", "metadata", "input_ids", "return_token_ids",
)  # fmt: skip


def test_g11_null_fields_have_their_defaults(cell):
    engine, client = cell
    nulls = dict.fromkeys(NULLABLE)
    messages = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model="m", messages=messages, extra_body=nulls)
    sampling = engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, -1, None)
    assert len(chat.choices) == 1 and chat.usage.total_tokens == 256  # no limit: the model's context
    body = {name: None for name in NULLABLE if name != "input_ids"} | {"suffix": None, "echo": None}
    assert client.completions.create(model="m", prompt="x", extra_body=body).usage.completion_tokens == 16


BAD = [
    ({"temperature": -0.5}, "temperature must be a finite number >= 0, got -0.5"),  # G01
    ({"top_p": 1.5}, r"top_p must be in \[0, 1\], got 1.5"),  # G02
    ({"temperature": "hot"}, "temperature: input should be a valid number, got 'hot'"),
    ({"max_tokens": -1}, "max_tokens: input should be greater than or equal to 0, got -1"),
    ({"max_tokens": True}, "max_tokens: input should be a valid integer, got True"),
    ({"n": 0}, "n: input should be greater than or equal to 1, got 0"),
    ({"n": 5000}, "n: 1 prompts times n=5000 are more than the 1024"),
    ({"seed": 1 << 64}, "seed: input should be a valid integer, got 1.8446744073709552e"),
    ({"stop": [""]}, "stop strings must not be empty"),
    ({"logit_bias": {"1": 1}}, "logit_bias is not supported by the Megatron engine"),
    ({"frequency_penalty": 0.5}, "frequency_penalty is not supported"),
    ({"prompt": []}, "prompt: is empty"),
    ({"prompt": None}, "prompt: is required"),
    ({"prompt": ""}, "prompt: the prompt has no tokens"),
    ({"prompt": [1, "x"]}, r"prompt\[0\]: must be a string or a non-empty list of token ids, got 1"),
    ({"prompt": [1, 400]}, "prompt: token 400 at position 1 is outside the vocabulary of 320"),
    ({"prompt": [-1]}, "prompt: token -1 at position 0 is outside the vocabulary"),
    ({"prompt": [[1], [5] * 300]}, r"prompt\[1\]: the prompt has 300 tokens, the model's context 256"),  # G14
    ({"logprobs": 21}, "top_logprobs: 21 is more than 20"),
    ({"stream": True, "echo": True, "logprobs": 1}, "echo: with logprobs it cannot be streamed"),
    ({"temperature": "a", "n": "b"}, "n: .*got 'b'; temperature: .*got 'a'"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[str(sorted(b)) + str(i) for i, (b, _) in enumerate(BAD)])
def test_bad_completions_are_refused_in_one_line(cell, body, message):
    _, client = cell
    with pytest.raises(openai.BadRequestError, match=message) as error:
        client.completions.create(model="m", prompt="x", extra_body=body)
    assert "\n" not in error.value.body["message"]


CHAT_BAD = [
    ({"messages": []}, "messages: is required"),
    ({"messages": [{"content": "x"}]}, "messages.0.role: is required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: must be a string or a list of parts, got 5"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0: image_url parts are not supported",
    ),
    ({"top_logprobs": 2}, "top_logprobs: needs logprobs to be true"),
    ({"response_format": {"type": "json_object"}}, "response_format: only text is supported"),
    ({"tool_choice": "required"}, "tool_choice: only auto and none"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs: tokenize may not be set"),
    ({"input_ids": "x"}, "input_ids: must be a non-empty list of token ids"),
    ({"return_routed_experts": True}, "return_routed_experts is not supported"),
]


@pytest.mark.parametrize(("body", "message"), CHAT_BAD)
def test_bad_chats_are_refused_in_one_line(cell, body, message):
    _, client = cell
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], extra_body=body)


def test_g14_prompt_as_long_as_the_context_gets_one_token(cell):
    _, client = cell
    out = client.completions.create(model="m", prompt=[5] * 256, max_tokens=10)
    assert out.usage.completion_tokens == 1 and out.choices[0].finish_reason == "length"


def test_g02_top_p_zero_reaches_the_engine_as_it_is(cell):
    """0.0 is defined (the most likely token only) and is not turned into greedy with its other logprobs."""
    engine, client = cell
    client.completions.create(model="m", prompt="x", top_p=0.0, max_tokens=1)
    assert engine.submitted[-1].sampling.top_p == 0.0 and not engine.submitted[-1].sampling.greedy


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, math.inf])
def test_g03_no_nan_or_infinity_in_json(logprob):
    engine = FakeEngine(TOKENIZER, logprob=logprob, tops=((5, 0.0), (6, logprob)))
    expected = -9999.0 if logprob == -math.inf else None
    with served(engine) as handle, client_of(handle) as client:
        raw = client.with_raw_response.completions.create(model="m", prompt="x", max_tokens=2, logprobs=2)
        assert b"NaN" not in raw.content and b"Infinity" not in raw.content
        out = raw.parse().choices[0]
        assert out.generation_log_probs == out.logprobs.token_logprobs == [expected] * 2
        chat = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], max_tokens=1, logprobs=True, top_logprobs=2
        )
        assert [top.logprob for top in chat.choices[0].logprobs.content[0].top_logprobs] == [0.0, expected]


def test_g06_the_engines_failure_is_a_500_with_its_cause():
    engine = FakeEngine(TOKENIZER)
    engine.fail_with = RuntimeError("kernel exploded")
    with served(engine) as handle, client_of(handle) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="RuntimeError: kernel exploded"):
                client.completions.create(model="m", prompt="x", n=3, stream=stream)


def test_a_failure_in_the_middle_of_a_stream_is_an_error_event():
    engine = FakeEngine(TOKENIZER, step_s=0.01)
    with served(engine) as handle, client_of(handle) as client:
        stream = client.completions.create(model="m", prompt="x", max_tokens=100, stream=True)
        next(stream)
        engine.fail_with = RuntimeError("kernel exploded")
        with pytest.raises(openai.APIError, match="kernel exploded"):
            list(stream)


def test_not_serving_is_a_503_with_the_reason():
    engine = FakeEngine(TOKENIZER)
    engine.serving, engine.state, engine.reason = False, "STALE", "version 3, the run is at 5"
    with served(engine) as handle, client_of(handle) as client:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="STALE: version 3, the run is at 5") as e:
                client.completions.create(model="m", prompt="x", stream=stream)
            assert e.value.status_code == 503


def test_chat_takes_token_ids_and_gives_meta_info_as_sglang_does(cell):
    """What Miles' session server sends and reads."""
    _, client = cell
    out = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "ignored"}], max_tokens=3, logprobs=True,
        extra_body={"input_ids": [5, 6, 7], "return_meta_info": True, "no_stop_trim": False},
    )  # fmt: skip
    choice = out.choices[0]
    meta = choice.meta_info
    assert choice.prompt_token_ids == [5, 6, 7]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == choice.generation_token_ids
    assert meta["completion_tokens"] == 3 and meta["weight_version"] == "3"


def test_return_token_ids_false_leaves_the_extras_out(cell):
    _, client = cell
    out = client.completions.create(model="m", prompt="x", max_tokens=2, extra_body={"return_token_ids": False})
    assert not hasattr(out.choices[0], "generation_token_ids")
