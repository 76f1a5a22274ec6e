"""The HTTP side of a rollout cell: one ASGI app for the OpenAI and the SGLang wire, its server, and held ports."""

from megatron_rollout.frontend.app import build_app
from megatron_rollout.frontend.client import EngineClient, EngineStatus, NotServing
from megatron_rollout.frontend.ports import HeldPort, adopt_port, base_url, find_free_port, hold_port
from megatron_rollout.frontend.server import ServerHandle, serve
from megatron_rollout.frontend.settings import FrontendSettings

__all__ = [
    "EngineClient",
    "EngineStatus",
    "FrontendSettings",
    "HeldPort",
    "NotServing",
    "ServerHandle",
    "adopt_port",
    "base_url",
    "build_app",
    "find_free_port",
    "hold_port",
    "serve",
]
