"""A device, its stream of work and the events on it: one order of things on CUDA and on a CPU.

A stream is one daemon thread that runs closures in order; on CUDA it runs them on a ``torch.cuda.Stream`` and waits for
the device. So the host thread prepares, launches and waits in the same way on both, and stands nowhere but in
``Event.synchronize``. On a CPU this buys no speed.

An exception in a closure behaves as a CUDA error does: what follows on the stream is not run, and every later
``launch`` and ``synchronize`` raises a DeviceError whose cause is the original with its whole traceback.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

DeviceKind = Literal["cpu", "cuda"]
_SLICE_S = 0.2
"""A signal that comes just before the host parks does not wake it; the next slice runs its handler."""


class DeviceError(RuntimeError):
    """Work on a stream has failed; ``__cause__`` says where."""


class Event(Protocol):
    """A point in a stream. ``query`` never blocks."""

    def query(self) -> bool: ...

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Park the calling thread until the stream has passed the event; False when the time is up first.

        Python's signal handlers run meanwhile. Raises DeviceError if the stream has failed.
        """
        ...


class Stream(Protocol):
    """Work that runs in order and apart from the host thread."""

    while_waiting: Callable[[], None]

    def launch(self, work: Callable[[], object]) -> None:
        """Put work on the stream and return. Raises DeviceError if earlier work has failed."""
        ...

    def record(self) -> Event:
        """An event behind all that has been launched so far."""
        ...

    def close(self) -> None:
        """Take no more work. Does not wait for what is stuck; raises nothing for what has failed."""
        ...


@dataclass(frozen=True)
class Device:
    torch_device: torch.device
    stream: Stream


def open_device(kind: DeviceKind, index: int, name: str = "device-stream") -> Device:
    """The device of a rank and its stream. ``index`` is the GPU's (unused on a CPU); ``name`` is the thread's.

    Raises:
        DeviceError: CUDA is asked for and there is none, or fewer GPUs than ``index`` needs.
    """
    if kind == "cpu":
        return Device(torch.device("cpu"), HostStream(name))
    if not torch.cuda.is_available():
        raise DeviceError("--device: cuda: torch finds no CUDA device here; use --device cpu or install a CUDA build of torch")
    if index >= torch.cuda.device_count():
        raise DeviceError(f"--tp: local rank {index} needs a GPU of its own, this node has {torch.cuda.device_count()}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return Device(device, CudaStream(device, name))


class HostStream:
    """A stream on the CPU: one daemon thread, closures in order. ``while_waiting`` is for a stream that waits."""

    def __init__(self, name: str = "device-stream") -> None:
        self.error: BaseException | None = None
        self.while_waiting: Callable[[], None] = lambda: None
        self._queue: queue.SimpleQueue[Callable[[], object] | HostEvent | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, HostEvent):
                    self._pass(item)
                elif self.error is None:
                    item()
            except BaseException as error:  # kept for the host thread: it surfaces at its next call
                self.error = error
                if isinstance(item, HostEvent):
                    item._reached.set()

    def _pass(self, event: HostEvent) -> None:
        event._reached.set()

    def launch(self, work: Callable[[], object]) -> None:
        _raise_failure(self.error)
        if self._closed:
            raise DeviceError("the stream is closed")
        self._queue.put(work)

    def record(self) -> HostEvent:
        event = HostEvent(self)
        if self._closed:
            raise DeviceError("the stream is closed")
        self._queue.put(event)
        return event

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread after what is queued, waiting at most ``timeout_s``; a stuck one is left (it is a daemon)."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(timeout_s)


class HostEvent:
    def __init__(self, stream: HostStream) -> None:
        self._stream = stream
        self._reached = threading.Event()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _SLICE_S if deadline is None else min(_SLICE_S, max(0.0, deadline - time.monotonic()))
            if self._reached.wait(left):
                _raise_failure(self._stream.error)
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False


class CudaStream(HostStream):
    """A stream on a GPU. Its thread enqueues the work and waits for the device, so that the rank's main thread never
    stands in a CUDA call: a closure may read a result back, and a device that never answers holds up this thread only.

    ``while_waiting`` is called again and again while the device works (the group records completed collectives).
    """

    def __init__(self, device: torch.device, name: str = "device-stream") -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        super().__init__(name)

    def _work(self) -> None:
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._stream):
            super()._work()

    def _pass(self, event: HostEvent) -> None:
        mark: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(self._stream)
        begun = time.monotonic()
        while not mark.query():
            self.while_waiting()
            time.sleep(0.00005 if time.monotonic() - begun < 0.005 else 0.0005)
        self.while_waiting()
        super()._pass(event)


def _raise_failure(error: BaseException | None) -> None:
    if error is not None:
        raise DeviceError(f"work on the device stream failed: {type(error).__name__}: {error}") from error
