"""Trying a grammar in a process that can be ended, before it is compiled in a thread that cannot.

A compilation has no way to be stopped from outside, and some grammars take hours or all memory. Those that might are
compiled once in a process of their own, which the kernel ends at its deadline or at its memory limit; only one that came
to an end is then compiled here, in about the time that it took there.

``Trials.start`` forks a small parent for these processes. It must be called before the caller has threads or a device:
what it forks in turn is as it was then, holds no lock of anybody and shares its memory. It ends with the caller.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import setproctitle

from engine.grammar.backends import GrammarError
from engine.messages import Grammar

TITLE = "grammar-trial"
ROOM_BYTES = 2 << 30
"""Address space that a compilation may take."""
_PREPARE_S = 60.0  # for the first one to load the compiler
_MOST_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


class Compiler(Protocol):
    def compile(self, grammar: Grammar) -> object:
        """Raises GrammarError with the reason."""
        ...


class Trials:
    """``check`` may be called from several threads at once."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self._link = link
        self._pid = pid

    @staticmethod
    def start(make: Callable[[], Compiler]) -> Trials:
        """``make`` is called there, when the first grammar comes."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                ours.close()
                _serve(theirs, make, parent)
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        return Trials(ours, pid)

    def check(self, grammar: Grammar, timeout_s: float) -> None:
        """Compile it there and forget it.

        Raises:
            GrammarError: it cannot be compiled, or not in ``timeout_s`` or in the memory that it may take.
        """
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with mine, its:
            try:
                socket.send_fds(self._link, [msgspec.msgpack.encode(timeout_s)], [its.fileno()])
                its.close()
                mine.settimeout(_PREPARE_S)
                mine.sendall(msgspec.msgpack.encode(grammar))
                mine.shutdown(socket.SHUT_WR)
                started = mine.recv(1)
                begun = time.monotonic()
                mine.settimeout(timeout_s + _PREPARE_S)
                answer = _all(mine)
            except OSError as error:
                raise GrammarError(f"the grammar could not be tried: {error}") from error
        if not answer and started and time.monotonic() - begun >= 0.9 * timeout_s:
            raise GrammarError(f"the grammar takes more than {timeout_s:g} s to compile (--grammar-compile-timeout)")
        if not answer:
            raise GrammarError("the compiler broke on this grammar, or it takes too much memory")
        why = msgspec.msgpack.decode(answer, type=str)
        if why:
            raise GrammarError(why)

    def close(self) -> None:
        self._link.close()
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                return
            time.sleep(0.005)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _serve(link: socket.socket, make: Callable[[], Compiler], parent: int) -> None:
    """The small parent: one process for each grammar. It ends when the link does."""
    _die_with(parent)
    setproctitle.setproctitle(TITLE)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: the socket says how they ended
    compiler: Compiler | None = None
    me = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(link, 64, 1)
        if not descriptors:
            return
        if compiler is None:
            compiler = make()
        if os.fork() == 0:
            try:
                link.close()
                _try(compiler, descriptors[0], msgspec.msgpack.decode(message, type=float), me)
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _try(compiler: Compiler, descriptor: int, timeout_s: float, parent: int) -> None:
    _die_with(parent)
    with socket.socket(fileno=descriptor) as mine:
        grammar = msgspec.msgpack.decode(_all(mine), type=Grammar)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM_BYTES, size + ROOM_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        mine.sendall(b"!")  # from here on its time counts
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends it, whatever it is doing
        signal.setitimer(signal.ITIMER_REAL, max(timeout_s, 0.000001))
        try:
            compiler.compile(grammar)
            why = ""
        except GrammarError as error:
            why = str(error)
        except MemoryError:
            why = "the grammar takes too much memory to compile"
        mine.sendall(msgspec.msgpack.encode(why))


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _all(mine: socket.socket) -> bytes:
    whole = b""
    while len(whole) < _MOST_BYTES and (part := mine.recv(65536)):
        whole += part
    return whole
