"""One request to the service and what may go wrong with it: retries, keys that make them safe, errors as exceptions."""

import asyncio
import json
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from marlaas_jax.errors import InternalError, MarlaasError, NotAllowed, QuotaExceeded, Unreachable, user_error

DEFAULT_URL = "http://127.0.0.1:8000"
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
SILENCE_S = 45.0  # three heartbeats of a stream
TIMEOUT = httpx.Timeout(30.0, connect=5.0, write=300.0)
SUBMIT_TIMEOUT = httpx.Timeout(600.0, connect=5.0, write=300.0)  # the service tries the environment first
STREAM_TIMEOUT = httpx.Timeout(30.0, connect=5.0, read=SILENCE_S)
SAMPLING = ("/v1/completions", "/v1/chat/completions")
SAMPLING_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
RETRIED = (409, 429, 503)  # where the answer says when to come back


class Wire:
    """Connections to one service with one key."""

    def __init__(self, url: str | None, api_key: str | None, patience_s: float):
        self.url = (url or os.environ.get("MARLAAS_URL") or DEFAULT_URL).rstrip("/")
        self.patience_s = patience_s
        key = api_key or os.environ.get("MARLAAS_API_KEY")
        if not key:
            raise NotAllowed("no API key: give api_key=... or set MARLAAS_API_KEY")
        if not (key.isascii() and key.isprintable()):
            raise NotAllowed("the API key must be printable ASCII")
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=TIMEOUT, trust_env=False
            )
        except httpx.InvalidURL as error:
            raise Unreachable(f"{self.url}: is no URL ({error})") from None

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.aclose()

    async def json(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: object = None,
        timeout: httpx.Timeout = TIMEOUT,
    ) -> dict[str, Any]:
        """Returns the answer's document."""
        return (await self.request(method, path, params=params, body=body, timeout=timeout)).json()

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: object = None,
        timeout: httpx.Timeout = TIMEOUT,
    ) -> httpx.Response:
        """Sends until it is answered, for at most `patience_s`. A POST is done once, however often it was sent.

        Sampling changes nothing: such a POST has no key that the service would keep its answer for, and more time.
        """
        is_kept = method == "POST" and path not in SAMPLING
        headers = {"Idempotency-Key": secrets.token_hex(16)} if is_kept else {}
        timeout = SAMPLING_TIMEOUT if path in SAMPLING else TIMEOUT
        tries = _Tries(self.patience_s)
        while True:
            try:
                response = await self._http.request(
                    method, path, params=_given(params), json=body, headers=headers, timeout=timeout
                )
            except httpx.TransportError as error:
                await tries.pause_or_raise(self._unreachable(error))
                continue
            if response.is_success:
                return response
            if method == "DELETE" and response.status_code == 404 and tries.num_failed:
                return httpx.Response(200, json={})  # an earlier try did it, only its answer was lost
            await tries.pause_or_raise(*_failure(response))

    async def blocks(self, path: str) -> AsyncIterator[bytes]:
        """Yields a long answer as it comes; one that is cut off raises Unreachable."""
        try:
            async with self._http.stream("GET", path, timeout=STREAM_TIMEOUT) as response:
                if not response.is_success:
                    await response.aread()
                    raise _failure(response)[0]
                async for block in response.aiter_bytes():
                    yield block
        except httpx.TransportError as error:
            raise self._unreachable(error) from None

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks of a streamed answer. One that is cut off, or ends with an error, raises."""
        tries = _Tries(self.patience_s)
        while True:
            try:
                async with self._http.stream("POST", path, json={**body, "stream": True}, timeout=SAMPLING_TIMEOUT) as response:
                    if response.is_success:
                        async for message in _messages(response.aiter_lines()):
                            if message["data"] == "[DONE]":
                                return
                            chunk = json.loads(message["data"])
                            if "error" in chunk:
                                raise _told(chunk["error"], None)
                            yield chunk
                        raise Unreachable(f"{self.url}: the stream was cut off")
                    await response.aread()
                    failure = _failure(response)
            except httpx.TransportError as error:
                raise self._unreachable(error) from None
            await tries.pause_or_raise(*failure)

    async def events(self, path: str, after: int | None) -> AsyncIterator[dict[str, Any]]:
        """Yields events from where `after` says, across any number of connections, until the service says `end`."""
        seen = None if after is None else str(after)
        tries = _Tries(self.patience_s)
        while True:
            failure, retry_after_s = Unreachable(f"{self.url}: the stream was cut off"), 0.0
            headers = {} if seen is None else {"Last-Event-ID": seen}
            try:
                async with self._http.stream("GET", path, headers=headers, timeout=STREAM_TIMEOUT) as response:
                    if not response.is_success:
                        await response.aread()
                        raise _Refusal(*_failure(response))
                    async for message in _messages(response.aiter_lines()):
                        seen = message.get("id", seen)
                        tries = _Tries(self.patience_s)
                        if message.get("event") == "end":
                            return
                        if "data" in message:
                            yield json.loads(message["data"])
            except httpx.TransportError as error:
                failure = self._unreachable(error)
            except _Refusal as refusal:
                failure, retry_after_s = refusal.error, refusal.retry_after_s
            await tries.pause_or_raise(failure, retry_after_s)

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        reason = str(error) or type(error).__name__
        return Unreachable(f"{self.url}: no service answers there ({reason}); start one with `marlaas serve`")


class _Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, error: MarlaasError, retry_after_s: float | None):
        super().__init__()
        self.error = error
        self.retry_after_s = retry_after_s


class _Tries:
    """How often and how long something was tried."""

    def __init__(self, patience_s: float):
        self.num_failed = 0
        self._deadline = time.monotonic() + patience_s

    async def pause_or_raise(self, error: MarlaasError, retry_after_s: float | None = 0.0) -> None:
        """Waits before the next try; raises where there is to be none."""
        if retry_after_s is None:
            raise error
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2**self.num_failed) * random.uniform(0.5, 1.0)
        delay_s = max(delay_s, retry_after_s)
        if time.monotonic() + delay_s > self._deadline:
            raise error
        self.num_failed += 1
        await asyncio.sleep(delay_s)


def _failure(response: httpx.Response) -> tuple[MarlaasError, float | None]:
    """Returns the exception that the answer stands for and the seconds to wait before a repeat; None: it is no use."""
    try:
        told = response.json()["error"]
        kind, message = str(told["kind"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        kind, message = "", f"{response.url}: answered {response.status_code}, which is not how a marlaas service answers"
    retry_after = response.headers.get("Retry-After", "")
    wait_s = float(retry_after) if retry_after.isdecimal() and response.status_code in RETRIED else None
    return _told({"kind": kind, "message": message}, wait_s), wait_s


def _told(error: Mapping[str, Any], wait_s: float | None) -> MarlaasError:
    """Returns the exception that the service's words stand for."""
    kind, message = str(error["kind"]), str(error["message"])
    return QuotaExceeded(message, wait_s) if kind == "QuotaExceeded" else (user_error(kind) or InternalError)(message)


async def _messages(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, str]]:
    """Yields the fields of each message of a stream of server-sent events; comments are left out."""
    message: dict[str, str] = {}
    async for line in lines:
        name, _, value = line.partition(":")
        if name:
            message[name] = f"{message[name]}\n{value.removeprefix(' ')}" if name in message else value.removeprefix(" ")
        elif not line and message:
            yield message
            message = {}


def _given(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (params or {}).items() if value is not None}
