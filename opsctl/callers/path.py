"""A client's own way to the server: does what it asks arrive here, or is it answered by somebody else?

A gateway with a fallback answers 200 whatever happens, in the served model's name. So a nonce is sent the client's way
and looked for where it must arrive: its digest in the server's access log, or in the server's token counters where the
engine logs no requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from monitors import keyfile
from monitors.fleet import Caller
from opsctl.callers.matrix import sent
from opsctl.callers.request import prompt_sha, with_nonce
from opsctl.rollout.probe import Api

HERE, ELSEWHERE, UNKNOWN = "here", "hosted_fallback", "not known"


@dataclass(frozen=True)
class Led:
    """``kind``: ``here``, ``hosted_fallback``, ``not known``, ``http NNN`` or ``none`` (nobody answered)."""

    caller: str
    kind: str
    text: str


def key_of(caller: Caller) -> str:
    """The client's own key; empty when it sends none. Raises OSError for a file that cannot be read."""
    return keyfile.read(caller.api_key_file) if caller.api_key_file else ""


def follow(
    caller: Caller, nonce: str, deadline_s: float, *, seen: Callable[[str], bool | None] | None, counter: Callable[[], float | None]
) -> Led:
    """Send the client's request (a plain one, where its own must not be sent) through its own path.

    ``seen(sha)`` waits a little for a request of this digest in the server's log, and answers None where the log has lost
    lines, so that it cannot tell. ``seen`` is None where the engine logs no requests, and then ``counter``, the server's
    tokens so far, must move meanwhile. Raises OSError for a key that cannot be read.
    """
    plain = {"messages": [{"role": "user", "content": "Say in one sentence what a canary in a mine is for."}], "max_tokens": 16}
    own = caller.request if sent(caller) else {**plain, **({"model": caller.request["model"]} if "model" in caller.request else {})}
    request = with_nonce(own, nonce)
    with contextlib.closing(Api(caller.via, key_of(caller), caller.user_agent)) as api:
        before = counter() if seen is None else None
        reply = api.ask(request, deadline_s)
        if reply.status != 200 or reply.why:
            kind = f"http {reply.status}" if reply.status not in (0, 200) else "none"
            return Led(caller.name, kind, f"{caller.name}: {caller.via} answers {kind}: {reply.why}")
        after = counter() if seen is None else None
    if seen is not None:
        arrived = seen(prompt_sha(request))
        if arrived is None:
            return Led(caller.name, UNKNOWN, f"{caller.name}: {caller.via} answered; the log here has no such line, and has lost some")
        if arrived:
            return Led(caller.name, HERE, f"{caller.name}: a nonce through {caller.via} was answered by this server, by its log")
        why = "was answered, and not by this server, whose log has no such answer"
    elif before is None or after is None:
        return Led(caller.name, UNKNOWN, f"{caller.name}: {caller.via} answered, and this server has no counters to show that it did")
    elif after > before:
        return Led(
            caller.name, HERE, f"{caller.name}: this server's token counters moved by {after - before:g} while {caller.via} answered"
        )
    else:
        why = "was answered while this server's token counters stood still"
    return Led(caller.name, ELSEWHERE, f"{caller.name}: a nonce through {caller.via} {why}: somebody else serves this client")
