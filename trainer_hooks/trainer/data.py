"""Prompts from JSONL in slime's `--prompt-data` form, in epochs, with an exact position."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_hooks.trainer.sample import Sample


@dataclass(frozen=True)
class Prompt:
    """One line of the file: the prompt (a string, after the chat template if asked for), its label and metadata."""

    prompt: str
    label: Any
    metadata: dict[str, Any]


class PromptData:
    """Batches of prompts, each as a group of `n_samples_per_prompt` samples; endless, epoch after epoch.

    shuffle: each epoch in an order of its own, from `seed` and the epoch's number. Raises OSError for a missing file and
    ValueError for a line that is not JSON or lacks a key; both name option, file and line.
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
        self.n_samples_per_prompt = n_samples_per_prompt
        self.shuffle = shuffle
        self.seed = seed
        self.prompts = [
            Prompt(
                _text(record, input_key, tokenizer, apply_chat_template, where),
                _value(record, label_key, "--label-key", where),
                dict(record.get(metadata_key) or {}),
            )
            for where, record in read_records(path, option)
            if _value(record, input_key, "--input-key", where) is not None
        ]
        if not self.prompts:
            raise ValueError(f"{option} {path}: the file has no prompt")
        self._epoch = 0
        self._position = 0
        self._samples = 0
        self._groups = 0
        self._order = self._epoch_order()

    def next_batch(self, prompts: int) -> list[Sample]:
        """The next `prompts` groups, the samples of one prompt together."""
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

    def state_dict(self) -> dict[str, int]:
        """Where the next batch begins; with the same file and seed this is all that it depends on."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "samples": self._samples,
            "groups": self._groups,
            "prompts": len(self.prompts),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Raises ValueError if the state belongs to a file with another number of prompts."""
        if state["prompts"] != len(self.prompts):
            raise ValueError(
                f"the checkpoint was made with {state['prompts']} prompts, --prompt-data has {len(self.prompts)}"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._samples, self._groups = state["samples"], state["groups"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed}/{self._epoch}").shuffle(order)
        return order


def read_records(path: str | Path, option: str) -> list[tuple[str, dict[str, Any]]]:
    """("option file, line n", object) of every line that is not empty."""
    records = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{option} {path}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not valid JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where}: a JSON object is needed, got {type(record).__name__}")
            records.append((where, record))
    return records


def read_pairs(path: str | Path, *, input_key: str, label_key: str | None) -> list[tuple[str, str]]:
    """(prompt, answer) of every line, for the supervised warm-up."""
    if label_key is None:
        raise ValueError("--warmup-data needs --label-key: the answers to learn from")
    return [
        (str(_value(r, input_key, "--input-key", w)), str(_value(r, label_key, "--label-key", w)))
        for w, r in read_records(path, "--warmup-data")
    ]


def _value(record: Mapping[str, Any], key: str | None, option: str, where: str) -> Any:
    if key is None:
        return None
    if key not in record:
        raise ValueError(f"{where}: no key {key!r} ({option}); it has {', '.join(sorted(record)) or 'none'}")
    return record[key]


def _text(record: Mapping[str, Any], key: str, tokenizer: Any, chat: bool, where: str) -> str:
    value = _value(record, key, "--input-key", where)
    if chat:
        messages = value if isinstance(value, list) else [{"role": "user", "content": str(value)}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    if not isinstance(value, str):
        raise ValueError(f"{where}: {key!r} must be a string (or a conversation, with --apply-chat-template)")
    return value


def _sample(prompt: Prompt, index: int, group: int) -> Sample:
    return Sample(
        index=index, group_index=group, prompt=prompt.prompt, label=prompt.label, metadata=dict(prompt.metadata)
    )
