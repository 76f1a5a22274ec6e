"""What a client did wrong, as one line, in the shape that OpenAI clients and SGLang clients read."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class RequestError(Exception):
    """A call that is answered with `status` and `message`; `param` names the offending field."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


def bad_request(message: str, param: str | None = None) -> RequestError:
    return RequestError(400, message, param)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """`{"error": {...}}`; `message` is also at the top, where SGLang's clients look."""
    kind = _TYPES.get(status, "api_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}, "message": message}


def validation_message(error: ValidationError) -> tuple[str, str | None]:
    """All findings of pydantic in one line, each naming its field and the value given, and the first field."""
    lines, first = [], None
    for item in error.errors(include_url=False):
        name = ".".join(str(part) for part in item["loc"]) or "body"
        first = first or name
        if item["type"] == "missing":
            lines.append(f"{name}: is required")
            continue
        value = repr(item.get("input"))
        if len(value) > 80:
            value = value[:77] + "..."
        message = item["msg"]
        message = message.removeprefix("Value error, ")
        lines.append(f"{name}: {message[:1].lower()}{message[1:]}, got {value}")
    return "; ".join(lines), first
