"""Errors as the client sees them: OpenAI's envelope, its status table, and the conversion of validation errors.

Every refusal of the API is an `ApiError`; its body is `{"error": {"message", "type", "param", "code"}}` with `code` a
string or null. Messages name the field and never repeat what the client sent at unbounded length.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

# HTTP status -> OpenAI's error type.
ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
MAX_LISTED_ERRORS = 10
MAX_MESSAGE_CHARS = 200
RULE_ERROR = "broken_rule"  # pydantic error type of a rule between fields; its context names the param

# pydantic's error type -> (our code, our message or None for pydantic's own).
_VALIDATION_CODES: Mapping[str, tuple[str | None, str | None]] = {
    "missing": ("missing_required_parameter", "a value is required"),
    "json_invalid": (None, "the request body is not valid JSON"),
    "model_type": ("invalid_type", "must be an object"),
    "model_attributes_type": ("invalid_type", "must be an object"),
    "string_type": ("invalid_type", "must be a string"),
    "string_unicode": ("invalid_type", "must be valid Unicode"),
    "int_type": ("invalid_type", "must be an integer"),
    "int_from_float": ("invalid_type", "must be an integer"),
    "float_type": ("invalid_type", "must be a number"),
    "bool_type": ("invalid_type", "must be true or false"),
    "list_type": ("invalid_type", "must be a list"),
    "dict_type": ("invalid_type", "must be an object"),
    "finite_number": ("invalid_value", "must be a finite number"),
}


class ApiError(Exception):
    """A request that is answered with an HTTP error (or, after the head was sent, with an error event).

    Args:
        status: the HTTP status; also decides the error type.
        message: for the user; names the field and the fix.
        param: the request field at fault, or None.
        code: a machine-readable string, or None.
        retry_after_s: sent as `Retry-After` when the same request may succeed later.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, dict[str, str | None]]:
        """The envelope, ready for JSON."""
        kind = ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encode(self) -> bytes:
        """The envelope as one line of JSON."""
        return msgspec.json.encode(self.body())

    def headers(self) -> dict[str, str]:
        """Headers that belong to this error."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def error_response(error: ApiError) -> Response:
    """The envelope with its status and headers."""
    return Response(error.encode(), status_code=error.status, media_type="application/json", headers=error.headers())


def invalid(param: str | None, message: str, *, code: str | None = "invalid_value") -> ApiError:
    """A 400 whose message starts with the field's name."""
    return ApiError(400, message if param is None else f"{param}: {message}", param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """A 400 for a known option that this server does not apply."""
    return invalid(param, message, code="unsupported_parameter")


def model_not_found(model: str) -> ApiError:
    """The 404 of an unknown model name."""
    return ApiError(
        404,
        f"The model '{clip(model)}' does not exist on this server; GET /v1/models lists what it serves.",
        param="model",
        code="model_not_found",
    )


def body_too_large(limit: int) -> ApiError:
    """The 413 of a body above the configured limit (bytes)."""
    return ApiError(413, f"The request body is larger than this server's limit of {limit} bytes (http.max_body_bytes).")


def internal_error(
    message: str = "The server failed to process the request; its log holds the cause.",
) -> ApiError:
    """A 500; its message tells nothing of the server's insides, the cause is in the log."""
    return ApiError(500, message, code="internal_error")


def unavailable(message: str, *, retry_after_s: int) -> ApiError:
    """The 503 of a server that is starting, draining or has lost its engine."""
    return ApiError(503, message, code="overloaded", retry_after_s=retry_after_s)


def clip(text: str, limit: int = MAX_MESSAGE_CHARS) -> str:
    """At most `limit` characters of `text`, with "..." where it was cut."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def from_value_error(error: ValueError, fields: Sequence[str]) -> ApiError:
    """A 400 from a ValueError; the field its message starts with becomes `param` if it is one of `fields`."""
    message = clip(str(error), 2 * MAX_MESSAGE_CHARS)
    head = message.split(maxsplit=1)[0].strip("`'\":,=.") if message.split() else ""
    return ApiError(400, message, param=head if head in fields else None, code="invalid_value")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """One 400 from pydantic's (or FastAPI's) error list: at most 10 errors of 200 characters, without the input.

    param and code are those of the first error.
    """
    lines: list[str] = []
    first_param: str | None = None
    first_code: str | None = None
    for index, error in enumerate(errors[:MAX_LISTED_ERRORS]):
        code, own_message = _VALIDATION_CODES.get(str(error.get("type")), ("invalid_value", None))
        location = [str(part) for part in error.get("loc", ()) if part not in ("body", "query", "path")]
        if error.get("type") == RULE_ERROR:
            location.append(str(error["ctx"]["param"]))
        param = clip(".".join(location)) or None
        text = own_message if own_message is not None else _plain(str(error.get("msg", "invalid value")))
        if param is None and own_message == "a value is required":
            text = "the request body is missing"
        if param is None and own_message == "must be an object":
            code, text = None, "the request body must be a JSON object"
        lines.append(clip(text if param is None or code is None else f"{param}: {text}"))
        if index == 0:
            first_param, first_code = (param if code is not None else None), code
    if len(errors) > MAX_LISTED_ERRORS:
        lines.append(f"and {len(errors) - MAX_LISTED_ERRORS} more errors")
    return ApiError(400, "; ".join(lines), param=first_param, code=first_code)


def _plain(message: str) -> str:
    """pydantic's message without its prefixes, in this API's wording ("must be ...")."""
    message = message.removeprefix("Value error, ")
    if message.startswith("Input should be "):
        message = "must be " + message.removeprefix("Input should be ")
    return message
