"""One sample, with the field names of slime's and Miles' `Sample`, so that their users' reward functions run on it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


@dataclass
class Sample:
    """A prompt and, once generated, its response.

    index: unique in the run. group_index: shared by the samples of one prompt.
    prompt: text, token ids, or a conversation. label: what the reward compares the response with.
    tokens: prompt and response. response_length: how many of them, at the end, are the response.
    loss_mask, rollout_log_probs, teacher_log_probs: [response_length].
    weight_versions: spans [[start, version], …] over the response: its tokens from `start` to the next span are by
        `version`. (The hosts keep one version per call of the engine, as a string; `oldest_weight_version` reads both.)
    reward: a number, or a mapping of which `--reward-key` names the one that counts.
    metadata: what the line of the file held under `--metadata-key`. train_metadata: for the loss, not for the reward.
    remove_sample: keep it out of the loss.
    Fields of a user's own may be set as attributes; `to_dict` and `from_dict` carry them.
    """

    class Status(Enum):
        """How far a sample came. FAILED: an error that ended it (its response may hold something valid)."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int = 0
    index: int = 0
    prompt: str | list[Any] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[Any] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    @property
    def effective_response_length(self) -> int:
        """Response tokens that count in the loss."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def oldest_weight_version(self) -> int | None:
        """Lowest version that produced a token; None before generation."""
        versions = [span[1] if isinstance(span, list | tuple) else span for span in self.weight_versions]
        return min((int(version) for version in versions), default=None)

    def get_reward_value(self, args: argparse.Namespace) -> Any:
        """The reward, or what a reward mapping holds under `--reward-key`."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, Mapping) else self.reward

    def validate(self) -> None:
        """Raise one ValueError with every per-token field whose length disagrees with the response or the tokens."""
        problems = []
        if not 0 <= self.response_length <= len(self.tokens):
            problems.append(f"response_length {self.response_length} with {len(self.tokens)} tokens")
        for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            value = getattr(self, name)
            if value is not None and len(value) != self.response_length:
                problems.append(f"{len(value)} {name} for a response of {self.response_length} tokens")
        if problems:
            raise ValueError(f"sample {self.index}: {'; '.join(problems)}")

    def to_dict(self) -> dict[str, Any]:
        """Every attribute, a user's own included; the status by its value."""
        return {**self.__dict__, "status": self.status.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of `to_dict`; keys that are no fields become attributes. ValueError for an unknown status."""
        names = {f.name for f in fields(cls)}
        known = {name: value for name, value in data.items() if name in names}
        known["status"] = cls.Status(known.get("status", cls.Status.PENDING))
        sample = cls(**known)
        for name in data.keys() - names:
            setattr(sample, name, data[name])
        return sample
