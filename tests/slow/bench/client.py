"""A client that costs little: it shares the cores with what it measures. One thread a stream, parsed afterwards."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 600.0


@dataclass(frozen=True)
class Answered:
    """One stream. Times are of ``time.perf_counter``; ``first`` and ``last`` are the first and last event with text."""

    started: float
    first: float
    last: float
    tokens: int
    text: str
    finish: str

    @property
    def first_token_s(self) -> float:
        return self.first - self.started

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first by the time they took."""
        return (self.tokens - 1) / (self.last - self.first)


def connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=DEADLINE_S)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def post(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def stream(url: str, path: str, body: dict[str, Any]) -> Answered:
    """Ask and read to the end. Raises RuntimeError on any status but 200, or on an answer that breaks off."""
    body = {"temperature": 0, **body, "stream": True, "stream_options": {"include_usage": True}}
    connection = connect(url)
    try:
        started = time.perf_counter()
        answer = post(connection, path, body)
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {answer.read(300)!r}")
        lines = []
        while line := answer.readline():
            lines.append((time.perf_counter(), line))
    finally:
        connection.close()
    return parse(started, lines, path)


def parse(started: float, lines: Sequence[tuple[float, bytes]], path: str) -> Answered:
    moments: list[float] = []
    text, finish, tokens = "", "", -1
    for moment, line in lines:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices") or ():
            said = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            text += said
            finish = choice.get("finish_reason") or finish
            if said or choice.get("finish_reason"):
                moments.append(moment)
    if not moments or not finish or tokens < 0:
        raise RuntimeError(f"{path}: the stream broke off after {len(lines)} lines: {lines[-1][1][:300] if lines else b''!r}")
    return Answered(started, moments[0], moments[-1], tokens, text, finish)


def complete(url: str, prompt: Sequence[int], tokens: int) -> Answered:
    """Exactly ``tokens`` greedy tokens after a prompt of ids."""
    answered = stream(url, "/v1/completions", {"prompt": list(prompt), "max_tokens": tokens, "ignore_eos": True})
    if answered.tokens != tokens:
        raise RuntimeError(f"{answered.tokens} tokens, not {tokens}")
    return answered


def together(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Tokens per second of all the prompts at once, from the first request's start to the last token."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: complete(url, prompt, tokens), prompts))
    return sum(one.tokens for one in found) / (max(one.last for one in found) - min(one.started for one in found))


class Background:
    """Streams that run until they are closed; ``with Background(...)`` begins when each has its first token."""

    def __init__(self, url: str, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        self._url, self._prompts, self._tokens = url, prompts, tokens
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(len(prompts))

    def __enter__(self) -> Background:
        begun = [threading.Event() for _ in self._prompts]
        self._streams = [self._pool.submit(self._read, prompt, event.set) for prompt, event in zip(self._prompts, begun, strict=True)]
        try:
            for event in begun:
                if not event.wait(60):
                    raise RuntimeError("a stream has no first token after 60 s")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    @property
    def running(self) -> bool:
        return not any(one.done() for one in self._streams)

    def _read(self, prompt: Sequence[int], begun: Callable[[], None]) -> None:
        connection = connect(self._url)
        try:
            body = {"prompt": list(prompt), "max_tokens": self._tokens, "ignore_eos": True, "temperature": 0, "stream": True}
            answer = post(connection, "/v1/completions", body)
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {answer.read(300)!r}")
            while not self._stop.is_set() and (line := answer.readline()):
                if line.startswith(b"data: {"):
                    begun()
        finally:
            connection.close()


def refusals(url: str, body: dict[str, Any], count: int) -> list[float]:
    """Seconds of ``count`` requests one after the other on one connection, each of which must be a 400."""
    connection, times = connect(url), []
    try:
        for _ in range(count):
            started = time.perf_counter()
            answer = post(connection, "/v1/chat/completions", body)
            answer.read()
            times.append(time.perf_counter() - started)
            if answer.status != 400:
                raise RuntimeError(f"a constrained request gave {answer.status}, not 400")
    finally:
        connection.close()
    return times
