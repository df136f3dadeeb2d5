"""``asyncio.run`` that hears SIGTERM, and the end of the terminal, as it hears Ctrl-C: the work is cancelled, and cleans up.

A handler that raises, as ``main`` has one, raises wherever the loop happens to be: in a destructor it is lost.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """What the work returns. Raises KeyboardInterrupt when it was interrupted, and what the work raises."""
    return asyncio.run(_heard(work))


async def _heard(work: Coroutine[Any, Any, _T]) -> _T:
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    came: list[int] = []

    def stop(number: int) -> None:
        came.append(number)
        task.cancel()

    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)} if main else {}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if came:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
