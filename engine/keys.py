"""API keys that came in the environment: they leave it at once, and no child's environment ever holds them.

/proc/PID/environ shows what a process was started with for as long as it lives, to root and to whoever runs as the same
user; so does a core dump, and so do the diagnostics that people paste. The launcher therefore takes the keys out of its
own (the very bytes that the kernel shows), and hands them to the API process through a pipe.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping, MutableMapping

NAMES = ("LASTBATCH_API_KEY", "LASTBATCH_ADMIN_KEY")


def take(env: Mapping[str, str]) -> dict[str, str]:
    """The keys in ``env``, which no longer holds them afterwards if it is this process's own."""
    given = {"LASTBATCH_API_KEY": env.get("LASTBATCH_API_KEY"), "LASTBATCH_ADMIN_KEY": env.get("LASTBATCH_ADMIN_KEY")}
    found = {name: key for name, key in given.items() if key}
    if env is os.environ:
        _wipe(NAMES)
        for name in NAMES:
            os.environ.pop(name, None)
    elif isinstance(env, MutableMapping):
        for name in NAMES:
            env.pop(name, None)
    return found


def hand_over(keys: Mapping[str, str]) -> int:
    """A descriptor from which a child reads them once; the caller closes its own copy."""
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)  # a pipe takes 64 KiB; a longer key is an error and not a wait
        os.write(writer, json.dumps(dict(keys)).encode())
    finally:
        os.close(writer)
    return reader


def received(env: Mapping[str, str]) -> dict[str, str]:
    """The keys that the launcher handed over, or none. Once: the descriptor is closed."""
    given = env.get("LASTBATCH_KEYS_FD")
    if not given:
        return {}
    with os.fdopen(int(given), "rb") as pipe:
        found = json.loads(pipe.read())
    return {name: str(found[name]) for name in NAMES if name in found}


def _wipe(names: tuple[str, ...]) -> None:
    """Overwrite the values where the kernel shows them: the strings that the process was started with."""
    block = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    at = 0
    while block and (where := block[at]):
        name, equals, value = ctypes.string_at(where).partition(b"=")
        if equals and name.decode(errors="replace") in names:
            ctypes.memset(where + len(name) + 1, 0, len(value))
        at += 1
