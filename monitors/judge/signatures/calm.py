"""No wedge, or none that the evidence can name: slow, idle, healthy, a health answer that lies, not known."""

from __future__ import annotations

from monitors.judge.signatures.signature import DEATH, HELD, MOVES, STALL, WEDGED, Signature
from monitors.judge.verdict import Class

CALM: tuple[Signature, ...] = (
    Signature(
        Class.slow_not_hung,
        (("batches_go_on", "stacks_move"),),
        0.7,
        supports=("health_failed", "health_down", "peer_wait", "work_held", "compiling", "prefill_advances"),
    ),
    Signature(
        Class.slow_not_hung,
        (
            ("flows", "counters_move", "progress"),
            ("kv_full", "queue_waits", "retraction", "prefill_advances", "compiling", "silence_ended"),
        ),
        0.65,
        unless=("no_progress",),
        supports=("kv_full", "queue_waits", "retraction", "prefill_advances", "gpus_work", "silence_ended"),
        against=("gpus_spin",),
    ),
    Signature(
        Class.slow_not_hung,
        (("silence_ended",),),
        0.55,
        unless=("no_progress", "watchdog", "gpus_spin", "idle_line_with_work"),
        supports=("gpus_work", "in_step", "health_ok"),
        decides="whether the next silence ends too",
    ),
    Signature(
        Class.slow_not_hung,
        (("gpus_work",), ("batches_end_with_work", "work_held", "in_step", "idle_line_with_work", "health_failed")),
        0.5,
        unless=("flows", "no_progress", "watchdog", "rpc_timeout", "zero_lines_repeat"),
        supports=("prefill_advances", "health_failed", "compiling"),
        decides="a second look: whether tokens were made between the two",
    ),
    Signature(
        Class.slow_not_hung,
        (("compiling", "prefill_advances"),),
        0.45,
        unless=("no_progress", "watchdog", "rpc_timeout", "zero_lines_repeat", "counters_flat"),
        supports=("peer_wait", "health_failed", "health_down"),
        decides="a second sample of stacks and counters",
    ),
    Signature(
        Class.idle_not_hung,
        (("ordered",),),
        0.7,
        unless=("no_progress", "watchdog", "rpc_timeout", *DEATH),
        supports=("nothing_held", "all_at_rest", "unit_down"),
        against=("work_held",),
    ),
    Signature(
        Class.health_lies,
        (("answer_wrong",), ("health_ok",)),
        0.6,
        decides="the same request again, and one without load",
    ),
    Signature(
        Class.health_lies,
        (("health_ok",), ("clients_wait",)),
        0.55,
        unless=(*WEDGED, "idle_line_with_work", "zero_lines_repeat"),
        supports=("orphan", "gauges_zero", "log_quiet"),
        decides="stacks and GPU power: which class of wedge stands behind the good answer",
    ),
    Signature(
        Class.health_lies,
        (("probe_refused",),),
        0.4,
        unless=STALL,
        supports=("restart", "health_down"),
        decides="the restart counter of the workers, and whether a real request is served while the probe fails",
    ),
    Signature(
        Class.health_lies,
        (("probe_without_batch",),),
        0.35,
        unless=(*STALL, "flows"),
        decides="a real completion with a nonce, and the process table: a probe may be answered with nothing behind it",
    ),
    Signature(
        Class.healthy, (("progress", "counters_move"),), 0.8, supports=("ranks_alive", "health_ok"), against=("health_down", "traceback")
    ),
    Signature(
        Class.idle_not_hung,
        (("nothing_held",),),
        0.8,
        supports=("all_at_rest", "devices_idle", "gpus_idle", "health_ok"),
        against=("gpus_spin",),
    ),
    Signature(
        Class.hang_unknown,
        (
            (
                "no_progress",
                "idle_line_with_work",
                "zero_lines_repeat",
                "counters_flat",
                "peer_wait",
                "rpc_timeout",
                "watchdog",
                "timeouts_equal",
                "timeout_of_one",
            ),
        ),
        0.4,
        supports=(*HELD, "network", "orphan"),
        decides="stacks of every rank, black boxes and GPU power",
    ),
    Signature(
        Class.hang_unknown,
        (("log_quiet", "orphan", "clients_wait", "killed", "network"),),
        0.3,
        unless=("log_idle", "flows"),
        supports=("log_quiet", "orphan", "health_ok", "network"),
        decides="whether the requests that are held are answered: counters, a completion with a nonce, stacks of every rank",
    ),
    Signature(
        Class.healthy, (("flows",),), 0.5, unless=("gpus_spin", "gpus_split"), supports=("health_ok", "gpus_work"), against=("health_down",)
    ),
    Signature(
        Class.hang_asymmetric,
        (("gpus_split",),),
        0.35,
        unless=(*MOVES, "log_idle", "gauges_zero"),
        decides="whether a request is outstanding: ranks that wait for the next one in a collective look the same; and stacks",
    ),
    Signature(
        Class.idle_not_hung,
        (("gauges_zero", "all_at_rest", "log_idle"),),
        0.5,
        unless=("batches_end_with_work", "in_step"),
        supports=("log_idle", "gpus_idle", "health_ok"),
        against=("gpus_spin",),
        decides="a completion with a nonce: gauges go stale, and a scheduler at rest may have lost a request",
    ),
    Signature(
        Class.hang_unknown,
        (("gpus_spin", "gpus_hot"),),
        0.2,
        decides="whether a request is outstanding, and stacks: utilisation and power alone tell neither work nor rest from a wait",
    ),
    Signature(Class.healthy, (("answered",),), 0.4, unless=STALL, decides="counters and a second look: one answer is one request"),
    Signature(Class.idle_not_hung, (("gpus_idle",),), 0.3, unless=("batches_end_with_work",), decides="whether a request is outstanding"),
    Signature(Class.healthy, (("batches_end_with_work",),), 0.3, supports=("health_ok",), decides="what came after the last line"),
)
