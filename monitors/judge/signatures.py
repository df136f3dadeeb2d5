"""The classes as declared evidence. Read from the top: the first signature that fits is the verdict.

A signature *needs* one finding of each of its groups, does not fit when a finding of *unless* is there, and is made
more or less sure by what it *supports* and *against* name. Findings are facts about a scene (``findings.py``); what
they mean together is said here and nowhere else.

Three rules carry most of it. The majority's stack is the scene, the rank that stands elsewhere is the suspect. An odd
rank at another collective, in receive or idle is a desync; one that is busy on the host while the others wait is an
asymmetric hang or a host callback. Ranks that differ in their black boxes while a grammar-masked verify is among the
last batches are at the grammar barrier because of it; without a grammar they are out of step.
"""

from __future__ import annotations

from dataclasses import dataclass

from monitors.judge.verdict import Class

MOVES = ("progress", "nothing_held", "loading", "batches_go_on", "stacks_move", "counters_move")
STALL = (
    "no_progress", "idle_line_with_work", "zero_lines_repeat", "counters_flat", "log_quiet", "peer_wait", "rpc_timeout", "watchdog",
    "clients_wait", "accepted_unanswered",
)  # fmt: skip
HELD = (*STALL, "work_held", "batches_end_with_work", "in_step", "health_ok")
WEDGED = ("watchdog", "rpc_timeout", "timeouts_differ", "timeouts_equal", "desync_report", "no_progress")
DEATH = ("rank_gone", "member_gone", "traceback", "exit", "crash", "ended", "native_frames", "device_lost")


@dataclass(frozen=True)
class Signature:
    """``base`` is the confidence when only what is needed is there; ``decides`` names what would settle it."""

    verdict: Class
    needs: tuple[tuple[str, ...], ...]
    base: float
    unless: tuple[str, ...] = ()
    supports: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    decides: str = ""


