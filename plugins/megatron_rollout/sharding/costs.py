"""What a sample costs a training step: its tokens, or its floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rollout.sharding.partitions import SIZES

COSTS = ("tokens", "flops")


@dataclass(frozen=True)
class FlopsCost:
    """Forward FLOPs of one packed causal sequence: linear * length + quadratic * length ** 2.

    A training step costs three times as much (backward is twice forward), which no balance depends on. Source:
    Narayanan et al. 2021 (arXiv:2104.04473, appendix), per layer and token of a dense transformer, written out for
    grouped-query attention and gated MLPs, with attention halved because it is causal:
    projections 2 * hidden * (2 * query + 2 * key_value), MLP 2 * hidden * ffn * (3 if gated else 2),
    attention 2 * query * length; once for all layers: logits 2 * hidden * vocabulary.
    """

    linear: float
    quadratic: float

    def __call__(self, lengths: Sequence[int] | Any) -> NDArray[np.float64]:
        """lengths: [n] tokens. Returns [n] FLOPs."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.linear * tokens + self.quadratic * tokens * tokens

    @classmethod
    def from_args(cls, args: Any) -> FlopsCost:
        """From Megatron's own options. Raises ValueError that lists the ones that are missing."""
        needed = ("hidden_size", "num_layers", "num_attention_heads")
        missing = [f"--{name.replace('_', '-')}" for name in needed if not getattr(args, name, None)]
        if missing:
            raise ValueError(f"--balance-by flops needs the model's dimensions; missing: {', '.join(missing)}")
        hidden, layers, heads = (int(getattr(args, name)) for name in needed)
        head_dim = int(getattr(args, "kv_channels", None) or hidden // heads)
        grouped = getattr(args, "group_query_attention", False)
        groups = int(getattr(args, "num_query_groups", None) or heads) if grouped else heads
        query, key_value = heads * head_dim, groups * head_dim
        ffn = int(getattr(args, "ffn_hidden_size", None) or 4 * hidden)
        matrices = 3 if getattr(args, "swiglu", False) else 2
        vocabulary = int(getattr(args, "padded_vocab_size", None) or getattr(args, "vocab_size", None) or 0)
        per_layer = 2 * hidden * (2 * query + 2 * key_value) + 2 * hidden * ffn * matrices
        return cls(linear=layers * per_layer + 2 * hidden * vocabulary, quadratic=2 * layers * query)


@dataclass(frozen=True)
class BalanceOptions:
    """How samples go to parts. data: balanced by cost, else strided by index. Options: --balance-data, --balance-by
    tokens|flops (slime's --balance-by-flops means the latter), --balance-sizes free|equal."""

    data: bool = False
    by: str = "tokens"
    sizes: str = "free"

    def __post_init__(self) -> None:
        problems = []
        if self.by not in COSTS:
            problems.append(f"--balance-by must be one of {', '.join(COSTS)}, got {self.by!r}")
        if self.sizes not in SIZES:
            problems.append(f"--balance-sizes must be one of {', '.join(SIZES)}, got {self.sizes!r}")
        if problems:
            raise ValueError("; ".join(problems))

    @classmethod
    def from_args(cls, args: Any) -> BalanceOptions:
        by = getattr(args, "balance_by", None) or ("flops" if getattr(args, "balance_by_flops", False) else "tokens")
        return cls(bool(getattr(args, "balance_data", False)), by, getattr(args, "balance_sizes", None) or "free")

    def costs(self, args: Any, lengths: Sequence[int]) -> Sequence[float]:
        """[n] costs of samples of the given lengths (tokens)."""
        return FlopsCost.from_args(args)(lengths).tolist() if self.by == "flops" else lengths
