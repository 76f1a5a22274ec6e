"""Settings of one frontend, checked once."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

MIB = 1 << 20


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host` (a name other than localhost counts as wider)."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


@dataclass(frozen=True)
class FrontendSettings:
    """What one HTTP server accepts.

    host: the address it is bound to. token: bearer token that every route but health and metrics asks for; required
        when `host` is wider than loopback.
    max_body_bytes: larger bodies get 413. max_prompt_tokens: longer prompts get 400 (None: the model's context).
    max_samples_per_call: prompts times n of one call. max_top_logprobs: alternatives per token on the OpenAI wire.
    served_model_name: name on the OpenAI wire (None: the engine's model name).
    body_timeout_s: a body that takes longer to arrive gets 408.
    request_timeout_s: a call that takes longer is aborted in the engine and gets 504. control_timeout_s: the same for
        control commands (weight updates included). ping_timeout_s: for `/health_generate`.
    """

    host: str = "127.0.0.1"
    token: str | None = field(default=None, repr=False)
    max_body_bytes: int = 64 * MIB
    max_prompt_tokens: int | None = None
    max_samples_per_call: int = 1024
    max_top_logprobs: int = 20
    served_model_name: str | None = None
    body_timeout_s: float = 60.0
    request_timeout_s: float = 3600.0
    control_timeout_s: float = 600.0
    ping_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        problems = []
        if not is_loopback(self.host) and not self.token:
            problems.append(f"host {self.host!r} is wider than loopback: a token is required")
        if self.token is not None and (not self.token.strip() or not self.token.isascii()):
            problems.append("token must be non-empty ASCII")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            problems.append(f"max_prompt_tokens must be >= 1, got {self.max_prompt_tokens}")
        for name in (
            "max_body_bytes",
            "max_samples_per_call",
            "body_timeout_s",
            "request_timeout_s",
            "control_timeout_s",
            "ping_timeout_s",
        ):
            if getattr(self, name) <= 0:
                problems.append(f"{name} must be > 0, got {getattr(self, name)}")
        if self.max_top_logprobs < 0:
            problems.append(f"max_top_logprobs must be >= 0, got {self.max_top_logprobs}")
        if problems:
            raise ValueError("; ".join(problems))
