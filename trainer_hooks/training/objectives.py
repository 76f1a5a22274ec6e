"""What a micro-batch's output is trained on (policy loss, value loss, plain cross entropy) and what is read from it."""

from __future__ import annotations

from typing import Any

import torch

from trainer_hooks.training.context_parallel import gather_zigzag, unpack_values
from trainer_hooks.training.forward import MicroBatches, Objective, Reader, cp_group, tp_group
from trainer_hooks.training.logprobs import token_logprobs, token_logprobs_and_entropy
from trainer_hooks.training.losses import policy_loss, value_loss
from trainer_hooks.training.spec import TrainSpec


def policy_objective(batches: MicroBatches, spec: TrainSpec, groups: Any) -> Objective:
    """Clipped policy loss on the columns `weights`, `advantages`, `log_probs` (old) and what the options ask for."""
    group = tp_group(groups)

    def objective(m: int, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        targets = batches.targets(m)
        logprobs, entropy = token_logprobs_and_entropy(logits, targets, temperature=spec.temperature, group=group)
        weights = _required(batches, "weights", m)
        old = batches.response("log_probs", m)
        return policy_loss(
            logprobs,
            logprobs.detach() if old is None else old,
            _required(batches, "advantages", m),
            weights,
            spec.loss,
            ref_logprobs=batches.response("ref_log_probs", m),
            entropy=entropy,
            rollout_logprobs=batches.response("rollout_log_probs", m),
        )

    return objective


def value_objective(batches: MicroBatches, spec: TrainSpec, groups: Any) -> Objective:
    """Clipped value loss on the columns `weights`, `returns` and `values` (old). The output at a response token's
    predictor position is the value of the state before that token, so nothing is shifted or gathered here."""

    def objective(m: int, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return value_loss(
            output.squeeze(-1),
            _required(batches, "values", m),
            _required(batches, "returns", m),
            _required(batches, "weights", m),
            value_clip=spec.value_clip,
        )

    return objective


def supervised_objective(batches: MicroBatches, spec: TrainSpec, groups: Any) -> Objective:
    """Cross entropy of the response tokens, weighted by `weights`."""
    group = tp_group(groups)

    def objective(m: int, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs = token_logprobs(logits, batches.targets(m), group=group)
        loss = -(_required(batches, "weights", m) * logprobs).sum()
        return loss, {"loss": loss.detach().clone()}

    return objective


OBJECTIVES = {"policy": policy_objective, "supervised": supervised_objective, "value": value_objective}


def read_logprobs(batches: MicroBatches, spec: TrainSpec, groups: Any) -> Reader:
    """Logprobs [R] of each response."""

    def read(m: int, logits: torch.Tensor) -> list[torch.Tensor]:
        pack = batches.packs[m]
        local = token_logprobs(logits, batches.targets(m), temperature=spec.temperature, group=tp_group(groups))
        whole = gather_zigzag(local, pack.padded_lengths, cp_group(groups))
        return pack.unpack_response(whole, batches.response_lengths)

    return read


def read_values(batches: MicroBatches, groups: Any) -> Reader:
    """Values [L] of each sequence: values[t] = V(state before token t)."""
    return lambda m, output: unpack_values(output, batches.packs[m], cp_group(groups))


def _required(batches: MicroBatches, name: str, m: int) -> torch.Tensor:
    column = batches.response(name, m)
    if column is None:
        raise ValueError(f"the batch lacks column {name!r}, which the loss needs")
    return column
