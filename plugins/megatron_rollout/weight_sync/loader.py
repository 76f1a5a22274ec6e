"""Tensors by their Hugging Face names into one rank's shard: only the slices that the shard holds are kept.

What does not fit is an error that lists every name; nothing is written then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron_rollout.engine.weights import WeightMap
from megatron_rollout.weight_sync.names import listed


class BadWeights(ValueError):
    """Names, shapes or dtypes that the model does not have; the message lists them."""


@dataclass(frozen=True)
class _Place:
    """Where (a slice of) a tensor goes: rows [start, stop) of dimension `dim` of the whole into `view`."""

    dim: int
    start: int
    stop: int
    view: torch.Tensor


class HFLoader:
    """Writes Hugging Face tensors into `model`, the part of the model that this rank has.

    expected: every name of the whole model, on all ranks the same.
    """

    def __init__(self, model: torch.nn.Module, weights: WeightMap) -> None:
        self.expected = hf_shapes(weights)
        self._places: dict[str, list[_Place]] = {}
        for name, parameter in model.named_parameters():
            mapping = weights.mapping(name)
            shapes = weights.shapes(mapping, parameter.shape)
            views = weights.views(name, parameter.detach())
            for hf_name, shape, view in zip(mapping.names, shapes, views, strict=True):
                dim = mapping.dim or 0
                share = shape[dim] if mapping.dim is None else shape[dim] // weights.tp
                start = 0 if mapping.dim is None else weights.tp_rank * share
                self._places.setdefault(hf_name, []).append(_Place(dim, start, start + share, view))

    def check(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Raises BadWeights, listing every name that the model does not have, or has in another shape, or twice."""
        counts = Counter(names)
        problems = []
        if unknown := [name for name in names if name not in self.expected and not self._ignored(name)]:
            problems.append(f"unknown names: {listed(unknown)}")
        if twice := sorted(name for name, count in counts.items() if count > 1):
            problems.append(f"named twice: {listed(twice)}")
        for name, shape in zip(names, shapes, strict=True):
            wanted = self.expected.get(name)
            if wanted is not None and tuple(shape) != wanted:
                problems.append(f"{name} has shape {list(shape)}, the model's is {list(wanted)}")
        if problems:
            raise BadWeights("; ".join(problems))

    def _ignored(self, name: str) -> bool:
        """A tied output layer is the embedding; that it is sent as well does no harm."""
        return name == "lm_head.weight" and "lm_head.weight" not in self.expected

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy (name, whole tensor) into place, converted to the model's dtype. Names must have been checked."""
        with torch.no_grad():
            for name, tensor in tensors:
                for place in self._places.get(name, ()):
                    part = tensor.narrow(place.dim, place.start, place.stop - place.start)
                    place.view.copy_(part.reshape(place.view.shape))


def hf_shapes(weights: WeightMap) -> dict[str, tuple[int, ...]]:
    """{name: shape} of every tensor of the whole model, from its architecture alone."""
    a = weights.architecture
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, a.hidden_size),
        "self_attn.k_proj.weight": (kv, a.hidden_size),
        "self_attn.v_proj.weight": (kv, a.hidden_size),
        "self_attn.o_proj.weight": (a.hidden_size, q),
        "mlp.gate_proj.weight": (a.ffn_hidden_size, a.hidden_size),
        "mlp.up_proj.weight": (a.ffn_hidden_size, a.hidden_size),
        "mlp.down_proj.weight": (a.hidden_size, a.ffn_hidden_size),
        "input_layernorm.weight": (a.hidden_size,),
        "post_attention_layernorm.weight": (a.hidden_size,),
    }
    if a.qkv_bias:
        layer |= {f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", q), ("k", kv), ("v", kv))}
    if a.qk_norm:
        layer |= {f"self_attn.{x}_norm.weight": (a.head_dim,) for x in "qk"}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(a.num_layers) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size), "model.norm.weight": (a.hidden_size,)}
    if not a.tied_embeddings:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes
