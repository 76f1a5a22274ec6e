"""A tokenizer and a stand-in for a cell's engine, for the tests of the HTTP side.

`FakeEngine` replaces the one thing that these tests do not cross: the model. It implements `EngineClient` with a real
step loop in a thread of its own, and draws tokens from a hash of (prompt, seed, position), so that what must come back
over HTTP can be computed beside it. Started as a script it serves one such cell, for tests that kill a worker.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_rollout.frontend.app import build_app
from megatron_rollout.frontend.client import EngineStatus, NotServing
from megatron_rollout.frontend.ports import hold_port
from megatron_rollout.frontend.server import ServerHandle, serve
from megatron_rollout.frontend.settings import FrontendSettings
from megatron_rollout.requests import GenerationOutput, GenerationRequest, TokenDelta

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["the cat sat on the mat", "user assistant system", "naïve façade 你好世界 😀🎉 żółw", "0123456789 + - ="] * 4


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (as Qwen's and Llama-3's) trained on a few lines, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A SentencePiece-like tokenizer (as Llama-2's): metaspace, bytes as <0xNN> pieces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁the", "▁cat"]
    pieces += ["he", "▁t", "at", "▁c"]
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("a", "t"), ("▁", "c"), ("▁c", "at")]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@dataclass
class _Run:
    request: GenerationRequest
    future: Future[GenerationOutput]
    on_delta: Callable[[TokenDelta], None] | None
    budget: int
    ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)


def draw(prompt_ids: tuple[int, ...], seed: int | None, position: int, vocab: int) -> tuple[int, float]:
    """(token, logprob) that the fake engine samples at a position; never an end-of-text token."""
    digest = hashlib.blake2b(f"{prompt_ids}/{seed}/{position}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    return len(SPECIALS) + number % (vocab - len(SPECIALS)), -((number >> 32) % 5000) / 1000 - 0.001


class FakeEngine:
    """An `EngineClient` without a model. `script` (ids) is what every request samples, if given, and then EOS."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast | None = None,
        *,
        step_s: float = 0.0,
        script: list[int] | None = None,
        logprob: float | None = None,
        tops: tuple[tuple[int, float], ...] | None = None,
        max_context_length: int = 256,
        tokens_per_step: int = 1,
    ) -> None:
        self.tokenizer = tokenizer or byte_level_tokenizer()
        self.vocab = len(self.tokenizer)
        self.step_s = step_s
        self.script = script
        self.logprob = logprob
        self.tops = tops
        self.max_context_length = max_context_length
        self.tokens_per_step = tokens_per_step
        self.serving, self.reason, self.state = True, "", "RUNNING"
        self.weight_version: int | None = 3
        self.paused = False
        self.fail_with: Exception | None = None
        self.command_failure: Exception | None = None
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str | None] = []
        self._runs: dict[str, _Run] = {}
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._generated = self._prompt_tokens = 0
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    # EngineClient
    def submit(self, request, on_delta=None):
        if not self.serving:
            raise NotServing(f"{self.state}: {self.reason}")
        if request.request_id in self._runs:
            raise ValueError(f"request_id {request.request_id!r} is in flight already")
        room = max(self.max_context_length - len(request.prompt_ids), 1)
        run = _Run(request, Future(), on_delta, min(request.sampling.max_new_tokens, room))
        self._runs[request.request_id] = run
        self.submitted.append(request)
        self._inbox.put(None)
        return run.future

    def abort(self, request_id):
        self.aborted.append(request_id)
        self._inbox.put(("abort", request_id))

    def call(self, name, **arguments):
        future: Future[Any] = Future()
        self._inbox.put((name, arguments, future))
        return future

    def status(self):
        runs = list(self._runs.values())
        return EngineStatus(
            state=self.state, serving=self.serving, reason=self.reason, weight_version=self.weight_version,
            running_requests=0 if self.paused else len(runs), waiting_requests=len(runs) if self.paused else 0,
            outstanding_tokens=sum(run.budget - len(run.ids) for run in runs),
            generated_tokens=self._generated, prompt_tokens=self._prompt_tokens,
            used_tokens=sum(len(run.request.prompt_ids) + len(run.ids) for run in runs), kv_capacity_tokens=4096,
            max_running_requests=64, max_context_length=self.max_context_length, vocab_size=self.vocab,
            model_name="fake-model", model_path="fake-model", tensor_parallel_size=2, pipeline_parallel_size=1,
            dtype="float32", cell=0,
        )  # fmt: skip

    def close(self) -> None:
        self._inbox.put("stop")
        self._thread.join(5)

    # the step loop
    def _loop(self) -> None:
        while True:
            block = self.paused or not self._runs
            try:
                message = self._inbox.get(timeout=1.0) if block else self._inbox.get_nowait()
                if message == "stop":
                    return
                if message is not None:
                    self._command(message)
                continue
            except queue.Empty:
                if block:
                    continue
            if self.step_s:
                time.sleep(self.step_s)
            for run in list(self._runs.values()):
                self._step(run)

    def _command(self, message: tuple) -> None:
        if message[0] == "abort":
            for request_id in [message[1]] if message[1] is not None else list(self._runs):
                if run := self._runs.get(request_id):
                    self._finish(run, "abort", None)
            return
        name, arguments, future = message
        self.commands.append((name, arguments))
        if self.command_failure is not None:
            future.set_exception(self.command_failure)
            return
        result: Any = None
        if name == "pause":
            self.paused = True
            if arguments["mode"] == "abort":
                self._command(("abort", None))
        elif name == "resume":
            self.paused = False
        elif name == "flush_cache":
            result = self.paused or not self._runs
        elif name == "set_weight_version":
            self.weight_version = arguments["version"]
        elif name == "check_weights":
            result = {"checksum": "abc"}
        if arguments.get("weight_version") is not None:
            self.weight_version = arguments["weight_version"]
        if name.startswith("update_weights_from"):
            self.serving, self.reason, self.state = True, "", "RUNNING"
        future.set_result(result)

    def _step(self, run: _Run) -> None:
        sampling = run.request.sampling
        if self.fail_with is not None:
            del self._runs[run.request.request_id]
            run.future.set_exception(self.fail_with)
            return
        if not run.ids:
            self._prompt_tokens += len(run.request.prompt_ids)
        new, finish, matched = [], None, None
        for _ in range(self.tokens_per_step):
            if len(run.ids) >= run.budget:
                finish = "length"
                break
            token = self._next(run)
            run.ids.append(token)
            new.append(token)
            self._generated += 1
            eos = not sampling.ignore_eos and token == self.tokenizer.eos_token_id
            text = self.tokenizer.decode(run.ids) if sampling.stop else ""
            if eos or token in sampling.stop_token_ids:
                finish, matched = "stop", token
            elif hit := [s for s in sampling.stop if s in text]:
                finish, matched = "stop", min(hit, key=text.find)
            elif len(run.ids) >= run.budget:
                finish = "length"
            if finish:
                break
        version = self.weight_version or 0
        if new and (not run.spans or run.spans[-1][1] != version):
            run.spans.append((len(run.ids) - len(new), version))
        if new and run.on_delta:
            logprobs = self._logprobs(run)[-len(new) :]
            run.on_delta(TokenDelta(run.request.request_id, tuple(new), logprobs, self._tops(run)[-len(new) :]))
        if finish:
            self._finish(run, finish, matched)

    def _next(self, run: _Run) -> int:
        if self.script is not None:
            return self.script[len(run.ids)] if len(run.ids) < len(self.script) else self.tokenizer.eos_token_id
        return draw(run.request.prompt_ids, run.request.sampling.seed, len(run.ids), self.vocab)[0]

    def _logprobs(self, run: _Run) -> tuple[float, ...]:
        if self.logprob is not None:
            return (self.logprob,) * len(run.ids)
        prompt, seed = run.request.prompt_ids, run.request.sampling.seed
        return tuple(draw(prompt, seed, position, self.vocab)[1] for position in range(len(run.ids)))

    def _tops(self, run: _Run) -> tuple:
        count = run.request.sampling.top_logprobs
        if not count:
            return ()
        if self.tops is not None:
            return (self.tops[:count],) * len(run.ids)
        return tuple(
            ((token, logprob), *((other, logprob - other) for other in range(3, 2 + count)))
            for token, logprob in zip(run.ids, self._logprobs(run), strict=True)
        )

    def _finish(self, run: _Run, reason: str, matched: str | int | None) -> None:
        del self._runs[run.request.request_id]
        prompt = run.request.prompt_ids
        scores = (None, *(-0.5 * i for i in range(1, len(prompt)))) if run.request.sampling.prompt_logprobs else None
        output = GenerationOutput(
            run.request.request_id, prompt, tuple(run.ids), self._logprobs(run), reason, matched, tuple(run.spans),
            self._tops(run), scores, cached_tokens=1,
        )  # fmt: skip
        run.future.set_result(output)


@contextlib.contextmanager
def served(engine: FakeEngine, **settings: Any) -> Iterator[ServerHandle]:
    """A live uvicorn on loopback in front of `engine`; both end with the block."""
    handle = serve(build_app(engine, FrontendSettings(**settings)), hold_port().detach())
    try:
        yield handle
    finally:
        handle.stop(5)
        engine.close()


def main() -> None:
    """Serve one fake cell on a loopback port until killed; prints its URL."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.005)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token")
    parser.add_argument("--not-serving", action="store_true")
    options = parser.parse_args()
    engine = FakeEngine(step_s=options.step_s)
    if options.not_serving:
        engine.serving, engine.reason, engine.state, engine.weight_version = False, "behind version 4", "STALE", None
    held = hold_port("127.0.0.1", options.port)
    handle = serve(build_app(engine, FrontendSettings(token=options.token)), held.detach())
    print(handle.url, flush=True)
    threading.Event().wait(600)


if __name__ == "__main__":
    main()
