"""JSON in and out: what a request may hold, and answers that the strictest reader takes."""

import asyncio
import hashlib
import json
import math
from typing import Any

from fastapi import Request, Response

from marlaas_jax.errors import InvalidRequest

MAX_DEPTH = 32
THREAD_BYTES = 64 << 10  # a larger body is read in a thread, so that others do not wait


class Json(Response):
    """Strict JSON in ASCII: a number that is not finite becomes null, half a surrogate pair an escape."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200):
        super().__init__(to_json(content).encode(), status_code)


class JsonRequest(Request):
    """A request whose body was read within limits before a route sees it."""

    digest = ""  # of the body

    @property
    def document(self) -> Any:
        """What the body holds; None without one."""
        return getattr(self, "_json", None)

    async def load(self, max_bytes: int) -> None:
        """Reads and checks the body. Raises TooLarge, or InvalidRequest for what is not JSON as it is allowed here."""
        announced = self.headers.get("content-length", "")
        if announced.isdigit() and int(announced[:20]) > max_bytes:
            raise TooLarge(max_bytes)
        chunks, size = [], 0
        async for chunk in self.stream():
            size += len(chunk)
            if size > max_bytes:
                raise TooLarge(max_bytes)
            chunks.append(chunk)
        self._body = b"".join(chunks)  # where Request.body keeps it
        if size > THREAD_BYTES:
            await asyncio.to_thread(self._parse)
        else:
            self._parse()

    def _parse(self) -> None:
        self.digest = hashlib.sha256(self._body).hexdigest()
        if self._body:
            self._json = parse(self._body)  # where Request.json keeps it


class TooLarge(InvalidRequest):
    """A body beyond its limit."""

    def __init__(self, max_bytes: int):
        super().__init__(f"body: must be at most {max_bytes} bytes")


def parse(body: bytes) -> Any:
    """Returns the document. Raises InvalidRequest where it is not JSON, too deep, or holds what JSON cannot."""
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
        _check(document)
    except RecursionError:
        raise InvalidRequest(f"body: is nested too deeply; at most {MAX_DEPTH} levels are allowed") from None
    except InvalidRequest:
        raise
    except ValueError as error:
        raise InvalidRequest(f"body: is not JSON in UTF-8 ({str(error)[:200]})") from None
    return document


def to_json(content: Any) -> str:
    """Returns strict JSON."""
    try:
        return json.dumps(content, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(json.loads(json.dumps(content), parse_constant=lambda _: None), separators=(",", ":"))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check(document: Any) -> None:
    level, depth = [document], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"body: is nested too deeply; at most {MAX_DEPTH} levels are allowed")
        below: list[Any] = []
        for value in level:
            match value:
                case dict():
                    below += value.keys()
                    below += value.values()
                case list():
                    below += value
                case float() if not math.isfinite(value):
                    raise InvalidRequest("body: holds a number that is too large")
                case str() if not value.isascii():
                    value.encode()  # half a surrogate pair is a ValueError
        level = below
