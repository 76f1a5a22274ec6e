"""A cell's entry in a host's sglang-router (0.3). Blocking; every call has a deadline."""

from __future__ import annotations

import logging

import httpx

logger = logging.getLogger(__name__)

_TIMEOUT_S = 30.0


def register(router: str, url: str, token: str | None) -> None:
    """Add the worker `url`. The router answers before it has looked at it, and lists it once its `/health` is 200.

    token: what the router sends the worker as bearer token. Raises httpx.HTTPError if the router refuses or is gone.
    """
    body = {"url": url, "worker_type": "regular", **({"api_key": token} if token else {})}
    httpx.post(f"{router}/workers", json=body, timeout=_TIMEOUT_S, trust_env=False).raise_for_status()


def deregister(router: str, url: str) -> None:
    """Remove the worker `url`. Failures are logged: the router's own checks find a worker that is gone."""
    try:
        with httpx.Client(base_url=router, timeout=_TIMEOUT_S, trust_env=False) as client:
            for worker in client.get("/workers").raise_for_status().json()["workers"]:
                if worker["url"] == url:
                    client.delete(f"/workers/{worker['id']}").raise_for_status()
                    return
            logger.info("the router at %s does not list %s", router, url)
    except (httpx.HTTPError, KeyError, ValueError) as error:
        logger.warning("%s could not be removed from the router at %s: %s: %s", url, router, type(error).__name__, error)
