"""megatron-core's dynamic context with what it lacks: lean logprobs, and on CUDA fused rotary embeddings and a KV cache
that keeps its address while its memory is given back."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.inference.config import KVCacheManagementMode
from megatron.core.inference.contexts import DynamicInferenceContext

from megatron_rollout.device import device
from megatron_rollout.engine.sampling import RequestSampler


class Context(DynamicInferenceContext):
    """Batches, block tables and the KV cache of one engine."""

    rotary_table: Any = None  # triton_rope.RotaryTable where `fuse_rotary` was called
    _key_unrotated = False

    # -- memory -------------------------------------------------------------------------------------------------

    is_tensor_state_allocated: bool
    memory_buffer: torch.Tensor
    _static: Any = None  # StaticMemory behind the KV cache, where a suspend gives it back
    _backup: tuple[torch.Tensor, torch.Tensor] | None = None  # (blocks in use, their contents on the host)

    def _allocate_memory_buffer(self) -> None:
        if device().type != "cuda" or self.kv_cache_management_mode == KVCacheManagementMode.PERSIST:
            super()._allocate_memory_buffer()
            if device().type == "cpu":
                self.memory_buffer.zero_()  # torch attends to whole blocks under a mask, which NaN would pass
            return
        from megatron_rollout.engine.static_memory import StaticMemory

        shape = (
            2,
            self.num_attention_layers,
            self.kv_block_allocator.total_count,
            self.block_size_tokens,
            self.num_attention_heads_per_partition,
            self.hidden_size_per_attention_head,
        )
        self._static = StaticMemory(math.prod(shape) * self.params_dtype.itemsize, device())
        self.memory_buffer = self._static.tensor(shape, self.params_dtype)
        self.static_kv_memory_pointers = True  # graphs stay valid over a suspend

    def deallocate_inference_state_buffers(self) -> None:
        """Give the KV cache's memory back as the KV mode says."""
        if self._static is None:
            return super().deallocate_inference_state_buffers()
        if not self.is_tensor_state_allocated:
            return
        self.is_tensor_state_allocated = False
        if self.kv_cache_management_mode == KVCacheManagementMode.OFFLOAD:
            self._backup = self._copy_used_blocks()
        self._static.release()

    def reinitialize_inference_state_buffers(self) -> None:
        """Take the KV cache's memory again, with its contents if the KV mode keeps them."""
        if self._static is None:
            return super().reinitialize_inference_state_buffers()
        if self.is_tensor_state_allocated:
            return
        self._static.restore()
        self.is_tensor_state_allocated = True
        if self.kv_cache_management_mode == KVCacheManagementMode.RECOMPUTE:
            self.reset_metadata()
        elif self._backup is not None:
            used, contents = self._backup
            for layer, saved in zip(self.memory_buffer.flatten(0, 1), contents, strict=True):
                layer[used] = saved.to(layer.device, non_blocking=True)
            torch.cuda.synchronize()  # the host copy is freed
            self._backup = None

    def _copy_used_blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer by layer, so that the copy needs no device memory worth naming."""
        allocator = self.kv_block_allocator
        in_use = torch.ones(allocator.total_count, dtype=torch.bool)
        in_use[allocator.block_bag[: allocator.total_avail].long()] = False
        in_use[allocator.dummy_block_idx] = False
        used = in_use.nonzero()[:, 0].to(self.memory_buffer.device)
        layers = self.memory_buffer.flatten(0, 1)
        contents = torch.empty(
            (layers.shape[0], used.numel(), *layers.shape[2:]), dtype=layers.dtype, device="cpu", pin_memory=True
        )
        for layer, saved in zip(layers, contents, strict=True):
            saved.copy_(layer[used], non_blocking=True)
        torch.cuda.synchronize()
        return used, contents

    # -- rotary embedding ---------------------------------------------------------------------------------------

    def fuse_rotary(self, rotary_embedding: torch.nn.Module, dtype: torch.dtype) -> None:
        """Rotate queries with one kernel, and keys with the one that writes them into the cache. CUDA only.

        rotary_embedding: the model's. The kernels compute the same bits as megatron-core's unfused path.
        """
        from megatron_rollout.engine.triton_rope import RotaryTable

        self.rotary_table = RotaryTable(rotary_embedding(self.max_sequence_length), dtype)

    def apply_rotary_emb_query(
        self,
        query: torch.Tensor,
        query_emb: torch.Tensor,
        config: Any,
        cu_seqlens_q: Any,
        cp_group: Any,
        mscale: float = 1.0,
    ) -> torch.Tensor:
        if self.rotary_table is None:
            return super().apply_rotary_emb_query(query, query_emb, config, cu_seqlens_q, cp_group, mscale)
        n = self.padded_active_token_count
        self.rotary_table.rotate_(query[:n, 0], self.gpu_view.token_to_pos_ids[:n])
        return query

    def apply_rotary_emb_key(
        self, key: torch.Tensor, key_emb: torch.Tensor, config: Any, cp_group: Any, mscale: float = 1.0
    ) -> torch.Tensor:
        if self.rotary_table is None:
            return super().apply_rotary_emb_key(key, key_emb, config, cp_group, mscale)
        self._key_unrotated = True  # megatron-core appends the key next, which rotates it
        return key

    def append_key_value_cache(self, layer_number: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if not self._key_unrotated:
            return super().append_key_value_cache(layer_number, key, value)
        self._key_unrotated = False
        n, view, layer = self.padded_active_token_count, self.gpu_view, self.layer_map[layer_number - 1]
        self.rotary_table.append(
            key[:n, 0],
            value[:n, 0],
            self.memory_buffer[0, layer],
            self.memory_buffer[1, layer],
            view.token_to_position_in_request[:n],
            view.token_to_block_idx[:n],
            view.token_to_local_position_within_kv_block[:n],
        )

    # -- logprobs -----------------------------------------------------------------------------------------------

    def calculate_log_probs_tensors(
        self,
        logits: torch.Tensor,
        new_tokens: torch.Tensor,
        only_last_token_logits: bool | None = False,
        sampling: Any = None,
        row_to_request: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logprobs of `new_tokens`, distribution); the latter is only made where alternatives are asked for."""
        n = self.total_request_count - self.paused_request_count
        if not only_last_token_logits or row_to_request is not None or not isinstance(sampling, RequestSampler):
            return super().calculate_log_probs_tensors(
                logits, new_tokens, only_last_token_logits, sampling, row_to_request
            )
        alternatives = bool((self.active_request_metadata["top_n_logprobs"][:n] > 0).any())
        drawn = sampling.take_logprobs()
        if drawn is not None and not alternatives:
            return drawn, drawn
        scaled = sampling._scaled(logits.squeeze(0), self)
        normaliser = scaled.logsumexp(-1)
        selected = scaled.gather(-1, new_tokens[:n, None])[:, 0] - normaliser
        return selected, scaled - normaliser[:, None] if alternatives else scaled
