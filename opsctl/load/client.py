"""The client: asyncio and httpx, one connection a stream. Bytes are stamped as they come and read afterwards, so that
the reading of one answer delays the stamps of another by no more than its own length."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from typing import Annotated, Any

import httpx
import msgspec

from opsctl.load import asked
from opsctl.load.asked import Asked
from opsctl.load.shapes import TOKENS_PER_WORD, Shape

_CONNECT_S = 5.0
_MOST_BYTES = 64 << 20  # of one answer: a server that talks without end shall not fill the memory
_MOST_LIST = 1 << 20  # of the list of models


class NoServer(Exception):
    """Nothing usable answers at the address; the text says where and why."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class Client:
    """Asks one OpenAI-compatible server. ``clock``: seconds, for all times of one run. Use as an async context."""

    def __init__(self, base: str, *, model: str = "", key: str = "", deadline_s: float = 300.0,
                 clock: Callable[[], float] = time.perf_counter) -> None:  # fmt: skip
        self.base, self.model, self.deadline_s, self.clock = base.rstrip("/"), model, deadline_s, clock
        self.tokens_per_word = TOKENS_PER_WORD
        self.fresh: tuple[str, ...] = ()  # what random prompts begin with
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        # One transport for the run; what a proxy of the environment would add is not the server's time.
        self._http = httpx.AsyncClient(base_url=self.base, headers=headers, limits=limits, trust_env=False, timeout=None)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def find_model(self) -> str:
        """The served model's name, unless one was given. Raises NoServer."""
        if not self.model:
            where, status = f"{self.base}/v1/models", 0
            try:
                async with asyncio.timeout(_CONNECT_S), self._http.stream("GET", "/v1/models") as answer:
                    status, data = answer.status_code, b""
                    async for part in answer.aiter_raw():
                        data += part
                        if len(data) > _MOST_LIST:
                            raise NoServer(f"GET {where}: an answer without end")
                self.model = msgspec.json.decode(data, type=_Models).data[0].id
            except TimeoutError as error:
                raise NoServer(f"GET {where}: no answer within {_CONNECT_S:g} s") from error
            except httpx.HTTPError as error:
                raise NoServer(f"GET {where}: {type(error).__name__}: {error}") from error
            except (ValueError, RecursionError) as error:
                raise NoServer(f"GET {where}: HTTP {status}, and no model in it; name one with --model") from error
        return self.model

    async def ask(self, shape: Shape, chance: random.Random, *, until: float = math.inf) -> Asked:
        """Send one request of a shape. Never raises for what the server does. ``until``: the run's end on the clock;
        what has no answer by then is unfinished, which is not the server's fault."""
        return await self.send(shape, shape.body(self.model, chance, tokens_per_word=self.tokens_per_word, fresh=self.fresh), until=until)

    async def send(self, shape: Shape, body: dict[str, Any], *, until: float = math.inf,
                   on_part: Callable[[float], None] | None = None) -> Asked:  # fmt: skip
        """Send a body that was made elsewhere. ``on_part`` is told when each chunk of an answer came."""
        begun, status, broke = self.clock(), 0, ""
        chunks: list[tuple[float, bytes]] = []
        size = 0
        try:
            async with asyncio.timeout(max(0.0, min(self.deadline_s, until - begun))):
                timeout = httpx.Timeout(None, connect=_CONNECT_S)
                async with self._http.stream("POST", shape.path, json=body, timeout=timeout) as answer:
                    status = answer.status_code
                    async for data in answer.aiter_raw():
                        chunks.append((self.clock(), data))
                        size += len(data)
                        if size > _MOST_BYTES:
                            broke = asked.TOO_LONG
                            break
                        if on_part is not None and status == 200:
                            on_part(chunks[-1][0])
        except (TimeoutError, httpx.ReadTimeout, httpx.WriteTimeout):
            broke = asked.UNFINISHED if self.clock() >= until else asked.TIMEOUT
        except (httpx.ConnectError, httpx.ConnectTimeout):
            broke = asked.CONNECT
        except httpx.HTTPError:  # the connection ended: with headers it is a stream that was cut, without it never answered
            broke = asked.CUT if status else asked.CONNECT
        return asked.judge(shape, begun, self.clock() - begun, status, chunks, broke=broke)

    async def learn_tokens(self, shape: Shape, chance: random.Random) -> Asked:
        """One request that is not counted: it opens a connection and shows how many tokens a word is."""
        if shape.prompt or shape.route == "completions":
            return await self.ask(shape, chance)
        words = 64
        fixed = shape.model_copy(update={"prompt_tokens": words, "max_tokens": 1, "expect": "text", "system": ""})
        came = await self.send(fixed, fixed.body(self.model, chance, tokens_per_word=1.0))
        if came.prompt_tokens:
            # The template's own tokens are few beside those of the words; where they are many, prompts come out short.
            self.tokens_per_word = max(1.0, min(4.0, came.prompt_tokens / words))
        return came
