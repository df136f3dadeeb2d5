"""Each guard is load-bearing: take one out, and a test must fail.

``python tools/mutants.py [NAME...]`` copies the tree, takes one guard out of the copy, runs the tests that should
notice, and prints a table. Exit code 1 when a mutant survives, or when a guard is no longer where it was.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 300


@dataclass(frozen=True)
class Mutant:
    name: str
    guard: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant("free-at-once", "pages are freed by forward epoch", "engine/cache/pages.py", "if epoch <= self._completed:", "if True:",
           "tests/engine/test_cache.py tests/engine/test_scheduler.py"),
    Mutant("unlock-at-once", "a released prefix stays locked while a launched step may read it", "engine/cache/memory.py",
           "if epoch <= self._completed:", "if True:", "tests/engine/test_cache.py tests/engine/test_scheduler.py"),
    Mutant("evict-locked", "a locked prefix is never evicted", "engine/cache/prefix.py", "if not node.children and not node.locks]",
           "if not node.children]", "tests/engine/test_cache.py tests/engine/test_scheduler.py"),
    Mutant("no-cut-at-stop", "the accepted run is cut at a stop id", "engine/speculation/accept.py", "if token in stops:",
           "if token in stops and at == len(drafts):", "tests/engine/test_accept.py tests/engine/test_scheduler.py"),
    Mutant("no-cut-at-room", "the accepted run is cut at the room that is left", "engine/speculation/accept.py", "if len(run) == room:",
           "if len(run) == room and at == len(drafts):", "tests/engine/test_accept.py"),
    Mutant("accept-all-drafts", "a draft counts only if it is what was drawn", "engine/speculation/accept.py",
           "if at == len(drafts) or drafts[at] != token:", "if at == len(drafts):",
           "tests/engine/test_accept.py tests/engine/test_scheduler.py"),
    Mutant("fsm-twice", "the grammar FSM advances once for each accepted run", "engine/exec/executor.py",
           "return sequence.matcher.advance(tokens)",
           "return sequence.matcher.advance(tokens[:1]) + sequence.matcher.advance(tokens)",
           "tests/engine/test_executor.py"),
    Mutant("fsm-takes-more", "the FSM takes the accepted run and nothing more", "engine/exec/executor.py",
           "return sequence.matcher.advance(tokens)", "return sequence.matcher.advance([*tokens, *tokens[-1:]])",
           "tests/engine/test_executor.py"),
    Mutant("every-rank-draws", "rank 0 draws and the group shares what it drew", "engine/exec/executor.py",
           "self._group.all_reduce(shared)", "pass", "tests/engine/test_tensor_parallel.py"),
    Mutant("send-before-result", "rank 0 sends a step only when it has the last one's result", "engine/scheduler/loops.py",
           "        results = scheduler.collect(pending)\n        trimmed = plan.without(results.finished) if plan else None\n"
           "        self._pending = scheduler.launch(trimmed) if trimmed else None\n",
           "        self._pending = scheduler.launch(plan) if plan else None\n        results = scheduler.collect(pending)\n",
           "tests/engine/test_scheduler.py"),
    Mutant("finished-rows-stay", "rows of finished requests leave a prepared step", "engine/scheduler/loops.py",
           "plan.without(results.finished) if plan else None", "plan", "tests/engine/test_scheduler.py"),
    Mutant("abort-keeps-queue", "an abort takes the request out of its queue", "engine/scheduler/scheduler.py",
           '        self._box.counters["requests_aborted"] += 1\n        self.queues.remove(request)\n',
           '        self._box.counters["requests_aborted"] += 1\n', "tests/engine/test_scheduler.py"),
    Mutant("abort-keeps-pages", "an abort gives the pages back", "engine/scheduler/scheduler.py",
           "        self.memory.release(request.kv, request.tokens, self._launched_step, keep=False)\n        self._drop(request)",
           "        self._drop(request)", "tests/engine/test_scheduler.py"),
    Mutant("abort-keeps-ranks", "ranks forget an aborted request", "engine/scheduler/scheduler.py",
           "        if request.entered:\n            self._leaves.append(request.rid)\n        if request.gr", "        if request.gr",
           "tests/engine/test_scheduler.py"),
    Mutant("retract-drops", "a retracted request goes back to the queue", "engine/scheduler/scheduler.py",
           "        self.queues.waiting.appendleft(request)\n\n    def _count", "\n    def _count", "tests/engine/test_scheduler.py"),
    Mutant("plan-past-a-full-pool", "a full pool is planned for only when all results are in", "engine/scheduler/batching.py",
           "            if not settled:\n                raise Deferred\n", "", "tests/engine/test_scheduler.py"),
    Mutant("grammar-without-budget", "a grammar that costs everybody too much ends its own request", "engine/grammar/budget.py",
           "if self._overdrawn_s > STEPS * self._allowance_s:", "if False:", "tests/engine/test_grammar_trial.py"),
    Mutant("budget-without-pay-back", "what a grammar leaves unused pays back what it overdrew", "engine/grammar/budget.py",
           "max(0.0, self._overdrawn_s - self._allowance_s)", "self._overdrawn_s", "tests/engine/test_grammar_trial.py"),
    Mutant("trial-without-end", "a compilation is ended by the kernel at its deadline", "engine/grammar/trial.py",
           "        signal.setitimer(signal.ITIMER_REAL, max(timeout_s, 0.000001))\n", "", "tests/engine/test_grammar_trial.py"),
    Mutant("orphaned-trial", "no trial outlives its rank", "engine/grammar/trial.py",
           "    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)\n", "", "tests/engine/test_grammar_trial.py"),
    Mutant("open-relay", "nobody without the group's secret is heard at the relay", "engine/launch/relay.py",
           "            secret.guard(self._socket)\n", "            pass\n", "tests/engine/test_launch_relay.py"),
    Mutant("keys-stay", "keys leave the bytes that /proc shows", "engine/keys.py", "        _wipe(NAMES)\n", "",
           "tests/engine/test_server_access.py"),
)  # fmt: skip


def run(mutant: Mutant, folder: Path) -> str:
    """``killed`` is what one hopes for; ``survived`` or ``gone`` is a defect."""
    target = folder / mutant.file
    text = target.read_text()
    if text.count(mutant.old) != 1:
        return f"gone ({text.count(mutant.old)} matches)"
    target.write_text(text.replace(mutant.old, mutant.new))
    try:
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()], cwd=folder,
                              env={**os.environ, "PYTHONPATH": str(folder)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S)  # fmt: skip
    except subprocess.TimeoutExpired:
        return "killed (never ended)"
    finally:
        target.write_text(text)
    if done.returncode not in (0, 1):
        return f"no verdict (pytest exit {done.returncode})"
    return "killed" if done.returncode else "survived"


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    bad = 0
    with tempfile.TemporaryDirectory(prefix="lastbatch-mutants-") as scratch:
        folder = Path(scratch) / "tree"
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "build", "*.egg-info"))
        for mutant in chosen:
            found = run(mutant, folder)
            bad += not found.startswith("killed")
            print(f"{found:22} {mutant.name:22} {mutant.guard}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} guards are load-bearing")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
