"""Text of responses: cut at the stop, streamed without half characters, pieces that add up to the whole."""

from __future__ import annotations

import pytest
from frontend_support import byte_fallback_tokenizer, byte_level_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rollout.frontend.detokenize import (
    IncrementalDecoder,
    TextStream,
    TokenText,
    cut_at_stop,
    held_back,
    response_text,
)

TOKENIZERS = {"byte-level": byte_level_tokenizer(), "byte-fallback": byte_fallback_tokenizer()}
BYTE_LEVEL = TOKENIZERS["byte-level"]
TEXTS = st.text(st.sampled_from("abc the cat é你😀ß\n "), max_size=40)


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    out, start = [], 0
    while start < len(ids):
        size = sizes[len(out) % len(sizes)]
        out.append(ids[start : start + size])
        start += size
    return out


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=TEXTS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_pieces_of_text_add_up_and_never_show_half_a_character(name, text, sizes):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(part) for part in chunks(ids, sizes)] + [decoder.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=80), sizes=st.lists(st.integers(1, 4), min_size=1))
def test_any_ids_stream_to_the_text_of_the_whole(ids, sizes):
    """Also ids that are no text: a model with random weights samples them."""
    decoder = IncrementalDecoder(BYTE_LEVEL)
    streamed = "".join([decoder.push(part) for part in chunks(ids, sizes)] + [decoder.flush()])
    assert streamed == BYTE_LEVEL.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_undecodable_output_does_not_pile_up(name):
    tokenizer = TOKENIZERS[name]
    bad = next(i for i in range(len(tokenizer)) if TokenText(tokenizer).bytes(i) == [0xFF])
    decoder = IncrementalDecoder(tokenizer)
    emitted = "".join(decoder.push([bad]) for _ in range(500))
    assert len(emitted) >= 490 and set(emitted) == {"\ufffd"}
    assert len(decoder._window) < 40


def test_a_hidden_special_token_does_not_cost_the_space_after_it():
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = [*tokenizer.encode("the cat", add_special_tokens=False), tokenizer.eos_token_id]
    ids += tokenizer.encode("the", add_special_tokens=False)
    decoder = IncrementalDecoder(tokenizer)
    assert "".join(decoder.push([i]) for i in ids) + decoder.flush() == "the cat the"


def test_g13_stop_string_in_the_middle_of_a_token():
    ids = BYTE_LEVEL.encode("the cat sat on")
    text = response_text(BYTE_LEVEL, ids, "cat s", stop=("cat s",))
    assert text == "the "
    assert response_text(BYTE_LEVEL, ids, "cat s", stop=("cat s",), keep_stop=True) == "the cat s"


def test_stop_token_is_left_out_of_the_text_only_if_it_ended_the_response():
    ids = BYTE_LEVEL.encode("the cat")
    last = ids[-1]
    assert response_text(BYTE_LEVEL, ids, last) == BYTE_LEVEL.decode(ids[:-1])
    assert response_text(BYTE_LEVEL, ids, None) == "the cat"
    assert response_text(BYTE_LEVEL, ids, last, keep_stop=True) == "the cat"
    eos = BYTE_LEVEL.eos_token_id
    assert response_text(BYTE_LEVEL, [*ids, eos], eos, skip_special_tokens=False) == "the cat"
    assert response_text(BYTE_LEVEL, [*ids, eos], eos, skip_special_tokens=False, keep_stop=True) == "the cat<|im_end|>"


@settings(max_examples=200, deadline=None)
@given(
    text=TEXTS,
    stop=st.lists(st.text(st.sampled_from("abc the"), min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    keep=st.booleans(),
    ends_on_token=st.booleans(),
)
def test_a_stream_shows_what_the_whole_answer_shows(text, stop, sizes, keep, ends_on_token):
    ids = BYTE_LEVEL.encode(text)
    for end in range(1, len(ids) + 1):  # an engine ends a sample at the first token that completes a stop string
        if any(s in BYTE_LEVEL.decode(ids[:end]) for s in stop):
            ids = ids[:end]
            break
    text = BYTE_LEVEL.decode(ids)
    matched = next((s for s in stop if s in text), None)
    stop_ids = ()
    if matched is None and ends_on_token and ids:
        matched = ids[-1]
        stop_ids = (matched,)
    stream = TextStream(BYTE_LEVEL, stop=stop, stop_token_ids=stop_ids, keep_stop=keep)
    pieces = [stream.push(part) for part in chunks(ids, sizes)] + [stream.finish(matched)]
    assert "".join(pieces) == response_text(BYTE_LEVEL, ids, matched, stop=stop, keep_stop=keep)


def test_text_that_may_begin_a_stop_string_is_kept_back():
    stream = TextStream(BYTE_LEVEL, stop=["sat down"])
    assert stream.push(BYTE_LEVEL.encode("the cat sat")) == "the cat "
    assert stream.push(BYTE_LEVEL.encode(" on")) == "sat on"


def test_cutting_and_holding_back():
    assert cut_at_stop("abcdef", ["de", "bc"], False) == ("a", True)
    assert cut_at_stop("abcdef", ["b", "bcd"], True) == ("abcd", True)
    assert cut_at_stop("abc", [], False) == ("abc", False)
    assert held_back("xxST", ["STOP", "T!"]) == 2
    assert held_back("xx", ["STOP"]) == 0


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_of_single_tokens(name):
    tokens = TokenText(TOKENIZERS[name])
    ids = TOKENIZERS[name].encode("é😀", add_special_tokens=False)
    joined = [byte for token_id in ids for byte in tokens.bytes(token_id) or ()]
    assert bytes(joined).decode().strip() == "é😀"
