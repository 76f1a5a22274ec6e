"""Prompts in slime's `--prompt-data` form, in epochs, with an exact position.

A file is JSON Lines: one object a line, the prompt under `--input-key`, what the reward compares with under
`--label-key`, anything else a reward needs under `--metadata-key`. `FILE.jsonl@[0:100]` takes a slice of its prompts.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer_hooks.trainer.sample import Sample

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


@dataclass(frozen=True)
class Prompt:
    """One line of the file: the prompt (text, after the chat template if asked for), its label and metadata."""

    prompt: str
    label: Any
    metadata: dict[str, Any]


class PromptData:
    """Batches of prompts, each as a group of `n_samples_per_prompt` samples; endless, epoch after epoch.

    shuffle: each epoch in an order of its own, from `seed` and the epoch's number only. option: what errors call the
    file. Raises OSError for a file that cannot be read and ValueError for a line that cannot be used; both name option
    and file, the latter also the line.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        input_key: str,
        label_key: str | None = None,
        metadata_key: str = "metadata",
        option: str = "--prompt-data",
        tokenizer: Any = None,
        apply_chat_template: bool = False,
        n_samples_per_prompt: int = 1,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if apply_chat_template and not getattr(tokenizer, "chat_template", None):
            raise ValueError("--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template")
        self.option = option
        self.n_samples_per_prompt = n_samples_per_prompt
        self.shuffle = shuffle
        self.seed = seed
        template = tokenizer if apply_chat_template else None
        self.prompts = [
            Prompt(
                _prompt_text(record, input_key, template, where),
                _value(record, label_key, "--label-key", where) if label_key else None,
                _metadata(record, metadata_key, where),
            )
            for where, record in read_records(path, option)
        ]
        if not self.prompts:
            raise ValueError(f"{option} {path}: there is no prompt in it")
        self._epoch = 0
        self._position = 0
        self._samples = 0
        self._groups = 0
        self._order = self._epoch_order()

    def __len__(self) -> int:
        """Prompts of an epoch."""
        return len(self.prompts)

    def next_batch(self, prompts: int) -> list[Sample]:
        """The next `prompts` groups, the samples of one prompt together. An epoch's end may fall inside a batch."""
        samples: list[Sample] = []
        for _ in range(prompts):
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._epoch_order()
            prompt = self.prompts[self._order[self._position]]
            self._position += 1
            for _ in range(self.n_samples_per_prompt):
                samples.append(_sample(prompt, self._samples, self._groups))
                self._samples += 1
            self._groups += 1
        return samples

    def all(self) -> list[Sample]:
        """One fresh sample of every prompt, in file order (evaluation)."""
        return [_sample(prompt, i, i) for i, prompt in enumerate(self.prompts)]

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch begins, and of what: JSON values only."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "samples": self._samples,
            "groups": self._groups,
            **self._identity(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken; `n_samples_per_prompt` may have changed.

        Raises ValueError with every difference if the position belongs to other prompts or another order of them.
        """
        names = {"prompts": self.option, "shuffle": "--rollout-shuffle", "seed": "--rollout-seed"}
        names["content"] = f"the content of {self.option}"
        problems = [
            f"{names[key]} was {state.get(key)} in the checkpoint, now it is {value}"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if problems:
            raise ValueError("; ".join(problems))
        self._epoch, self._position = state["epoch"], state["position"]
        self._samples, self._groups = state["samples"], state["groups"]
        self._order = self._epoch_order()

    def _identity(self) -> dict[str, Any]:
        """All that the sequence of prompts depends on; the seed only where it matters."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(json.dumps(asdict(prompt), sort_keys=True).encode())
        identity = {"prompts": f"{len(self)} prompts", "content": digest.hexdigest()[:16], "shuffle": self.shuffle}
        return {**identity, "seed": self.seed} if self.shuffle else identity

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed}/{self._epoch}").shuffle(order)
        return order


def split_slice(path: str | Path) -> tuple[str, slice]:
    """`FILE@[start:stop]` as the file and the slice of its prompts (all of them without one)."""
    match = _SLICE.fullmatch(str(path))
    if match is None:
        return str(path), slice(None)
    bounds = (int(text) if text else None for text in (match["start"], match["stop"]))
    return match["path"], slice(*bounds)


def read_records(path: str | Path, option: str) -> list[tuple[str, dict[str, Any]]]:
    """("option file, line n", object) of every line that is not empty.

    Raises OSError for a file that cannot be read, ValueError for a line that is not one JSON object in UTF-8.
    """
    path, part = split_slice(path)
    records = []
    for where, line in _lines(path, option):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start}") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not valid JSON: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: a JSON object is needed, got {type(record).__name__}")
        records.append((where, record))
    return records[part]


def read_pairs(path: str | Path, *, input_key: str, label_key: str | None) -> list[tuple[str, str]]:
    """(prompt, answer) of every line, for the supervised warm-up. Raises as `read_records`, and for missing keys."""
    if label_key is None:
        raise ValueError("--warmup-data needs --label-key: the answers to learn from")
    pairs = [
        (_prompt_text(record, input_key, None, where), str(_value(record, label_key, "--label-key", where)))
        for where, record in read_records(path, "--warmup-data")
    ]
    if not pairs:
        raise ValueError(f"--warmup-data {path}: there is no example in it")
    return pairs


def _lines(path: str, option: str) -> Iterator[tuple[str, bytes]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield f"{option} {path}, line {number}", line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    except OSError as error:
        raise type(error)(f"{option} {path}: {error.strerror}") from error


def _value(record: Mapping[str, Any], key: str, option: str, where: str) -> Any:
    if key not in record:
        raise ValueError(f"{where}: no key {key!r} ({option}); it has {', '.join(sorted(record)) or 'none'}")
    return record[key]


def _prompt_text(record: Mapping[str, Any], key: str, tokenizer: Any, where: str) -> str:
    """The prompt as text; through the tokenizer's chat template where one is given."""
    value = _value(record, key, "--input-key", where)
    if tokenizer is not None:
        value = _templated(value, key, tokenizer, where)
    if not isinstance(value, str):
        hint = "; a conversation needs --apply-chat-template" if isinstance(value, list) else ""
        raise ValueError(f"{where}: {key!r} must be a string, got {type(value).__name__}{hint}")
    if not value:
        raise ValueError(f"{where}: {key!r} is empty; a prompt needs at least one token")
    return value


def _templated(value: Any, key: str, tokenizer: Any, where: str) -> str:
    from jinja2 import TemplateError

    messages = value if isinstance(value, list) else [{"role": "user", "content": value}]
    if not messages or not all(isinstance(message, dict) and "role" in message for message in messages):
        raise ValueError(f"{where}: {key!r} must be a string or a list of messages with a 'role'")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise ValueError(f"{where}: --apply-chat-template: {error}") from error


def _metadata(record: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = record.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {key!r} (--metadata-key) must be an object, got {type(value).__name__}")
    return value


def _sample(prompt: Prompt, index: int, group: int) -> Sample:
    return Sample(
        index=index, group_index=group, prompt=prompt.prompt, label=prompt.label, metadata=deepcopy(prompt.metadata)
    )
