"""Prompts to rewarded samples: requests to the rollout cells, rewards as the samples complete."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_rollout.generation import MegatronGeneration
from megatron_rollout.requests import GenerationOutput, GenerationRequest, SamplingParams
from megatron_rollout.seeds import sample_seed
from trainer_hooks.trainer.rewards import Reward, reward_samples
from trainer_hooks.trainer.sample import Sample

#: rollout_id under which evaluation draws its (greedy, so unused) noise
_EVAL = -1


class Rollouts:
    """Generates and rewards samples. context_length: prompt and response together, in tokens."""

    def __init__(
        self,
        args: argparse.Namespace,
        generation: MegatronGeneration,
        reward: Reward,
        tokenizer: Any,
        *,
        context_length: int,
        sampling: SamplingParams,
    ) -> None:
        self.args = args
        self.generation = generation
        self.reward = reward
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.sampling = sampling
        self.tokens_generated = 0
        self.generated_by: dict[int, list[int]] = {}

    def generate(self, rollout_id: int, samples: Sequence[Sample], *, greedy: bool = False) -> list[Sample]:
        """Fill in responses and rewards of `samples`, in place, and return them.

        A prompt that is longer than the context is not generated: it becomes an empty, truncated sample of reward 0,
        which the metrics count. `generated_by` says afterwards which cell made which samples (-1: none did).
        Raises GenerationFailed if too many samples failed.
        """
        self.generated_by = {}
        params = replace(self.sampling, temperature=0.0) if greedy else self.sampling
        requests, waiting = [], []
        for sample in samples:
            prompt = self.prompt_ids(sample)
            if len(prompt) > self.context_length:
                self._too_long(sample, prompt)
                self.generated_by.setdefault(-1, []).append(sample.index)
                continue
            seed = sample_seed(self.args.rollout_seed, rollout_id, sample.index)
            requests.append(
                GenerationRequest(
                    request_id=f"{rollout_id}/{sample.index}",
                    prompt_ids=tuple(prompt),
                    sampling=replace(params, seed=seed),
                    group=None if greedy else str(sample.group_index),
                )
            )
            waiting.append(sample)
        outputs = self.generation.run(requests)
        self.generation.check_failures(outputs)
        for sample, output in zip(waiting, outputs, strict=True):
            self._fill(sample, output)
            self.generated_by.setdefault(-1 if output.cell is None else output.cell, []).append(sample.index)
        answered = [s for s in waiting if s.status != Sample.Status.FAILED]
        asyncio.run(reward_samples(self.reward, self.args, answered))
        return list(samples)

    def evaluate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Mean greedy reward of held-out prompts."""
        self.generate(_EVAL, samples, greedy=True)
        rewards = [float(s.reward or 0.0) for s in samples]
        return {"eval/reward": sum(rewards) / max(1, len(rewards)), "eval/samples": float(len(rewards))}

    def prompt_ids(self, sample: Sample) -> list[int]:
        if isinstance(sample.prompt, str):
            return list(self.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"])
        return list(sample.prompt)

    def _too_long(self, sample: Sample, prompt: list[int]) -> None:
        sample.tokens, sample.response, sample.response_length = prompt[: self.context_length], "", 0
        sample.loss_mask, sample.rollout_log_probs, sample.weight_versions = [], [], []
        sample.reward, sample.status = 0.0, Sample.Status.TRUNCATED
        sample.metadata = {**(sample.metadata or {}), "prompt_too_long": len(prompt)}

    def _fill(self, sample: Sample, output: GenerationOutput) -> None:
        sample.tokens = [*output.prompt_ids, *output.output_ids]
        sample.response_length = len(output.output_ids)
        sample.response = self.tokenizer.decode(output.output_ids, skip_special_tokens=True)
        sample.rollout_log_probs = list(output.logprobs)
        sample.weight_versions = [list(span) for span in output.weight_versions]
        sample.loss_mask = [1] * len(output.output_ids)
        sample.status = {
            "stop": Sample.Status.COMPLETED,
            "length": Sample.Status.TRUNCATED,
            "abort": Sample.Status.ABORTED,
            "error": Sample.Status.FAILED,
        }[output.finish_reason]
        if output.finish_reason == "error":  # within --max-failed-fraction: nothing to learn from
            sample.reward, sample.loss_mask = 0.0, [0] * sample.response_length
        self.tokens_generated += sample.response_length
