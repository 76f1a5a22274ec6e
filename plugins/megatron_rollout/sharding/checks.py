"""Is a training batch what it says it is? All that is wrong with it, in one error, before any of it is used."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_rollout.sharding.schema import DEFAULT_SCHEMA, ColumnSchema, count_samples, is_tensor, row_count

#: How many violations an error spells out.
_SHOWN = 8


def check_batch(data: Mapping[str, Any], schema: ColumnSchema = DEFAULT_SCHEMA) -> int:
    """The number of samples of a batch whose columns agree with each other.

    Raises ValueError that names columns, samples (by position) and the numbers that disagree: columns of different
    lengths; a response longer than its tokens; a loss mask not as long as its response; total_lengths unlike tokens;
    a sample index used twice; different rewards inside one rollout.
    """
    num_samples = count_samples(data, schema)
    problems = [
        *_sample_problems(data, num_samples),
        *_duplicate_problems(data),
        *_reward_problems(data),
    ]
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"invalid batch: {'; '.join(problems[:_SHOWN])}{more}")
    return num_samples


def as_list(column: Any) -> list[Any]:
    """A column's rows as a list; scalars of arrays and tensors as Python numbers."""
    if isinstance(column, np.ndarray) or is_tensor(column):
        return column.tolist() if column.ndim == 1 else list(column)
    return [row.item() if getattr(row, "ndim", None) == 0 else row for row in column]


def row_lengths(column: Any) -> list[int]:
    """Length of each row: tokens of a sample, entries of a mask. A row without length counts as -1."""
    if (isinstance(column, np.ndarray) or is_tensor(column)) and column.ndim > 1:
        return [int(column.shape[1])] * int(column.shape[0])
    try:
        return list(map(len, column))
    except TypeError:
        return [len(row) if hasattr(row, "__len__") else -1 for row in column]


def token_lengths(data: Mapping[str, Any]) -> list[int] | None:
    """Tokens of each sample: total_lengths where given for each, else the lengths of tokens; None without either."""
    totals, tokens = data.get("total_lengths"), data.get("tokens")
    if totals is not None:
        return [int(total) for total in as_list(totals)]
    return None if tokens is None else row_lengths(tokens)


def _sample_problems(data: Mapping[str, Any], num_samples: int) -> Iterator[str]:
    tokens, responses, masks = (data.get(name) for name in ("tokens", "response_lengths", "loss_masks"))
    tokens_of = None if tokens is None else row_lengths(tokens)
    responses_of = None if responses is None else [int(length) for length in as_list(responses)]
    if tokens is not None and tokens_of is not None and -1 in tokens_of:
        at = tokens_of.index(-1)
        yield f"column 'tokens', sample {at}: {type(tokens[at]).__name__} instead of a sequence of tokens"
        return
    if data.get("total_lengths") is not None:
        yield from _total_problems(data["total_lengths"], tokens, tokens_of, num_samples)
    for i, response in enumerate(responses_of or ()):
        if response < 0:
            yield f"column 'response_lengths', sample {i}: negative length {response}"
        elif tokens_of is not None and response > tokens_of[i]:
            yield f"column 'response_lengths', sample {i}: response of {response} tokens in a sample of {tokens_of[i]}"
    if masks is None:
        return
    for i, length in enumerate(row_lengths(masks)):
        if length < 0:
            yield f"column 'loss_masks', sample {i}: {type(masks[i]).__name__} instead of a mask"
        elif responses_of is not None and length != responses_of[i]:
            yield f"column 'loss_masks', sample {i}: {length} entries for a response of {responses_of[i]} tokens"


def _total_problems(totals: Any, tokens: Any, tokens_of: list[int] | None, num_samples: int) -> Iterator[str]:
    if row_count(totals) != num_samples:
        yield f"column 'total_lengths' has {row_count(totals)} rows, the batch has {num_samples} samples"
        return
    padded = not isinstance(tokens, list | tuple)  # one width for all: a sample may be shorter
    for i, total in enumerate(as_list(totals)):
        if total < 0:
            yield f"column 'total_lengths', sample {i}: negative length {int(total)}"
        elif tokens_of is not None and (total > tokens_of[i] or (total != tokens_of[i] and not padded)):
            yield f"column 'total_lengths', sample {i}: {int(total)}, but 'tokens' has {tokens_of[i]} there"


def _duplicate_problems(data: Mapping[str, Any]) -> Iterator[str]:
    first: dict[Hashable, int] = {}
    for i, index in enumerate(as_list(data["sample_indices"]) if data.get("sample_indices") is not None else ()):
        if index is None:
            continue
        if index in first:
            yield f"column 'sample_indices': index {index} at samples {first[index]} and {i}"
        else:
            first[index] = i


def _reward_problems(data: Mapping[str, Any]) -> Iterator[str]:
    rewards, rollouts = data.get("rewards"), data.get("rollout_ids")
    if rewards is not None and rollouts is not None:
        yield from _unequal_rewards(as_list(rewards), as_list(rollouts))


def _unequal_rewards(rewards: Sequence[Any], rollout_ids: Sequence[Hashable]) -> Iterator[str]:
    """One message for each rollout whose samples carry different rewards: one trajectory has one reward."""
    members: dict[Hashable, list[int]] = {}
    for i, rollout in enumerate(rollout_ids):
        members.setdefault(rollout, []).append(i)
    for rollout, samples in members.items():
        if any(not same(rewards[samples[0]], rewards[i]) for i in samples[1:]):
            values = ", ".join(str(rewards[i]) for i in samples[:_SHOWN])
            where = ", ".join(str(i) for i in samples[:_SHOWN])
            yield f"column 'rewards': rollout {rollout} has different rewards {values} at samples {where}"


def same(a: Any, b: Any) -> bool:
    """Equality of column values: arrays and tensors by content, NaN equal to NaN, containers entry by entry."""
    if a is b:
        return True
    if is_tensor(a) or is_tensor(b):
        return is_tensor(a) and is_tensor(b) and a.dtype == b.dtype and same(_to_numpy(a), _to_numpy(b))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        both = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
        return both and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc")
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or bool(a != a and b != b)


def _to_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    plain: Callable[[], Any] = tensor.detach().cpu().numpy
    try:
        return plain()
    except TypeError:  # a dtype that NumPy lacks (bfloat16, float8): float32 holds it exactly
        return tensor.detach().cpu().float().numpy()
