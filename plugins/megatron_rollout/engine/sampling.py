"""A random generator per request, which megatron-core's dynamic engine lacks, as its sampling backend.

The noise of a token is a hash of (the request's seed, how many tokens the request has drawn): it does not depend on the
cell, the batch or the order in which requests are scheduled, and it goes on where an aborted or evicted request left
off. A token is drawn by inverting the cumulative distribution with that one uniform number.

Logprobs follow one convention: log_softmax(logits / temperature), before top-k and top-p cut the distribution; greedy
requests (temperature 0) report log_softmax(logits). It is what training recomputes.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.inference.contexts import DynamicInferenceContext
from megatron.core.inference.sampling.base import Sampling

from megatron_rollout.requests import SamplingParams

_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's constants as signed int64
_MASK = (1 << 64) - 1


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seed: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """The `draw`-th number of each seed's sequence, in (0, 1), float32 [n]. Counter-based (splitmix64), no state."""
    x = seed + draw * _MIX[0]
    x = (x ^ _shift(x, 30)) * _MIX[1]
    x = (x ^ _shift(x, 27)) * _MIX[2]
    x = x ^ _shift(x, 31)
    return (_shift(x, 40).float() + 0.5) / (1 << 24)


def signed_seed(seed: int) -> int:
    """Any integer as the int64 with the same low 64 bits."""
    seed &= _MASK
    return seed - (1 << 64) if seed >> 63 else seed


