"""One rank: ``python rank.py RUN_DIR RANK WORLD [WORDS]``. A line on standard input (or WORDS, and then standard input
is not read) says what it does from then on:

idle | busy | slow | load
grammar | symmetric | mismatch | skip | callback | control | stop, and a step N: work up to it, then stand still
die
"""

import os
import select
import signal
import sys
import time
from pathlib import Path

import setproctitle
from smallrank.exec.device import HostStream
from smallrank.parallel.group import all_reduce

from engine.blackbox import BatchKind, BlackBox, EventKind, Header, Phase, RequestFlag, request_hash

_STILL = ("grammar", "symmetric", "mismatch", "skip", "callback", "control", "stop")


class Rank:
    def __init__(self, run_dir, rank, world, told=""):
        invocation = os.environ.get("INVOCATION_ID", "ab" * 16)
        header = Header(os.getpid(), rank, world, "c0ffee", invocation_id=invocation, tp=rank, start_mono_ns=time.monotonic_ns())
        self.rank = rank
        self.box = BlackBox(Path(run_dir) / f"rank-{rank}.box", header)
        self.stream = HostStream()
        self.step_number = self.sequence = 0
        self.mode, self.next, self.at = "busy" if told else "load", "", 0
        self.told, self.heard = told, b""
        if told:
            self.obey(told.split())
        setproctitle.setproctitle(f"lastbatch::scheduler_TP{rank} cfg=c0ffee")

    def run(self):
        while True:
            self.listen()
            if self.next and self.step_number + 1 >= self.at:
                self.mode, self.next = self.next, ""
            if self.mode == "load":
                self.box.enter(Phase.load)
            elif self.mode == "idle":
                self.rest(held=0)
            elif self.mode == "control":
                self.rest(held=1)
            elif self.mode == "stop" and self.rank == 1:
                self.box.beat(held=2)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.mode == "die":
                os._exit(3)
            else:
                self.step(self.mode)
                # Nothing keeps these ranks in step: one that was starved catches up with the others before they stand still.
                time.sleep(0.2 if self.mode == "slow" else 0.0 if self.next else 0.005)

    def listen(self):
        if self.told:
            return
        ready, _, _ = select.select([0], [], [], 0.05 if self.mode in ("load", "idle", "control") else 0)
        if ready:
            # Not sys.stdin: two lines that came together would go into its buffer, where select does not see the second.
            said = os.read(0, 4096)
            if not said:
                os._exit(0)
            *lines, self.heard = (self.heard + said).split(b"\n")
            for line in lines:
                self.obey(line.decode().split())

    def obey(self, words):
        if len(words) > 1:
            self.next, self.at = words[0], int(words[1])
        else:
            self.mode = words[0]

    def rest(self, held):
        self.box.enter(Phase.recv)
        self.box.beat(held=held, running=held, waiting=0)
        self.box.publish()

    def step(self, mode):
        """One step of two requests, one of them grammar-masked where the mode is about grammars."""
        box = self.box
        grammar = mode == "grammar"
        self.step_number += 1
        box.enter(Phase.launch)
        tokens = 7 if grammar and self.rank > 0 else 8
        kind = BatchKind.verify if grammar else BatchKind.decode
        box.event(EventKind.batch_begin, kind, 2, self.step_number, tokens)
        box.event(EventKind.batch_request, 0, int(RequestFlag.grammar) if grammar else 0, request_hash("masked"), 100, tokens - 4, 3)
        box.event(EventKind.batch_request, 0, 0, request_hash("free"), 200, 4, 3)
        self.stream.launch(lambda: self.forward(mode, tokens))
        event = self.stream.record()
        box.beat(step=self.step_number, held=2, running=2, waiting=0)
        box.enter(Phase.wait_device)
        if mode == "skip" and self.rank == 1:
            event.synchronize()
            while True:
                self.rest(held=2)
                time.sleep(0.05)
        if grammar:
            self.grammar_barrier(event)
        else:
            self.collect(event)
        box.enter(Phase.results)
        box.counters["generated_tokens"] += 2
        box.event(EventKind.batch_end, kind, 2, self.step_number, 2, tokens)
        box.beat(progress=True)
        box.publish()

    def grammar_barrier(self, event):
        event.synchronize()

    def collect(self, event):
        event.synchronize()

    def forward(self, mode, tokens):
        box = self.box
        box.device_begin(self.step_number)
        if mode == "callback" and self.rank == 1:
            self.host_callback()
        still = mode in _STILL and not (mode == "skip" and self.rank == 1)
        for layer in range(2):
            box.device_layer(layer)
            self.sequence += 1
            nbytes = tokens * 64 + (512 if mode == "mismatch" and self.rank == 1 else 0)
            all_reduce(box, self.sequence, nbytes, closed=still and layer == 1)
        box.device_end(self.step_number)

    def host_callback(self):
        reader, _ = os.pipe()
        os.read(reader, 1)


if __name__ == "__main__":
    Rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]).run()
