"""Run by test_grammar_trial: tries the grammars of its arguments as rank 0 does, and prints how each ended. The first
argument is the deadline of each, in seconds.

The compiler here misbehaves by its text, in ways that no signal handler of Python's could end.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

from engine.grammar.backends import GrammarError
from engine.grammar.trial import Trials
from engine.messages import Grammar


class Misbehaving:
    def __init__(self) -> None:
        self.compiled = 0

    def compile(self, grammar: Grammar) -> object:
        self.compiled += 1
        match grammar.text:
            case "for ever":
                return re.match("(a+)+$", "a" * 64 + "b")  # one call of C that ends in some thousand years
            case "broken":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "greedy":
                return bytearray(64 << 30)
            case "bad":
                raise GrammarError("bad it is")
        return self.compiled


def main() -> None:
    trials = Trials.start(Misbehaving)
    timeout_s = float(sys.argv[1])
    for text in sys.argv[2:]:
        begun = time.monotonic()
        try:
            trials.check(Grammar("regex", text), timeout_s)
            why = ""
        except GrammarError as error:
            why = str(error)
        print(json.dumps([text, why, time.monotonic() - begun]), flush=True)
    if sys.argv[-1] == "good":
        trials.close()
    else:
        signal.pause()


if __name__ == "__main__":
    main()
