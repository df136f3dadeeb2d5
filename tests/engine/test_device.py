"""Streams and events on the CPU: order, waiting, signals, and failures that stick."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator

import pytest

from engine.exec.device import Device, DeviceError, HostStream, open_device


@pytest.fixture
def device() -> Iterator[Device]:
    opened = open_device("cpu", 0, name="stream-under-test")
    yield opened
    opened.stream.close()


def test_work_runs_in_order_on_one_named_thread_apart_from_the_host(device: Device) -> None:
    seen: list[tuple[int, str]] = []
    for number in range(100):
        device.stream.launch(lambda number=number: seen.append((number, threading.current_thread().name)))
    assert device.stream.record().synchronize(5.0)
    assert seen == [(number, "stream-under-test") for number in range(100)]


def test_launch_does_not_wait_and_an_event_is_reached_only_after_what_was_launched_before_it(device: Device) -> None:
    gate = threading.Event()
    device.stream.launch(lambda: gate.wait(10))
    event = device.stream.record()
    assert not event.query()
    assert not event.synchronize(0.05)
    gate.set()
    assert event.synchronize(5.0)
    assert event.query()


def test_a_signal_handler_runs_while_the_host_waits_for_an_event(device: Device) -> None:
    gate = threading.Event()
    handled: list[float] = []

    def handler(number: int, frame: object) -> None:
        handled.append(time.monotonic())
        gate.set()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        device.stream.launch(lambda: (os.kill(os.getpid(), signal.SIGUSR1), gate.wait(10)))
        begun = time.monotonic()
        assert device.stream.record().synchronize()
        assert len(handled) == 1
        assert time.monotonic() - begun < 5
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_failure_surfaces_at_the_next_wait_with_its_traceback_and_sticks(device: Device) -> None:
    ran: list[str] = []

    def explode() -> None:
        raise KeyError("layer 3")

    device.stream.launch(explode)
    event = device.stream.record()
    for _ in range(2):
        with pytest.raises(DeviceError, match="KeyError: 'layer 3'") as caught:
            event.synchronize(5.0)
        assert isinstance(caught.value.__cause__, KeyError)
        assert "explode" in "".join(traceback.format_exception(caught.value.__cause__))
    with pytest.raises(DeviceError, match="KeyError"):
        device.stream.launch(lambda: ran.append("after"))
    assert event.query()
    assert ran == []


def test_what_was_launched_behind_a_failure_does_not_run(device: Device) -> None:
    gate = threading.Event()
    ran: list[int] = []

    def wait_then_fail() -> None:
        gate.wait(10)
        raise RuntimeError("lost")

    device.stream.launch(wait_then_fail)
    device.stream.launch(lambda: ran.append(1))
    event = device.stream.record()
    gate.set()
    with pytest.raises(DeviceError, match="RuntimeError: lost"):
        event.synchronize(5.0)
    assert ran == []


def test_closing_ends_the_thread_and_later_work_is_refused(device: Device) -> None:
    device.stream.close()
    assert not any(thread.name == "stream-under-test" for thread in threading.enumerate())
    with pytest.raises(DeviceError, match="closed"):
        device.stream.launch(lambda: None)
    with pytest.raises(DeviceError, match="closed"):
        device.stream.record()


def test_closing_does_not_wait_for_work_that_is_stuck() -> None:
    gate = threading.Event()
    stuck = HostStream()
    stuck.launch(lambda: gate.wait(30))
    begun = time.monotonic()
    stuck.close(timeout_s=0.05)
    assert time.monotonic() - begun < 5
    gate.set()


def test_cuda_without_a_gpu_is_refused_with_what_to_do() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceError, match="--device: cuda"):
        open_device("cuda", 0)
