"""Weight versions: integers that only grow. Pure."""

from __future__ import annotations


def check_version(version: object, newest: int) -> None:
    """Raises ValueError unless `version` is an integer >= 0 (no bool) and not below `newest`: versions only grow."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise ValueError(f"a weight version is an integer >= 0, got {version!r}")
    if version < newest:
        raise ValueError(f"weight version {version} is below the newest one, {newest}: versions only grow")


class CapturedVersion:
    """The version that the driver states for captured tokens (`set_rollout_weight_version`)."""

    def __init__(self, *, expose_http: bool) -> None:
        self._expose_http = expose_http
        self._ready = False
        self.version: int | None = None

    def setup_token_capture(self) -> None:
        """Raises ValueError if HTTP is not exposed: tokens are captured there."""
        if not self._expose_http:
            raise ValueError("setup_token_capture needs the HTTP servers, but expose_http is False")
        self._ready = True

    def set_rollout_weight_version(self, version: int) -> None:
        """Raises RuntimeError before `setup_token_capture`, ValueError as `check_version` does."""
        if not self._ready:
            raise RuntimeError("set_rollout_weight_version before setup_token_capture")
        check_version(version, -1 if self.version is None else self.version)
        self.version = version
