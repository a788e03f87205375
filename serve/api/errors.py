"""Refusals and failures in the form of OpenAI's API."""

import math
from typing import Any

from starlette.responses import JSONResponse

TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is told in place of an answer.

    Attributes:
      param: the field of the request that it is about.
      code: a name of the reason for programs.
      retry_after: seconds to wait before asking again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as a whole response."""
        return JSONResponse(self.body, self.status, self.headers)