class RequestSampler(Sampling):
    """Samples each row with the parameters and the generator of its own request.

    Requests are known by their slot, which is the integer id that the engine gives them. Tables grow on demand.
    vocab_size: true size; logits beyond it (padding) are never drawn.
    """

    def __init__(self, vocab_size: int, device: torch.device, slots: int = 64) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._allocate(slots)
        self._rows: torch.Tensor | None = None  # slots of the batch that the cached tensors below belong to
        self._slots = torch.empty(0, dtype=torch.long, device=device)
        self._plain = True
        self._greedy_only = False

    def _allocate(self, slots: int) -> None:
        host = {
            "temperature": torch.ones(slots),
            "top_k": torch.zeros(slots, dtype=torch.long),
            "top_p": torch.ones(slots),
            "greedy": torch.zeros(slots, dtype=torch.bool),
        }
        self._host = host
        self._tables = {name: t.to(self.device) for name, t in host.items()}
        self._seed = torch.zeros(slots, dtype=torch.long, device=self.device)
        self._draw = torch.zeros(slots, dtype=torch.long, device=self.device)

    def register(self, slot: int, params: SamplingParams, seed: int, drawn: int) -> None:
        """Set the parameters of a slot; `drawn` tokens of the sample exist already."""
        while slot >= self._seed.numel():
            old, old_seed, old_draw = self._host, self._seed, self._draw
            n = old_seed.numel()
            self._allocate(2 * n)
            for name, table in old.items():
                self._host[name][:n] = table
                self._tables[name][:n] = table.to(self.device)
            self._seed[:n], self._draw[:n] = old_seed, old_draw
        values = {
            "temperature": 1.0 if params.greedy else params.temperature,
            "top_k": 0 if params.top_k <= 0 or params.top_k >= self.vocab_size else params.top_k,
            "top_p": params.top_p,
            "greedy": params.greedy or params.top_k == 1 or params.top_p == 0,
        }
        for name, value in values.items():
            self._host[name][slot] = value
            self._tables[name][slot] = value
        self._seed[slot] = signed_seed(seed)
        self._draw[slot] = drawn
        self._rows = None

    def _batch(self, context: Any, n: int) -> None:
        """Slots of the active rows; nothing is copied to the device while the batch stays the same."""
        rows = context.request_ids[context.paused_request_count : context.paused_request_count + n]
        if self._rows is not None and torch.equal(rows, self._rows):
            return
        self._rows = rows.clone()
        index = rows.long()
        self._slots = index.to(self.device, non_blocking=True)
        host = {name: table[index] for name, table in self._host.items()}
        self._plain = bool((host["top_k"] == 0).all() and (host["top_p"] >= 1).all())
        self._greedy_only = bool(host["greedy"].all())

    def sample_kernel(
        self,
        logits: torch.Tensor,
        n: int,
        context: Any,
        *,
        no_top_k: bool,
        no_top_p: bool,
        gather_indices: torch.Tensor | None = None,
        token_to_request_index: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        eager: bool = False,
        cache_key: Any = None,
    ) -> torch.Tensor:
        """See `Sampling.sample_kernel`; row i belongs to active request i."""
        if token_to_request_index is not None:
            raise NotImplementedError("speculative decoding draws several tokens a request; the sampler draws one")
        self._batch(context, n)
        rows = logits[gather_indices[:n]] if gather_indices is not None else logits[:n]
        rows = rows[:, : self.vocab_size]
        tokens = rows.argmax(-1) if self._greedy_only else self._draw_tokens(rows)
        self._draw[self._slots] += 1
        if output is None:
            return tokens
        output.copy_(tokens)
        return output

    def _draw_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        table = {name: t[self._slots] for name, t in self._tables.items()}
        scaled = logits.float() / table["temperature"][:, None]
        if not self._plain:
            scaled = cut(scaled, table["top_k"], table["top_p"])
        cumulative = scaled.softmax(-1).cumsum_(-1)
        u = uniform(self._seed[self._slots], self._draw[self._slots])
        target = u * cumulative[:, -1]
        # the first token whose cumulative probability passes the target; tokens of probability 0 never do
        tokens = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
        return torch.where(table["greedy"], logits.argmax(-1), tokens)

    def log_probs_kernel(
        self, logits: torch.Tensor, context: Any, *, token_to_request_index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Log-probabilities [rows, vocab] at each request's temperature."""
        return self._scaled(logits, context, token_to_request_index).log_softmax(-1)

    def _scaled(self, logits: torch.Tensor, context: Any, row_to_request: torch.Tensor | None = None) -> torch.Tensor:
        self._batch(context, context.total_request_count - context.paused_request_count)
        slots = self._slots if row_to_request is None else self._slots[row_to_request.to(self.device)]
        scaled = logits[: slots.numel(), : self.vocab_size].float()
        return scaled / self._tables["temperature"][slots][:, None]


def cut(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Logits [n, V] with −inf outside each row's top-k (0 is off) and, within it, its top-p nucleus."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    outside = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    before = ordered.masked_fill(outside, -torch.inf).softmax(-1)
    before = before.cumsum(-1) - before
    outside |= before >= top_p[:, None]
    outside[:, 0] = False
    return torch.full_like(logits, -torch.inf).scatter_(-1, order, ordered.masked_fill(outside, -torch.inf))


class Context(DynamicInferenceContext):
    """megatron-core's context with lean logprobs: the full distribution is only made where alternatives are asked for."""

    def calculate_log_probs_tensors(
        self,
        logits: torch.Tensor,
        new_tokens: torch.Tensor,
        only_last_token_logits: bool | None = False,
        sampling: Any = None,
        row_to_request: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = self.total_request_count - self.paused_request_count
        if not only_last_token_logits or row_to_request is not None or not isinstance(sampling, RequestSampler):
            return super().calculate_log_probs_tensors(
                logits, new_tokens, only_last_token_logits, sampling, row_to_request
            )
        scaled = sampling._scaled(logits.squeeze(0), self)
        normaliser = scaled.logsumexp(-1)
        selected = scaled.gather(-1, new_tokens[:n, None])[:, 0] - normaliser
        if bool((self.active_request_metadata["top_n_logprobs"][:n] > 0).any()):
            return selected, scaled - normaliser[:, None]
        return selected, scaled
