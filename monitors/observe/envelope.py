"""Take a log line out of what it arrived in: colours, a container's or a journal's prefix, a JSON object, a process's name.

Pure and total: a line in no known envelope is its own body. A JSON object's message may hold several lines, so one
line of a file can give many.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from monitors.judge.moment import Moment
from monitors.observe import stamps

LONGEST_LINE = 8192  # what a pattern is tried on: a line of megabytes is no line that means something
_MOST_LINES = 400  # of one JSON object's message
_DEEPEST = 5
_ANSI = re.compile(r"(?:\x1b|#033)\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|^\[\d{1,2}(?:;\d{1,3}){0,4}m")
_REST = r"(?P<rest>.*)$"
_WRAPPERS = tuple(
    re.compile(text + _REST)
    for text in (
        r"\[?(?P<name>[A-Za-z][\w./-]{0,80})\]?[ \t]{1,40}\| ?",  # docker compose
        r"(?P<stamp>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d))[ \t](?:std(?:out|err) [FP] )?",  # kubectl, CRI
        r"(?P<stamp>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d) (?:[\w.-]{1,64} )?(?P<name>[\w@./:-]{1,100})\[(?P<pid>\d+)\]: ",  # journald
        r"\[\d+\] (?=\[rank)",
        r"\[(?P<name>[a-z][\w-]{0,60})\] (?=\()",
        r"\((?P<name>[A-Za-z_]\w{0,60}(?: (?:rank=|TP|DP|PP)?\w{1,20}){0,3}) pid=(?P<pid>\d+)(?:, ip=[\w.:]+)?\) ",
    )
)
# What stands before the words of a program itself.
_HEADS = tuple(
    re.compile(text)
    for text in (
        r"(?P<level>INFO|DEBUG|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w./]{1,200}:\d+\] ?",  # vLLM
        r"\[(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d(?:[.,]\d+)?(?P<ranks>(?: (?:DP|PP|ATTN_CP|MOE_DP|TP|EP)\d+){0,6})\] ",  # SGLang
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?\](?:\[[^\]]{1,100}\]){1,3}: ?",
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d+)? (?P<level>[A-Z]{4,8}) \d+ \[(?P<ranks>(?: (?:DP|PP|TP|EP)\d+){0,6}) ?[\w.]{1,100}:\d+\] ",
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d+)? - [\w.]{1,100} - (?P<level>[A-Z]{4,8}) - ",
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \| (?P<level>[A-Z]{4,8}) {0,8}\| [^|]{1,200}? - ",
        r"\[rank\d+\]:\[[IWEF]\d{3,4} \d\d:\d\d:\d\d\.\d+ [\w.]{1,100}:\d+\] ",
        r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./]{1,200}:\d+\] ",
        r"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] \[TRT-LLM\] (?:\[RANK \d+\] )?\[(?P<level>[A-Z])\] ",
        r"\d{1,6}\.\d\d\.\d{3}\.\d{3} (?P<level>[IWED]) ",  # llama.cpp's uptime
    )
)
_MESSAGE_KEYS = ("message", "msg", "log", "MESSAGE")
_TIME_KEYS = ("time", "timestamp", "ts", "@timestamp", "__REALTIME_TIMESTAMP")
_ERROR_KEYS = ("error", "err", "exception", "reason")


@dataclass(frozen=True)
class Opened:
    """``text`` is the line without its envelope; ``body`` also without the program's own head (time, level, file).
    ``process`` tells writers of one log apart; ``ranks`` are the coordinates in the head (``TP0 EP0``)."""

    text: str
    body: str
    moment: Moment | None = None
    process: str = ""
    ranks: str = ""


def unwrap(raw: str, process: str = "") -> tuple[Opened, ...]:
    """The lines that one line of a file holds: one, or as many as a JSON object's message has."""
    text = _ANSI.sub("", raw[: 4 * LONGEST_LINE]).rstrip()
    # A progress bar rewrites its line: what stands after the last carriage return is what was last to be seen.
    text = text.rsplit("\r", 1)[-1][:LONGEST_LINE]
    return _open(text, Opened("", "", None, process), _DEEPEST)


def _open(text: str, outer: Opened, depth: int) -> tuple[Opened, ...]:
    for wrapper in _WRAPPERS if depth else ():
        match = wrapper.match(text)
        if match:
            groups = match.groupdict()
            # A wrapper's name tells writers apart only where it names a process: all of a container share its prefix.
            who = groups.get("pid") or outer.process
            moment = outer.moment
            if groups.get("stamp") and (moment is None or not moment.zone):
                moment = stamps.find(groups["stamp"]) or moment
            return _open(groups["rest"], replace(outer, moment=moment, process=who), depth - 1)
    if depth and text.startswith("{") and text.endswith("}"):
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            raw = None
        if isinstance(raw, dict):
            message = message_of(raw)
            if message is not None:
                inner = replace(outer, moment=_time_of(raw) or outer.moment, ranks=str(raw.get("rank") or outer.ranks))
                lines = message.split("\n")[:_MOST_LINES]
                return tuple(one for line in lines for one in _open(_ANSI.sub("", line).rstrip()[:LONGEST_LINE], inner, depth - 1))
    own = stamps.find(text)
    moment = outer.moment if outer.moment is not None and (outer.moment.zone or own is None) else own
    for head in _HEADS:
        match = head.match(text)
        if match:
            ranks = (match.groupdict().get("ranks") or outer.ranks).strip()
            return (replace(outer, text=text, body=text[match.end() :], moment=moment, ranks=ranks),)
    return (replace(outer, text=text, body=text, moment=moment),)


def message_of(raw: Mapping[str, Any]) -> str | None:
    """The words of a structured record, with its error's; None when it has no message."""
    fields = raw.get("fields")
    for source in (raw, fields if isinstance(fields, dict) else {}):
        for key in _MESSAGE_KEYS:
            if isinstance(source.get(key), str):
                errors = [f"{name}={source[name]}" for name in _ERROR_KEYS if isinstance(source.get(name), str)]
                return " ".join([source[key].rstrip("\n"), *errors])
    return None


def _time_of(raw: Mapping[str, Any]) -> Moment | None:
    for key in _TIME_KEYS:
        value = raw.get(key)
        found = stamps.find(value) if isinstance(value, str) else None
        found = found or stamps.from_epoch(value)
        if found:
            return found
    return None
