"""Names and shapes of weights: Hugging Face on one side, a megatron-core shard on the other.

One table serves loading, saving and every refit that speaks Hugging Face names. A rank only ever asks for the slices
that its shard holds, so that no rank needs a full model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron_rollout.engine.architecture import Architecture

#: Reads one Hugging Face tensor, or the half-open range [start, stop) of one of its dimensions.
ReadSlice = Callable[[str, int, int, int], torch.Tensor]


@dataclass(frozen=True)
class Mapping:
    """How one megatron-core parameter is made of Hugging Face tensors.

    names: the tensors, in order (q, k, v / gate, up / one). dim: the dimension that tensor parallelism shards, None for
    a replicated parameter. kind: "one", "qkv" or "gate_up".
    """

    kind: str
    names: tuple[str, ...]
    dim: int | None


_LAYER = {
    "self_attention.linear_proj.weight": ("one", ("self_attn.o_proj.weight",), 1),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), 0),
    "mlp.linear_fc2.weight": ("one", ("mlp.down_proj.weight",), 1),
    "input_layernorm.weight": ("one", ("input_layernorm.weight",), None),
    "pre_mlp_layernorm.weight": ("one", ("post_attention_layernorm.weight",), None),
    "self_attention.q_layernorm.weight": ("one", ("self_attn.q_norm.weight",), None),
    "self_attention.k_layernorm.weight": ("one", ("self_attn.k_norm.weight",), None),
} | {
    f"self_attention.linear_qkv.{kind}": ("qkv", tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"), 0)
    for kind in ("weight", "bias")
}


class WeightMap:
    """Weights of one rank's shard: tensor-parallel rank `tp_rank` of `tp`, layers from `layer_offset` on.

    value_head: the output layer is one row, a value. transformers calls such a tensor score.weight.
    """

    def __init__(
        self, architecture: Architecture, *, tp: int, tp_rank: int, layer_offset: int, value_head: bool = False
    ) -> None:
        self.architecture = architecture
        self.value_head = value_head
        self.tp = tp
        self.tp_rank = tp_rank
        self.layer_offset = layer_offset

    def mapping(self, name: str) -> Mapping:
        """Mapping of the megatron-core parameter `name` (as `named_parameters` of the bare model says it).

        Raises KeyError for a name that no Hugging Face tensor belongs to.
        """
        if name == "embedding.word_embeddings.weight":
            return Mapping("one", ("model.embed_tokens.weight",), 0)
        if name == "output_layer.weight" and self.value_head:
            return Mapping("one", ("score.weight",), None)
        if name == "output_layer.weight":
            tied = self.architecture.tied_embeddings
            return Mapping("one", ("model.embed_tokens.weight" if tied else "lm_head.weight",), 0)
        if name == "decoder.final_layernorm.weight":
            return Mapping("one", ("model.norm.weight",), None)
        if name.startswith("decoder.layers."):
            _, _, layer, rest = name.split(".", 3)
            if rest in _LAYER:
                kind, names, dim = _LAYER[rest]
                prefix = f"model.layers.{int(layer) + self.layer_offset}."
                return Mapping(kind, tuple(prefix + n for n in names), dim)
        raise KeyError(f"no Hugging Face tensor is known for the parameter {name!r}")

    def may_lack(self, name: str) -> bool:
        """Whether a checkpoint may lack parameter `name`, which then keeps what it was initialised with: a value head
        is in no policy's checkpoint."""
        return self.value_head and name == "output_layer.weight"

    def shapes(self, mapping: Mapping, local: torch.Size) -> tuple[tuple[int, ...], ...]:
        """Full shapes of the Hugging Face tensors behind a parameter whose shard has shape `local`."""
        if mapping.kind == "qkv":
            a, tail = self.architecture, tuple(local[1:])
            return tuple((heads * a.head_dim, *tail) for heads in (a.num_heads, a.num_kv_heads, a.num_kv_heads))
        shape = list(local)
        if mapping.dim is not None:
            shape[mapping.dim] *= self.tp
        if mapping.kind == "gate_up":
            shape[0] //= 2
        return (tuple(shape),) * len(mapping.names)

    def local(self, name: str, shape: torch.Size, read: ReadSlice) -> torch.Tensor:
        """This rank's shard of parameter `name`, made of the slices it needs.

        Raises KeyError (name unknown to `read`) and ValueError (shapes that disagree).
        """
        mapping = self.mapping(name)
        parts = []
        for hf_name, full in zip(mapping.names, self.shapes(mapping, shape), strict=True):
            dim = 0 if mapping.dim is None else mapping.dim
            size = full[dim]
            share = size if mapping.dim is None else size // self.tp
            start = 0 if mapping.dim is None else self.tp_rank * share
            part = read(hf_name, dim, start, start + share)
            expected = (*full[:dim], share, *full[dim + 1 :])
            if tuple(part.shape) != expected:
                raise ValueError(f"{hf_name}: the slice has shape {tuple(part.shape)}, the model needs {expected}")
            parts.append(part)
        if mapping.kind == "qkv":
            return self._interleave(parts)
        return torch.cat(parts, 0) if len(parts) > 1 else parts[0]

    def _groups(self) -> tuple[int, int, int]:
        """(local query groups, query rows of a group, key rows of a group)"""
        a = self.architecture
        return a.num_kv_heads // self.tp, a.num_heads // a.num_kv_heads * a.head_dim, a.head_dim

    def _interleave(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """megatron-core keeps [queries, key, value] of each group together."""
        groups, q_rows, rows = self._groups()
        tail = parts[0].shape[1:]
        q, k, v = (x.reshape(groups, n, *tail) for x, n in zip(parts, (q_rows, rows, rows), strict=True))
        return torch.cat([q, k, v], 1).reshape(-1, *tail)

    def views(self, name: str, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This rank's slices of the Hugging Face tensors behind parameter `name`, in order, as views of its shard.

        Those of a joint QKV parameter have one dimension more, [query groups, rows, ...]: reshaped, they are the slices.
        """
        mapping = self.mapping(name)
        if mapping.kind == "qkv":
            groups, q_rows, rows = self._groups()
            return local.view(groups, q_rows + 2 * rows, *local.shape[1:]).split((q_rows, rows, rows), 1)
        return local.chunk(len(mapping.names), 0)

    def hf_parts(self, name: str, local: torch.Tensor) -> Iterator[tuple[str, int | None, torch.Tensor]]:
        """(Hugging Face name, sharded dim, this rank's slice of it) for each tensor behind parameter `name`.

        Concatenating the slices of all tensor-parallel ranks along the dim gives the Hugging Face tensor.
        """
        mapping = self.mapping(name)
        for hf_name, part in zip(mapping.names, self.views(name, local), strict=True):
            yield hf_name, mapping.dim, part.reshape(-1, *local.shape[1:])
