"""The generations of one HTTP request, together: sent, waited for, and never left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from engine.messages import Generate, Refused, Tokens
from engine.server.errors import ApiError
from engine.server.metrics import Meters
from engine.server.wire import Answer, Link

SCHEDULER_REFUSED = "scheduler_refused"
"""The code of an error that says that the scheduler did not take a request."""


class Flight:
    """``with Flight(...) as flight``: whatever happens inside, nothing of it runs on afterwards.

    Generations are known by their place in ``requests``, which is the ``index`` of OpenAI's choices.
    """

    def __init__(self, link: Link, requests: Sequence[Generate], meters: Meters) -> None:
        self._link = link
        self._requests = requests
        self._meters = meters
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        self._index = {request.rid: index for index, request in enumerate(requests)}
        self._open: set[str] = set()
        self._started = 0.0
        self._last: dict[str, float] = {}

    def __enter__(self) -> Flight:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Send everything. Whoever does not use ``with`` must call ``close``."""
        self._started = asyncio.get_running_loop().time()
        for request in self._requests:
            self._link.submit(request, self._answers)
            self._open.add(request.rid)

    def close(self) -> None:
        """Abort what has not finished. Safe to repeat."""
        for index in range(len(self._requests)):
            self.stop(index)

    @property
    def open(self) -> bool:
        return bool(self._open)

    def stop(self, index: int) -> None:
        """Have no more of this one: it is aborted unless it has finished."""
        rid = self._requests[index].rid
        if rid in self._open:
            self._open.discard(rid)
            self._link.abort(rid)

    async def peek(self, timeout_s: float) -> None:
        """Wait for the first answer and leave it where it is; after ``timeout_s`` go on without.

        Raises:
            ApiError: the first answer is a refusal or a failure.
        """
        try:
            async with asyncio.timeout(timeout_s):
                first = await self._answers.get()
        except TimeoutError:
            return
        if (error := self._error(first)) is not None:
            raise error
        later = [self._answers.get_nowait() for _ in range(self._answers.qsize())]
        for answer in (first, *later):
            self._answers.put_nowait(answer)

    async def next(self) -> tuple[int, Tokens]:
        """The next tokens of any generation that is open. The link ends the wait if the scheduler falls silent.

        Raises:
            ApiError: the scheduler refused, failed or fell silent.
        """
        while True:
            answer = await self._answers.get()
            if isinstance(answer, Tokens) and answer.rid not in self._open:
                continue  # it was stopped while this was on its way
            if (error := self._error(answer)) is not None:
                raise error
            assert isinstance(answer, Tokens)
            self._measure(answer)
            if answer.finish:
                self._open.discard(answer.rid)
            return self._index[answer.rid], answer

    def _error(self, answer: Answer) -> ApiError | None:
        match answer:
            case ApiError():
                return answer
            case Refused():
                self._open.discard(answer.rid)
                return ApiError(answer.status, answer.message, code=SCHEDULER_REFUSED, kind=answer.kind, retry_after_s=answer.retry_after_s)
            case Tokens(finish="error", blamed=True):
                self._open.discard(answer.rid)
                return ApiError(400, answer.error, code="generation_failed", kind="invalid_request_error")
            case Tokens(finish="error"):
                self._open.discard(answer.rid)
                return ApiError(500, answer.error or "the generation failed", code="generation_failed")
            case Tokens(finish="abort"):
                self._open.discard(answer.rid)
                return ApiError(503, answer.error or "the server aborted the generation", code="aborted", retry_after_s=1)
        return None

    def _measure(self, answer: Tokens) -> None:
        if not answer.ids or self._requests[self._index[answer.rid]].probe:
            return
        now = asyncio.get_running_loop().time()
        last = self._last.get(answer.rid)
        if last is None:
            self._meters.time_to_first_token.observe(now - self._started)
        else:
            for _ in answer.ids:
                self._meters.inter_token_latency.observe((now - last) / len(answer.ids))
        self._last[answer.rid] = now
