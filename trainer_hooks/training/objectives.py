"""What a micro-batch's logits are trained on: the policy loss, or plain cross entropy (the warm-up)."""

from __future__ import annotations

from typing import Any

import torch

from trainer_hooks.training.forward import MicroBatches, Objective, tp_group
from trainer_hooks.training.logprobs import token_logprobs, token_logprobs_and_entropy
from trainer_hooks.training.losses import policy_loss
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


def supervised_objective(batches: MicroBatches, groups: Any) -> Objective:
    """Cross entropy of the response tokens, weighted by `weights`."""
    group = tp_group(groups)

    def objective(m: int, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs = token_logprobs(logits, batches.targets(m), group=group)
        loss = -(_required(batches, "weights", m) * logprobs).sum()
        return loss, {"loss": loss.detach().clone()}

    return objective


def _required(batches: MicroBatches, name: str, m: int) -> torch.Tensor:
    column = batches.response(name, m)
    if column is None:
        raise ValueError(f"the batch lacks column {name!r}, which the loss needs")
    return column