SIGNATURES: tuple[Signature, ...] = (
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
        Class.hang_grammar_barrier,
        (("grammar_verify",), ("layout_differs", "accepted_differs", "payload_differs")),
        0.8,
        unless=MOVES,
        supports=("all_at_grammar_barrier", "enqueued_equal", "gpus_spin", "stacks_still", "all_wait_alike", *HELD),
        against=("gpus_split", "gpus_idle", "callback"),
    ),
    Signature(
        Class.hang_grammar_barrier,
        (("all_at_grammar_barrier",),),
        0.7,
        unless=(*MOVES, "callback"),
        supports=("gpus_spin", "grammar_verify", "grammar_error", "enqueued_equal", "payload_differs", "stacks_still", *HELD),
        against=("gpus_split", "gpus_idle", "sequence_differs"),
        decides="black boxes or a flight recorder of all ranks: they say whether the ranks laid out different batches",
    ),
    Signature(
        Class.hang_host_callback,
        (("callback", "lock_circle"),),
        0.75,
        unless=MOVES,
        supports=("lock_circle", "gpus_split", "uninterruptible", "others_wait", "enqueued_equal", "stacks_still", *HELD),
        against=("gpus_spin",),
    ),
    Signature(
        Class.hang_tp_desync,
        (
            (
                "odd_elsewhere",
                "sequence_differs",
                "layout_differs",
                "accepted_differs",
                "timeouts_differ",
                "desync_report",
                "enqueued_differ",
            ),
        ),
        0.7,
        unless=MOVES,
        supports=(
            "odd_elsewhere",
            "others_wait",
            "sequence_differs",
            "layout_differs",
            "timeouts_differ",
            "desync_report",
            "enqueued_differ",
            "decode_stops_first",
            "stacks_still",
            *HELD,
        ),
        against=("enqueued_equal",),
    ),
    # Where every GPU spins, the odd rank's too, it has not stayed behind on the host: it stands in another collective.
    Signature(
        Class.hang_tp_desync,
        (("odd_busy",), ("gpus_spin",)),
        0.6,
        unless=(*MOVES, "computing", "uninterruptible"),
        supports=("others_wait", "stacks_still", *HELD),
        against=("enqueued_equal",),
        decides="what each rank enqueued (flight recorder): by number, operation and size",
    ),
    Signature(
        Class.hang_asymmetric,
        (("odd_busy",),),
        0.65,
        unless=MOVES,
        supports=("gpus_split", "enqueued_equal", "uninterruptible", "stacks_still", *HELD),
        against=("gpus_spin", "gpus_idle"),
        decides="a native stack of the odd rank: it says which call on the host does not return",
    ),
    Signature(
        Class.hang_grammar_barrier,
        (("grammar_error",), ("in_grammar", *STALL)),
        0.5,
        unless=(*MOVES, "flows"),
        supports=("in_grammar", "gpus_spin", "cpu_hot", *HELD),
        against=("gpus_split",),
        decides="stacks of every rank and GPU power: whether all wait on the device below grammar code",
    ),
    Signature(
        Class.hang_kv_transfer,
        (("transfer_stuck", "prealloc_stuck"),),
        0.55,
        unless=("progress", "loading"),
        supports=("retraction", "transfer_error", "waits_for_remote_kv", "all_at_transfer", "decode_stops_first", *STALL),
        decides="the state of each transfer on both sides: which requests hold a slot and since when",
    ),
    Signature(
        Class.hang_kv_transfer,
        (
            ("transfer_error", "all_at_transfer", "waits_for_remote_kv", "decode_stops_first", "prefill_stops_first"),
            (*STALL, "work_held", "queue_waits", "transfer_error", "batches_end_with_work"),
        ),
        0.55,
        unless=(*MOVES, "flows"),
        supports=("transfer_error", "waits_for_remote_kv", "all_at_transfer", "decode_stops_first", "prefill_stops_first", *HELD),
        against=("gpus_spin",),
        decides="logs and queues of both sides at one time",
    ),
    Signature(
        Class.hang_cpu_bound,
        (
            ("computing",),
            (
                "no_progress",
                "idle_line_with_work",
                "zero_lines_repeat",
                "counters_flat",
                "peer_wait",
                "work_held",
                "log_quiet",
                "clients_wait",
                "accepted_unanswered",
            ),
        ),
        0.6,
        unless=("progress", "nothing_held", "loading", "batches_go_on", "counters_move", "flows", "gpus_spin"),
        supports=("devices_idle", "gpus_idle", "cpu_hot", "stacks_move", "frames_move", *HELD),
        decides="two samples of its CPU time and stack: a computation with no end, or one that is only long",
    ),
    Signature(
        Class.hang_control_plane,
        (
            ("all_at_rest",),
            (
                "no_progress",
                "work_held",
                "idle_line_with_work",
                "zero_lines_repeat",
                "counters_flat",
                "engine_waits",
                "peer_wait",
                "clients_wait",
                "accepted_unanswered",
                "posts_unbatched",
                "batches_end_with_work",
            ),
        ),
        0.7,
        unless=MOVES,
        supports=("devices_idle", "gpus_idle", "engine_waits", "stacks_still", *HELD),
        against=("gpus_spin", "gauges_zero"),
    ),
    Signature(
        Class.hang_control_plane,
        (("accepted_unanswered", "posts_unbatched"),),
        0.5,
        unless=(*MOVES, "gpus_spin", "gpus_hot", "gpus_work", "host_busy", "computing", "all_wait_alike", "crash", "flows"),
        supports=("gpus_idle", "health_ok", "clients_wait", "orphan", "gauges_zero"),
        decides="stacks of the scheduler: whether it waits for work while requests are held",
    ),
    Signature(
        Class.hang_control_plane,
        (
            ("gpus_idle", "devices_idle"),
            ("no_progress", "idle_line_with_work", "zero_lines_repeat", "counters_flat", "work_held", "clients_wait"),
        ),
        0.45,
        unless=(*MOVES, "host_busy", "computing", "cpu_hot", "log_spins", "all_wait_alike", "flows"),
        supports=("health_ok", *HELD),
        decides="stacks of the scheduler and its CPU time: waiting for work, or computing",
    ),
    Signature(
        Class.hang_cpu_bound,
        (("host_busy",), ("no_progress", "idle_line_with_work", "peer_wait", "counters_flat", "clients_wait")),
        0.6,
        unless=("progress", "nothing_held", "loading", "batches_go_on", "counters_move", "gpus_work", "gpus_spin"),
        supports=("devices_idle", "gpus_idle", "cpu_hot", "stacks_move", "frames_move", *HELD),
    ),
    Signature(
        Class.hang_cpu_bound,
        (("log_spins", "cpu_hot"), ("gpus_idle", "devices_idle")),
        0.4,
        unless=(*MOVES, "flows", "log_idle"),
        supports=("log_spins", "cpu_hot", *HELD),
        decides="a stack of the process that computes, twice",
    ),
    Signature(
        Class.hang_symmetric_spin,
        (("all_wait_alike", "payload_differs", "timeouts_equal"), (*HELD, "timeouts_equal", "gpus_spin", "gpus_hot", "payload_differs")),
        0.65,
        unless=(*MOVES, "gpus_work"),
        supports=("gpus_spin", "enqueued_equal", "payload_differs", "stacks_still", *HELD),
        against=("gpus_split", "gpus_idle", "uninterruptible", "flows"),
        decides="what each rank enqueued (black boxes, NCCL flight recorder): equal stacks do not prove equal calls",
    ),
    Signature(
        Class.hang_symmetric_spin,
        (
            ("gpus_spin",),
            (
                "no_progress",
                "work_held",
                "idle_line_with_work",
                "zero_lines_repeat",
                "watchdog",
                "batches_end_with_work",
                "clients_wait",
                "counters_flat",
                "peer_wait",
                "in_step",
            ),
        ),
        0.5,
        unless=(*MOVES, "flows"),
        supports=HELD,
        decides="stacks of every rank",
    ),
    Signature(
        Class.hang_symmetric_spin,
        (("gpus_spin",), ("flows",)),
        0.35,
        unless=MOVES,
        supports=HELD,
        decides="what came after the last batch line, and stacks of every rank",
    ),
    Signature(
        Class.hang_symmetric_spin,
        (("gpus_hot",), ("no_progress", "idle_line_with_work", "zero_lines_repeat", "counters_flat", "clients_wait")),
        0.45,
        unless=(*MOVES, "flows"),
        supports=HELD,
        decides="GPU power: a wait draws far less than work; and stacks of every rank",
    ),
    Signature(
        Class.hang_asymmetric,
        (("uninterruptible",), STALL),
        0.5,
        unless=(*MOVES, "gpus_spin"),
        supports=("gpus_split", *HELD),
        decides="a native stack of the process that sleeps, and the kernel's log: which device or file it waits for",
    ),
    Signature(
        Class.hang_symmetric_spin,
        (("watchdog",), ("batches_end_with_work",)),
        0.4,
        unless=(*MOVES, "gpus_split", "gpus_idle"),
        supports=("killed", *HELD),
        decides="stacks of every rank and GPU power, taken before the watchdog kills",
    ),
    Signature(
        Class.hang_symmetric_spin,
        (("all_wait_alike",),),
        0.4,
        unless=(*MOVES, "gpus_work", "flows", "gauges_zero", "log_idle"),
        supports=("stacks_still", "enqueued_equal"),
        decides="whether work is held and whether the frames move: two samples, GPU power, counters",
    ),
    Signature(
        Class.hang_asymmetric,
        (("gpus_split",), STALL),
        0.5,
        unless=MOVES,
        supports=HELD,
        decides="stacks of the ranks whose GPUs are idle",
    ),
    Signature(
        Class.hang_asymmetric,
        (("recorder_split",),),
        0.5,
        unless=(*MOVES, "gpus_spin"),
        supports=("gpus_split", "enqueued_equal", *HELD),
        decides="stacks and GPU readings of the ranks whose stream did not reach the collective",
    ),
    Signature(
        Class.hang_symmetric_spin,
        (("collective_open",),),
        0.45,
        unless=(*MOVES, "gpus_split", "flows"),
        supports=("gpus_spin", "enqueued_equal", *HELD),
        decides="a second dump: whether the same collective is still open; stacks and GPU power",
    ),
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
