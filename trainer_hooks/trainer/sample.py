"""One sample, with the field names of slime's and Miles' `Sample`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass
class Sample:
    """A prompt and, once generated, its response.

    index: unique in the run. group_index: shared by the samples of one prompt. tokens: prompt and response.
    response_length: trailing tokens of `tokens` that are the response. loss_mask, rollout_log_probs: [response_length].
    weight_versions: [[start, version], …] spans over the response. label: what the reward compares with.
    """

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    index: int = 0
    group_index: int = 0
    prompt: str | list[int] = ""
    label: Any = None
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[Any] = field(default_factory=list)
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
