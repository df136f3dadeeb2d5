"""Ctrl-C, SIGTERM and the end of the terminal: exit 130, one envelope, and the work has cleaned up."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal

import pytest

from opsctl import cli, eventloop


def test_an_interrupt_is_exit_130_with_an_envelope(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_version", interrupted)
    out = io.StringIO()
    assert cli.main(["version", "--json"], {}, stdin=io.StringIO(), stdout=out, stderr=io.StringIO()) == 130
    assert json.loads(out.getvalue())["errors"][0]["code"] == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_work_in_a_loop_is_cancelled_and_cleans_up(number: signal.Signals) -> None:
    cleaned: list[str] = []

    async def work() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append("up")

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
        with pytest.raises(KeyboardInterrupt):
            eventloop.run(work())
        assert cleaned == ["up"] and handlers == [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    finally:
        signal.signal(signal.SIGHUP, before)
