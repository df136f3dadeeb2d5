"""The captures of one deployment, one at a time, beside the watch, and what follows each."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from monitors import aftermath, fleet
from monitors.capture import bundle, retention
from monitors.capture.redact import Policy
from monitors.remote import Remote

_HOUR_S = 3600.0


class Captures:
    """``begin`` starts one in a thread of its own, ``finished`` gives it once. ``emit(event, **fields)`` takes what is
    told. ``root`` replaces the fleet file's place for bundles."""

    def __init__(
        self, whole: fleet.Fleet, deployment: fleet.Deployment, remotes: Mapping[str, Remote], emit: Callable[..., None],
        *, root: Path | None, native: bool,
    ) -> None:  # fmt: skip
        self._fleet = whole
        self._deployment = deployment
        self._remotes = remotes
        self._emit = emit
        self._root = root or fleet.bundle_root(deployment)
        self._native = native
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="capture")
        self._job: concurrent.futures.Future[bundle.Captured] | None = None
        self._following = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="after")
        self._followed: concurrent.futures.Future[None] | None = None
        self._taken: list[float] = []

    def begin(self, reason: str, budget_s: float, *, progress: Mapping[str, Any], suspicion: Mapping[str, Any] | None, trail: str) -> bool:
        """Whether one was begun: while one runs there is no second. Too many within the hour leave the processes alone."""
        if self._job is not None:
            self._emit("capture_waits", text=f"a capture is still running; the one for this {reason} is taken after it")
            return False
        now, keep = time.time(), self._fleet.capture
        self._taken = [at for at in self._taken if abs(now - at) < _HOUR_S]
        often = retention.too_often(self._taken, now, keep.most_per_hour)
        self._taken.append(now)
        self._job = self._pool.submit(
            self._take, reason=reason, budget_s=budget_s, native=self._native, progress=progress, suspicion=suspicion,
            fleet_text=_text_of(self._fleet.path), remotes=self._remotes, trail=trail, stacks=not often, core_dump=keep.cuda_core_dump,
            policy=Policy(addresses=keep.redact_ip),
        )  # fmt: skip
        return True

    def _take(self, **how: Any) -> bundle.Captured:
        """Room first, at the cost of the oldest bundles: a full disk must not cost this one."""
        keep = self._fleet.capture
        with contextlib.suppress(OSError):
            gone = retention.prune(self._root, most=keep.keep, most_bytes=keep.keep_bytes)
            if gone:
                self._emit("pruned", bundles=gone)
        return bundle.capture(self._deployment, root=self._root, **how)

    def finished(self) -> bundle.Captured | Exception | None:
        """The capture that has ended since the last call, or why it failed; None while there is none."""
        if self._job is None or not self._job.done():
            return None
        job, self._job = self._job, None
        try:
            taken = job.result()
        except Exception as error:  # the monitor's own failure is told and paged; it never ends the watch
            self._emit("error", text=f"the capture failed: {type(error).__name__}: {error}")
            return error
        self._emit("captured", bundle=str(taken.folder), seconds=round(taken.seconds, 2), items=len(taken.items) - len(taken.gaps),
                   gaps=[f"{gap.probe}: {gap.reason}" for gap in taken.gaps])  # fmt: skip
        self._emit("verdict", bundle=str(taken.folder), **taken.verdict.to_json())
        return taken

    def follow(self, taken: bundle.Captured) -> None:
        """Report, archive and upload, in a thread of their own."""
        self._followed = self._following.submit(aftermath.follow, self._fleet, taken.folder, self._emit)

    def act(self) -> None:
        """The fleet file's ``on_wedge``, in the same thread: after what it is already at."""
        if self._deployment.on_wedge.action != "page":
            self._followed = self._following.submit(aftermath.act, self._fleet, self._deployment, self._emit)

    def wait(self, deadline_s: float) -> None:
        """For a capture that runs."""
        if self._job is not None:
            concurrent.futures.wait([self._job], timeout=deadline_s)

    def close(self, deadline_s: float) -> None:
        if self._followed is not None:
            concurrent.futures.wait([self._followed], timeout=deadline_s)
        self._following.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text() if path else ""
    except OSError:
        return ""
