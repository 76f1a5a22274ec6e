"""Prompt files: what they hold arrives, what is wrong is named, and a position is exact."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_hooks.trainer.data import PromptData, read_pairs, split_slice
from trainer_hooks.trainer.sample import Sample


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def _write(*lines: Any, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(
            b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines) + b"\n"
        )
        return path

    return _write


def numbered(n: int) -> list[dict[str, Any]]:
    return [{"input": f"prompt {i}", "label": i} for i in range(n)]


def test_keys_blank_lines_and_metadata(write: Any) -> None:
    path = write(
        b"\xef\xbb\xbf" + json.dumps({"q": "één", "a": 3, "extra": {"level": [1]}, "note": "ignored"}).encode(),
        b"",
        {"q": "two", "a": None, "extra": None},
    )
    data = PromptData(path, input_key="q", label_key="a", metadata_key="extra", n_samples_per_prompt=2)
    samples = data.next_batch(2)
    assert [(s.prompt, s.label, s.group_index, s.index) for s in samples] == [
        ("één", 3, 0, 0),
        ("één", 3, 0, 1),
        ("two", None, 1, 2),
        ("two", None, 1, 3),
    ]
    assert samples[0].metadata == {"level": [1]} and samples[2].metadata == {}
    samples[0].metadata["level"].append(2)
    assert samples[1].metadata == data.all()[0].metadata == {"level": [1]}, "samples of a prompt share nothing"


BAD_LINES = {
    "not json": (b'{"input": "x"', "line 2", "not valid JSON"),
    "no object": (["x"], "line 2", "a JSON object is needed, got list"),
    "not utf-8": (b'{"input": "\xff"}', "line 2", "not UTF-8"),
    "no prompt": ({"text": "x", "label": 1}, "line 2", "no key 'input' (--input-key); it has label, text"),
    "no label": ({"input": "x"}, "line 2", "no key 'label' (--label-key); it has input"),
    "nothing": ({}, "line 2", "it has none"),
    "number": ({"input": 5, "label": 1}, "line 2", "'input' must be a string, got int"),
    "empty": ({"input": "", "label": 1}, "line 2", "'input' is empty"),
    "conversation": (
        {"input": [{"role": "user", "content": "x"}], "label": 1},
        "line 2",
        "got list; a conversation needs --apply-chat-template",
    ),
    "metadata": (
        {"input": "x", "label": 1, "metadata": "y"},
        "line 2",
        "'metadata' (--metadata-key) must be an object",
    ),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_lines_are_named(write: Any, name: str) -> None:
    line, *expected = BAD_LINES[name]
    path = write({"input": "fine", "label": 0}, line)
    with pytest.raises(ValueError) as error:
        PromptData(path, input_key="input", label_key="label", option="--eval-prompt-data")
    message = str(error.value)
    assert message.startswith(f"--eval-prompt-data {path}, ") and "\n" not in message
    assert all(part in message for part in expected), message


def test_files_that_cannot_be_read_are_named(tmp_path: Path, write: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"^--prompt-data .*missing\.jsonl: No such file"):
        PromptData(tmp_path / "missing.jsonl", input_key="input")
    with pytest.raises(IsADirectoryError, match="^--prompt-data"):
        PromptData(tmp_path, input_key="input")
    with pytest.raises(ValueError, match="there is no prompt in it"):
        PromptData(write(b"", b"  "), input_key="input")


def test_slices(write: Any) -> None:
    path = write(*numbered(5))
    assert split_slice("a@b.jsonl") == ("a@b.jsonl", slice(None))
    for text, expected in {"[1:3]": [1, 2], "[:2]": [0, 1], "[-1:]": [4], "[:]": [0, 1, 2, 3, 4]}.items():
        data = PromptData(f"{path}@{text}", input_key="input", label_key="label")
        assert [s.label for s in data.all()] == expected
    with pytest.raises(ValueError, match="there is no prompt"):
        PromptData(f"{path}@[9:]", input_key="input")


def test_warm_up_pairs(write: Any) -> None:
    assert read_pairs(write(*numbered(2)), input_key="input", label_key="label") == [
        ("prompt 0", "0"),
        ("prompt 1", "1"),
    ]
    with pytest.raises(ValueError, match="--label-key"):
        read_pairs(write(*numbered(2)), input_key="input", label_key=None)
    with pytest.raises(ValueError, match="--warmup-data .*, line 1: no key 'answer'"):
        read_pairs(write(*numbered(2)), input_key="input", label_key="answer")
    with pytest.raises(ValueError, match="--warmup-data .*no example"):
        read_pairs(write(b""), input_key="input", label_key="label")


# -- chat templates -------------------------------------------------------------------------------------------------


class Templated:
    """A tokenizer's border: what `apply_chat_template` of transformers gets and gives."""

    chat_template = "any"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        assert not tokenize and add_generation_prompt
        if messages[0]["role"] == "tool":
            raise TemplateError("a conversation begins with a user")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def test_chat_template(write: Any) -> None:
    path = write({"input": "plain"}, {"input": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]})
    data = PromptData(path, input_key="input", tokenizer=Templated(), apply_chat_template=True)
    assert [p.prompt for p in data.prompts] == ["<user>plain<assistant>", "<system>s<user>u<assistant>"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"role": "tool", "content": "x"}], "a conversation begins with a user"),
        ([{"content": "x"}], "list of messages with a 'role'"),
        ([], "list of messages with a 'role'"),
        (["x"], "list of messages with a 'role'"),
    ],
)
def test_conversations_that_the_template_refuses(write: Any, value: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^--prompt-data .*, line 1: .*{expected}"):
        PromptData(write({"input": value}), input_key="input", tokenizer=Templated(), apply_chat_template=True)


def test_no_chat_template(write: Any) -> None:
    with pytest.raises(ValueError, match="^--apply-chat-template: .* no chat template"):
        PromptData(write({"input": "x"}), input_key="input", tokenizer=object(), apply_chat_template=True)


# -- epochs and positions -------------------------------------------------------------------------------------------


def labels(samples: list[Sample]) -> list[int]:
    return [s.label for s in samples]


def test_unshuffled_epochs_follow_the_file(write: Any) -> None:
    data = PromptData(write(*numbered(3)), input_key="input", label_key="label")
    assert labels(data.next_batch(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_shuffled_epochs_differ_and_repeat(write: Any) -> None:
    path = write(*numbered(20))
    read = dict(input_key="input", label_key="label", shuffle=True)
    first = PromptData(path, seed=1, **read)  # type: ignore[arg-type]
    epochs = [labels(first.next_batch(20)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again = PromptData(path, seed=1, **read)  # type: ignore[arg-type]
    assert [labels(again.next_batch(20)) for _ in range(3)] == epochs
    assert labels(PromptData(path, seed=2, **read).next_batch(20)) != epochs[0]  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(1, 9),
    before=st.lists(st.integers(0, 13), max_size=5),
    after=st.lists(st.integers(0, 13), min_size=1, max_size=4),
    group=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_a_restored_position_goes_on_as_if_nothing_had_happened(
    tmp_path_factory: pytest.TempPathFactory,
    prompts: int,
    before: list[int],
    after: list[int],
    group: int,
    shuffle: bool,
) -> None:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in numbered(prompts)))

    def fresh() -> PromptData:
        return PromptData(
            path, input_key="input", label_key="label", n_samples_per_prompt=group, shuffle=shuffle, seed=7
        )

    uninterrupted, resumed = fresh(), fresh()
    seen = [sample for n in before for sample in uninterrupted.next_batch(n)]
    state = json.loads(json.dumps(uninterrupted.state_dict()))
    resumed.load_state_dict(state)
    for n in after:
        expected, got = uninterrupted.next_batch(n), resumed.next_batch(n)
        assert expected == got and len(got) == n * group
        seen += got
    assert [s.index for s in seen] == list(range(len(seen)))
    assert [s.group_index for s in seen] == [i // group for i in range(len(seen))]
    counts = Counter(s.label for s in seen)
    assert max(counts.values(), default=0) - min((counts[i] for i in range(prompts)), default=0) <= group


def test_a_position_of_other_data_is_refused(write: Any) -> None:
    read = dict(input_key="input", label_key="label")
    state = PromptData(write(*numbered(3)), seed=1, **read).state_dict()  # type: ignore[arg-type]
    PromptData(write(*numbered(3)), seed=2, **read).load_state_dict(state)  # type: ignore[arg-type]
    other = PromptData(write(*numbered(4), name="other.jsonl"), shuffle=True, **read)  # type: ignore[arg-type]
    with pytest.raises(ValueError) as error:
        other.load_state_dict(state)
    assert "--prompt-data was 3 prompts in the checkpoint, now it is 4 prompts" in str(error.value)
    assert "--rollout-shuffle was False in the checkpoint, now it is True" in str(error.value)
    changed = PromptData(write({"input": "another"}, *numbered(2)), **read | {"label_key": None})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the content of --prompt-data was "):
        changed.load_state_dict(state)


# -- the sample type ------------------------------------------------------------------------------------------------


def test_samples_survive_their_dictionary_with_fields_of_a_users_own() -> None:
    sample = Sample(index=3, prompt="p", tokens=[1, 2, 3], response_length=2, status=Sample.Status.TRUNCATED)
    sample.curriculum = "hard"  # type: ignore[attr-defined]
    copy = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert copy == sample and copy.curriculum == "hard"  # type: ignore[attr-defined]
    assert Sample.from_dict({"spec_info": {"spec_verify_ct": 1}}).spec_info == {"spec_verify_ct": 1}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="lost"):
        Sample.from_dict({"status": "lost"})


def test_sample_properties() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[0, 1], weight_versions=[[0, 7], [1, 5]])
    assert sample.effective_response_length == 1 and sample.oldest_weight_version == 5
    assert Sample(weight_versions=["9", "10"]).oldest_weight_version == 9
    assert Sample().oldest_weight_version is None
    sample.validate()


def test_sample_lengths_that_disagree_are_all_named() -> None:
    sample = Sample(index=4, tokens=[1], response_length=2, loss_mask=[1], rollout_log_probs=[0.0, 0.0])
    with pytest.raises(ValueError, match="sample 4: response_length 2 with 1 tokens; 1 loss_mask for a response of 2"):
        sample.validate()
