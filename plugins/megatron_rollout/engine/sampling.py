"""A random generator per request, which megatron-core's dynamic engine lacks, as its sampling backend.

The noise of a token is a hash of (the request's seed, how many tokens the request has drawn): it does not depend on the
cell, the batch or the order in which requests are scheduled, and it goes on where an aborted or evicted request left
off. A token is drawn by inverting the cumulative distribution with that one uniform number: in two kernels on CUDA
(`triton_sampling.py`), with torch elsewhere and for rows with top-k or top-p.

Logprobs follow one convention: log_softmax(logits / temperature), before top-k and top-p cut the distribution; greedy
requests (temperature 0) report log_softmax(logits). It is what training recomputes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
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


@dataclass(frozen=True)
class _Parameters:
    temperature: float
    top_p: float
    top_k: int
    greedy: bool
    seed: int
    draw: int


_WHOLE = ("top_k", "greedy", "seed", "draw")  # order of the whole numbers in one copy


class RequestSampler(Sampling):
    """Samples each row with the parameters and the generator of its own request.

    Requests are known by their slot, which is the integer id that the engine gives them. Tables grow on demand.
    vocab_size: true size; logits beyond it (padding) are never drawn.
    """

    def __init__(self, vocab_size: int, device: torch.device, slots: int = 64) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.fused = device.type == "cuda"
        self._allocate(slots)
        self._registered: dict[int, _Parameters] = {}  # since the tables were last written
        self._rows: torch.Tensor | None = None  # slots of the batch that the cached tensors below belong to
        self._slots = torch.empty(0, dtype=torch.long, device=device)
        self._plain = True
        self._greedy_only = False
        self._logprobs: torch.Tensor | None = None  # of the tokens drawn last, where the kernel gave them

    def _allocate(self, slots: int) -> None:
        self._cut = torch.zeros(slots, dtype=torch.bool)  # on the host: whether the slot has top-k or top-p
        self._greedy = torch.zeros(slots, dtype=torch.bool)  # likewise
        self._tables = {
            "temperature": torch.ones(slots, device=self.device),
            "top_p": torch.ones(slots, device=self.device),
            "top_k": torch.zeros(slots, dtype=torch.long, device=self.device),
            "greedy": torch.zeros(slots, dtype=torch.bool, device=self.device),
        }
        self._seed = torch.zeros(slots, dtype=torch.long, device=self.device)
        self._draw = torch.zeros(slots, dtype=torch.long, device=self.device)

    def register(self, slot: int, params: SamplingParams, seed: int, drawn: int) -> None:
        """Set the parameters of a slot; `drawn` tokens of the sample exist already."""
        self._registered[slot] = _Parameters(
            temperature=1.0 if params.greedy else params.temperature,
            top_p=params.top_p,
            top_k=0 if params.top_k <= 0 or params.top_k >= self.vocab_size else params.top_k,
            greedy=params.greedy or params.top_k == 1 or params.top_p == 0,
            seed=signed_seed(seed),
            draw=drawn,
        )
        self._rows = None

    def _write_tables(self) -> None:
        """Bring what was registered to the device, all of it in two copies."""
        new, self._registered = self._registered, {}
        while max(new) >= self._seed.numel():
            self._grow()
        slots = torch.tensor(list(new))
        self._cut[slots] = torch.tensor([p.top_k > 0 or p.top_p < 1 for p in new.values()])
        self._greedy[slots] = torch.tensor([p.greedy for p in new.values()])
        whole = torch.tensor([list(new), *([getattr(p, f) for p in new.values()] for f in _WHOLE)]).to(self.device)
        real = torch.tensor([[p.temperature for p in new.values()], [p.top_p for p in new.values()]]).to(self.device)
        index, self._tables["top_k"][whole[0]] = whole[0], whole[1]
        self._tables["greedy"][index] = whole[2] != 0
        self._seed[index], self._draw[index] = whole[3], whole[4]
        self._tables["temperature"][index], self._tables["top_p"][index] = real[0], real[1]

    def _grow(self) -> None:
        old = [self._cut, self._greedy, *self._tables.values(), self._seed, self._draw]
        self._allocate(2 * self._seed.numel())
        for before, after in zip(
            old, [self._cut, self._greedy, *self._tables.values(), self._seed, self._draw], strict=True
        ):
            after[: before.numel()] = before

    def _batch(self, context: Any, n: int) -> None:
        """Slots of the active rows; nothing is copied to the device while the batch stays the same."""
        rows = context.request_ids[context.paused_request_count : context.paused_request_count + n]
        if self._rows is not None and torch.equal(rows, self._rows):
            return
        if self._registered:
            self._write_tables()
        self._rows = rows.clone()
        index = rows.long()
        self._slots = index.to(self.device)
        self._plain = not bool((self._cut[index] & ~self._greedy[index]).any())
        self._greedy_only = bool(self._greedy[index].all())

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
        if output is None:
            output = torch.empty(n, dtype=torch.long, device=self.device)
        if self.fused and self._plain:
            self._logprobs = self._draw_fused(rows, output)
            return output
        rows = rows[:, : self.vocab_size]
        output.copy_(rows.argmax(-1) if self._greedy_only else self._draw_tokens(rows))
        self._draw[self._slots] += 1
        self._logprobs = None
        return output

    def _draw_fused(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        from megatron_rollout.engine import triton_sampling  # Triton is only needed, and only there, on CUDA

        t = self._tables
        return triton_sampling.sample(
            logits, self._slots, t["temperature"], t["greedy"], self._seed, self._draw, tokens, self.vocab_size
        )

    def take_logprobs(self) -> torch.Tensor | None:
        """Logprobs [n] of the tokens drawn last, once; None where only the logits tell."""
        logprobs, self._logprobs = self._logprobs, None
        return logprobs

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
