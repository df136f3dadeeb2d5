"""What outranks every wedge: a process that is stopped, answers that are wrong, a server that died or has not come up."""

from __future__ import annotations

from monitors.judge.signatures.signature import DEATH, HELD, STALL, WEDGED, Signature
from monitors.judge.verdict import Class

FAILURES: tuple[Signature, ...] = (
    Signature(Class.hang_stopped, (("stopped",),), 0.9, unless=("progress",), supports=(*HELD, "others_wait")),
    Signature(Class.parser_leak, (("leak",),), 0.85, unless=WEDGED, supports=("doubled", "leak_counter")),
    Signature(Class.parser_leak, (("leak_counter",),), 0.6, unless=(*STALL, *DEATH), decides="the answer in which the markup stood"),
    Signature(
        Class.hosted_fallback,
        (("fallback", "answered_elsewhere"),),
        0.7,
        supports=("clients_wait", "health_down"),
        decides="a canary with a nonce: whether this server's counters and log hold it",
    ),
    Signature(
        Class.crash_loop,
        (("restarts", "traceback_repeats", "ends_repeat"),),
        0.8,
        unless=WEDGED,
        supports=("traceback", "exit", "crash", "memory", "rank_gone", "health_down", "loading"),
    ),
    Signature(
        Class.oom,
        (("memory",), (*DEATH, "killed", "health_down", "unit_down")),
        0.8,
        unless=("ranks_alive", *WEDGED),
        supports=("health_down",),
    ),
    Signature(
        Class.oom,
        (("memory",),),
        0.6,
        unless=("ranks_alive", "progress", *WEDGED),
        supports=("health_down", "crash"),
        decides="whether the server lives",
    ),
    Signature(
        Class.crash,
        (DEATH,),
        0.7,
        unless=("ranks_alive", *WEDGED),
        supports=(
            "traceback",
            "rank_gone",
            "member_gone",
            "health_down",
            "crash",
            "exit",
            "killed",
            "restart",
            "memory",
            "unit_down",
            "timeout_of_one",
            "device_lost",
            "health_ok",
        ),
    ),
    # What the monitor itself saw end is dead, also when its successor loads by the time that evidence is taken.
    Signature(Class.crash, (("ended",),), 0.7, unless=WEDGED, supports=("traceback", "exit", "killed", "restart")),
    Signature(Class.crash, (("rank_gone",),), 0.8, unless=("watchdog",), supports=("traceback", "health_down", "killed", "exit")),
    Signature(
        Class.crash,
        (("killed",),),
        0.5,
        unless=(*WEDGED, "peer_wait", "ranks_alive"),
        supports=("health_down", "unit_down"),
        decides="the lines before it: the exception, or whose signal it was",
    ),
    Signature(
        Class.loading_not_hung,
        (("loading", "stacks_load"),),
        0.8,
        unless=("traceback", "rank_gone", "timeouts_differ", "timeouts_equal", "desync_report"),
        supports=("ranks_alive",),
    ),
    Signature(
        Class.health_lies,
        (("answers_differ",),),
        0.8,
        unless=WEDGED,
        supports=("health_ok", "progress", "flows", "leak_counter"),
        decides="the same request alone and beside one other, by hand; a server without overlap or speculation",
    ),
)
