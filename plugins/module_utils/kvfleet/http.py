"""A small HTTP client for services on this host: plain answers, event streams, and failures told apart."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any, Callable, Protocol

#: how much of an error's body is kept: enough for the server's sentence, too little for a dump
_ERROR_TEXT_LIMIT = 400


class HttpFailure(Exception):
    """A request that brought no usable answer.

    ``kind`` is ``refused`` (nobody listens), ``timeout``, ``status`` (an HTTP error, see ``status``) or ``broken``
    (the connection ended in the middle, or the answer was no JSON).
    """

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


class Client(Protocol):
    """What the proof needs from a server; tests put recorded answers behind it."""

    base_url: str

    def get_text(self, path: str, timeout_s: float = 30.0) -> str:
        """Body of ``GET path``."""

    def get_json(self, path: str, timeout_s: float = 30.0) -> Any:
        """Decoded JSON of ``GET path``."""

    def post_json(self, path: str, body: dict[str, Any], timeout_s: float = 300.0) -> Any:
        """Decoded JSON of ``POST path``; ``None`` for an empty answer."""

    def stream(self, path: str, body: dict[str, Any], timeout_s: float = 300.0) -> Iterator[tuple[float, Any]]:
        """Events of a server-sent stream as (seconds since the request was sent, decoded JSON)."""


class HttpClient:
    """Talks to one server over HTTP without any proxy; ``api_key`` goes out as a bearer token and nowhere else."""

    def __init__(self, base_url: str, api_key: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._clock = clock
        # a proxy from the environment must not see requests to this host
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get_text(self, path: str, timeout_s: float = 30.0) -> str:
        """Body of ``GET path``. Raises :class:`HttpFailure`."""
        return self._read(self._request(path, None), timeout_s)

    def get_json(self, path: str, timeout_s: float = 30.0) -> Any:
        """Decoded JSON of ``GET path``. Raises :class:`HttpFailure`."""
        return self._decode(path, self.get_text(path, timeout_s))

    def post_json(self, path: str, body: dict[str, Any], timeout_s: float = 300.0) -> Any:
        """Decoded JSON of ``POST path``, ``None`` when the answer is empty. Raises :class:`HttpFailure`."""
        text = self._read(self._request(path, body), timeout_s)
        return self._decode(path, text) if text.strip() else None

    def stream(self, path: str, body: dict[str, Any], timeout_s: float = 300.0) -> Iterator[tuple[float, Any]]:
        """Events of ``POST path`` as (seconds since the request was sent, decoded JSON), until ``[DONE]``.

        ``timeout_s`` bounds the whole answer, not only the silence between two events. Raises :class:`HttpFailure`,
        also when the stream ends before ``[DONE]``.
        """
        request = self._request(path, body)
        started = self._clock()
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                for raw in answer:
                    elapsed = self._clock() - started
                    if elapsed > timeout_s:
                        raise HttpFailure("timeout", f"{self.base_url}{path}: no end within {timeout_s:g} s")
                    line = raw.decode("utf-8", errors="replace").strip()
                    if not line.startswith("data:"):
                        continue
                    data = line[len("data:") :].strip()
                    if data == "[DONE]":
                        return
                    event = self._decode(path, data)
                    if isinstance(event, dict) and event.get("error"):
                        raise HttpFailure("broken", f"{self.base_url}{path}: {_short(event['error'])}")
                    yield elapsed, event
        except HttpFailure:
            raise
        except (OSError, HTTPException) as error:
            raise self._failure(path, error, timeout_s) from error
        raise HttpFailure("broken", f"{self.base_url}{path}: the stream ended before its end mark")

    def _request(self, path: str, body: dict[str, Any] | None) -> urllib.request.Request:
        headers = {"Accept": "application/json"}
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        method = "GET" if data is None else "POST"
        return urllib.request.Request(self.base_url + path, data=data, headers=headers, method=method)  # noqa: S310

    def _read(self, request: urllib.request.Request, timeout_s: float) -> str:
        try:
            with self._opener.open(request, timeout=timeout_s) as answer:
                return str(answer.read().decode("utf-8", errors="replace"))
        except (OSError, HTTPException) as error:
            raise self._failure(request.selector, error, timeout_s) from error

    def _failure(self, path: str, error: Exception, timeout_s: float) -> HttpFailure:
        where = f"{self.base_url}{path}"
        if isinstance(error, urllib.error.HTTPError):
            text = _short(error.read().decode("utf-8", errors="replace"))
            return HttpFailure("status", f"{where}: HTTP {error.code} {text}".rstrip(), error.code)
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, (socket.timeout, TimeoutError)):
            return HttpFailure("timeout", f"{where}: no answer within {timeout_s:g} s")
        if isinstance(reason, ConnectionRefusedError):
            return HttpFailure("refused", f"{where}: nobody listens")
        return HttpFailure("broken", f"{where}: {reason}")

    def _decode(self, path: str, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise HttpFailure("broken", f"{self.base_url}{path}: the answer is no JSON: {_short(text)!r}") from error


def _short(value: Any) -> str:
    """One line of an error's text, cut."""
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split())[:_ERROR_TEXT_LIMIT]
