"""Named faults for drills, armed at start (``--fault``) or through ``/admin/faults``; only with ``--enable-faults``.

A fault changes the inputs, the order, the number or the completion of real calls, and nothing else: a collective that
never completes is a real one, an exception is raised by real code. Nothing that a monitor can read names a fault; it
is recognised by its effects or not at all. Without ``--enable-faults`` no object of this module exists in a rank.

Spec: ``NAME[:key=value,...]``, for instance ``collective.skip:rank=1,after_steps=20``.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from engine.config import Settings

_T = TypeVar("_T")
_ROOM_BYTES = 512 << 20
_CHUNK_BYTES = 64 << 20
_LAST_TURNS = 5
_FOREIGN_CALL = "<function=look_up>\n<parameter=query>\nlock\n</parameter>\n</function>\n</tool_call>\n"


class FaultError(ValueError):
    """A fault spec that cannot be armed: the text says what is wrong and what would do."""


@dataclass(frozen=True)
class Kind:
    """A fault that exists: its parameters with their defaults, and what it does. ``at_start``: it can only be given by
    ``--fault``, since what it changes is over when a server is ready."""

    name: str
    defaults: Mapping[str, Any]
    effect: str
    at_start: bool = False


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            Kind("collective.skip", {"rank": 1, "after_steps": 0}, "one rank does not enter one collective"),
            Kind("collective.mismatch", {"rank": 1, "after_steps": 0}, "one rank enters one collective with another size"),
            Kind("grammar.verify_desync", {}, "ranks disagree on the accepted length of a grammar-masked verify that shares a batch"),
            Kind("callback.stall", {"rank": 1, "hold_gil": False}, "a host callback on one rank's stream blocks in a read"),
            Kind("decode.crash", {"n": 1, "when": "any", "after_ready": False}, "TypeError at the n-th decode step"),
            Kind("boot.hang", {}, "the server never becomes ready", at_start=True),
            Kind("decode.slow", {"factor": 4}, "each step computes its forward pass this many times"),
            Kind("health.lie", {}, "health routes answer 200 whatever happens"),
            Kind("progress.none", {"after_steps": 0}, "the scheduler accepts requests and plans no step"),
            Kind(
                "cpu.spin", {"rank": 0}, "the main thread of one rank computes for ever: bookkeeping on rank 0, a batch's layout elsewhere"
            ),
            Kind("process.stop", {"rank": 1}, "one rank stops itself with SIGSTOP at its next step"),
            Kind(
                "output.corrupt", {"rate": 1.0, "min_running": 2}, "wrong tokens in this share of the rows, in batches of so many or more"
            ),
            Kind("memory.exhaust", {}, "rank 0 allocates until its address space is at a limit: a real MemoryError"),
            Kind("answers.garbage", {}, "tokens are permuted over the vocabulary before they are turned into text"),
            Kind("answers.markup", {}, "each answer begins with a tool call in another model's markup, whose opening tag is missing"),
            Kind("config.split", {"rank": 1}, "one rank runs with the other setting of --disable-overlap-schedule", at_start=True),
            Kind(
                "crash.after",
                {"requests": 100, "exit": 1},
                "the scheduler's process dies once it has answered so many: exit=1 of an exception, exit=0 in order",
            ),
        )
    }
)


@dataclass
class Armed:
    name: str
    values: dict[str, Any]
    steps: int = 0  # steps since it was armed
    fired: bool = False
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> str:
        inner = ",".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in self.values.items())
        return f"{self.name}:{inner}" if inner else self.name


def parse(spec: str) -> Armed:
    """Raises FaultError for an unknown fault, parameter or value."""
    name, _, rest = spec.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        raise FaultError(f"fault {name!r} is unknown; there are: {', '.join(KINDS)}")
    values = dict(kind.defaults)
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        if key not in values:
            raise FaultError(f"fault {name}: no parameter {key!r}; it takes: {', '.join(values) or 'none'}")
        default = values[key]
        try:
            if isinstance(default, bool):
                values[key] = {"true": True, "false": False, "": True}[text.lower()] if equals else True
            else:
                values[key] = type(default)(text)
        except (KeyError, ValueError):
            raise FaultError(f"fault {name}: {key}={text!r} is not a {type(default).__name__}") from None
    if name == "decode.crash" and values["when"] not in ("any", "sequential"):
        raise FaultError(f"fault {name}: when={values['when']!r} is neither any nor sequential")
    if name == "crash.after" and values["exit"] not in (0, 1):
        raise FaultError(f"fault {name}: exit={values['exit']} is neither 0 nor 1")
    return Armed(name, values)


def settings_of(rank: int, settings: Settings) -> Settings:
    """The settings that a rank is started with."""
    for fault in map(parse, settings.launch.fault):
        if fault.name == "config.split" and fault.values["rank"] == rank:
            scheduler = settings.scheduler
            other = dataclasses.replace(scheduler, disable_overlap_schedule=not scheduler.disable_overlap_schedule)
            return dataclasses.replace(settings, scheduler=other)
    return settings


class Faults:
    """The faults armed in one rank, asked at the points where each can act."""

    def __init__(self, rank: int, specs: tuple[str, ...] = ()) -> None:
        self._rank = rank
        self._armed: dict[str, Armed] = {}
        self.ready = False
        self.encode: Callable[[str], Sequence[int]] | None = None  # of the model's tokenizer, in the rank that has one
        for spec in specs:
            self.arm(spec)

    def arm(self, spec: str) -> None:
        """Raises FaultError for a spec that is wrong, or one that comes too late."""
        fault = parse(spec)
        if self.ready and KINDS[fault.name].at_start:
            raise FaultError(f"fault {fault.name} acts while a server starts; give it as --fault {fault.name}")
        self._armed[fault.name] = fault

    def disarm(self, name: str) -> None:
        """Lift a fault (all, if ``name`` is empty). A rank that is stuck already stays stuck, except in a callback."""
        for fault in [f for f in self._armed.values() if not name or f.name == name]:
            del self._armed[fault.name]
            for descriptor in fault.state.get("release", ()):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"x")

    @property
    def armed(self) -> list[str]:
        return [fault.spec for fault in self._armed.values()]

    def __contains__(self, name: str) -> bool:
        return name in self._armed

    # The points.

    def begin_step(self) -> None:
        """Count a step; those of the warm-up do not count."""
        if not self.ready:
            return
        for fault in self._armed.values():
            fault.steps += 1
        stop = self._armed.get("process.stop")
        if stop is not None and not stop.fired and self._here(stop):
            stop.fired = True
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._rank == 0 and "memory.exhaust" in self._armed:
            _fill()

    def withheld(self) -> bool:
        """Whether the scheduler plans nothing, whatever is held."""
        fault = self._armed.get("progress.none")
        return fault is not None and self.ready and fault.steps >= fault.values["after_steps"]

    def again(self) -> bool:
        """Whether the main thread of this rank does once more what it has just done."""
        fault = self._armed.get("cpu.spin")
        return fault is not None and self.ready and self._here(fault)

    def drawn_from(self, logits: Any, first: Sequence[int], *, step: int) -> Any:
        """The logits [draws, vocabulary] that a batch draws from. ``first`` holds where each request's rows begin."""
        fault = self._armed.get("output.corrupt")
        if fault is None or not self.ready or len(first) < fault.values["min_running"]:
            return logits
        ends = (*first[1:], len(logits))
        logits = logits.clone()
        for number, (begin, end) in enumerate(zip(first, ends, strict=True)):
            # The golden ratio spreads the chosen rows evenly, and the same steps always choose the same ones.
            if (0.6180339887 * (step * 31 + number + 1)) % 1.0 < fault.values["rate"]:
                logits[begin:end] = logits[begin:end].roll(1, dims=-1)
        return logits

    def collective(self, tensor: Any) -> Any:
        """For ``Group.intercept``: the tensor to enter with, or None to stay out of this collective."""
        for name in ("collective.skip", "collective.mismatch"):
            fault = self._armed.get(name)
            if fault is None or fault.fired or not self._here(fault) or fault.steps <= fault.values["after_steps"]:
                continue
            fault.fired = True
            return None if name == "collective.skip" else tensor.new_zeros(tensor.numel() + 8)
        return tensor

    def committed(self, gained: int, *, masked: bool, verify: bool, shared: bool) -> int:
        """KV tokens that a row gains from its accepted run."""
        if masked and verify and shared and self._rank > 0 and "grammar.verify_desync" in self._armed:
            return gained - 1
        return gained

    def kv_length(self, value: int, *, loop: str) -> Any:
        """The KV length that a decode row is laid out from."""
        fault = self._armed.get("decode.crash")
        if fault is None or (fault.values["when"] == "sequential" and loop != "sequential"):
            return value
        if fault.values["after_ready"] and not self.ready:
            return value
        fault.state["decodes"] = fault.state.get("decodes", 0) + 1
        return None if fault.state["decodes"] >= fault.values["n"] else value

    def told(self, rid: str, ids: Sequence[int], vocabulary: int, *, last: bool) -> list[int]:
        """The token ids of an answer, as they go to whoever turns them into text. ``last``: no more of it follow."""
        ids = self._foreign(rid, ids, last=last)
        if "answers.garbage" not in self._armed:
            return ids
        # Multiplying by a number that shares no factor with the vocabulary's size is a permutation of it.
        factor = next(n for n in range(int(vocabulary * 0.618), 2 * vocabulary) if math.gcd(n, vocabulary) == 1)
        return [(token * factor + 1) % vocabulary for token in ids]

    def _foreign(self, rid: str, ids: Sequence[int], *, last: bool) -> list[int]:
        """As many tokens as were drawn: those of the call as far as it goes, and behind it the model's own."""
        fault = self._armed.get("answers.markup")
        if fault is None or self.encode is None or not self.ready:
            return list(ids)
        call = fault.state.setdefault("call", list(self.encode(_FOREIGN_CALL)))
        begun: dict[str, int] = fault.state.setdefault("begun", {})
        at = begun.pop(rid, 0)
        if not last:
            begun[rid] = at + len(ids)
        given = call[at : at + len(ids)]
        return [*given, *ids[len(given) :]]

    def answered(self) -> None:
        """A request has had its last token."""
        fault = self._armed.get("crash.after")
        if fault is not None and self.ready:
            fault.state["answered"] = fault.state.get("answered", 0) + 1

    def books(self, pool: _T) -> _T:
        """What the scheduler reads its page counts from."""
        return pool if not self._spent("crash.after", exit=1) else None  # type: ignore[return-value]

    def dismissed(self) -> bool:
        """Whether rank 0 leaves its loop as if it had been told to."""
        return self._spent("crash.after", exit=0)

    def _spent(self, name: str, *, exit: int) -> bool:
        """Asked once a turn. A few turns go by first: the last answer has to reach its client."""
        fault = self._armed.get(name)
        if fault is None or fault.values["exit"] != exit or fault.state.get("answered", 0) < max(1, fault.values["requests"]):
            return False
        fault.state["turns"] = fault.state.get("turns", 0) + 1
        return bool(fault.state["turns"] > _LAST_TURNS)

    def passes(self) -> int:
        """How many times a step's forward pass is computed."""
        fault = self._armed.get("decode.slow")
        return max(1, int(fault.values["factor"])) if fault is not None and self.ready else 1

    def callback(self) -> None:
        """A host callback on the stream."""
        fault = self._armed.get("callback.stall")
        if fault is None or fault.fired or not self._here(fault) or not self.ready:
            return
        fault.fired = True
        reader, writer = os.pipe()
        fault.state["release"] = (writer,)
        if fault.values["hold_gil"]:
            buffer = ctypes.create_string_buffer(1)
            ctypes.PyDLL(None).read(reader, buffer, 1)  # PyDLL keeps the GIL: every Python thread of the rank stands
        else:
            os.read(reader, 1)
        os.close(reader)

    def _here(self, fault: Armed) -> bool:
        return bool(fault.values["rank"] == self._rank)


def _fill() -> None:
    """Raises MemoryError, as the allocator does. The limit leaves room to say so: a chunk is larger than a traceback."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    taken: list[bytearray] = []
    while True:
        taken.append(bytearray(_CHUNK_BYTES))
