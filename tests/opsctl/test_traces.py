from __future__ import annotations

from opsctl.rollout.traces import exception, tracebacks
from opsctl.service.manager import Line


def lines(text: str, pid: int = 0) -> list[Line]:
    return [Line(line, pid) for line in text.splitlines()]


ONE = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n    ^^^\nTypeError: no'


def test_a_traceback_is_whole_and_ends_with_its_exception() -> None:
    found = tracebacks(lines(f"before\n{ONE}\nafter"))
    assert found == (ONE,)
    assert exception(found[0]) == "TypeError"


def test_a_head_behind_a_log_prefix_is_found() -> None:
    found = tracebacks(lines(f"[2026-01-01 00:00:00 TP1] Scheduler hit an exception: {ONE}\nmore"))
    assert len(found) == 1 and found[0].endswith("TypeError: no")


def test_two_processes_that_write_at_once_are_kept_apart_where_the_log_names_them() -> None:
    first, second = lines(ONE, 1), lines(ONE.replace("TypeError", "torch.OutOfMemoryError"), 2)
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    assert [exception(trace) for trace in tracebacks(mixed)] == ["TypeError", "torch.OutOfMemoryError"]


def test_a_chain_gives_both() -> None:
    chain = f"{ONE}\n\nDuring handling of the above exception, another exception occurred:\n\n{ONE.replace('TypeError: no', 'KeyError')}"
    assert [exception(trace) for trace in tracebacks(lines(chain))] == ["TypeError", "KeyError"]


def test_one_that_was_cut_off_is_given_as_far_as_it_goes() -> None:
    cut = "\n".join(ONE.splitlines()[:3])
    assert tracebacks(lines(cut)) == (cut,)
    assert exception(cut) == ""


def test_the_managers_line_ends_a_cut_traceback() -> None:
    text = [*lines("\n".join(ONE.splitlines()[:3])), Line("Main process exited, code=killed, status=9/KILL", 1, manager=True)]
    assert "Main process" not in tracebacks(text)[0]
