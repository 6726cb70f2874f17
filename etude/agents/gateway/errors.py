"""`GatewayError`: an error response, in the format that OpenAI's clients read.

Invariant: every rejection is one line with a status, a `type`, and where it helps the `param` to change and a `code` that a
program can test. A response to a request that would fail again says not to retry it.
"""

from __future__ import annotations

from typing import Any

TOO_LONG = "context_length_exceeded"


class GatewayError(Exception):
    """A request is answered with `status` and this message.

    `again`: whether the same request may succeed later; if so, OpenAI's clients retry it by themselves.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, again: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.again = status, code, param, again

    @property
    def headers(self) -> dict[str, str]:
        """The response's headers."""
        return {"x-should-retry": "true" if self.again else "false"}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_body(self.status, str(self), code=self.code, param=self.param)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object for a response with `status`."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
