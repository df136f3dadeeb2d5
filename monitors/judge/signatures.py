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

MOVES = ("progress", "nothing_held", "loading", "batches_go_on", "stacks_move")
HELD = ("no_progress", "work_held", "batches_end_with_work", "health_ok", "idle_line_with_work", "peer_wait", "rpc_timeout", "watchdog")
WEDGED = ("watchdog", "rpc_timeout", "timeouts_differ", "timeouts_equal", "no_progress")


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
    Signature(
        Class.crash_loop,
        (("restarts", "traceback_repeats", "ends_repeat"),),
        0.8,
        unless=WEDGED,
        supports=("traceback", "exit", "rank_gone", "health_down"),
    ),
    Signature(
        Class.oom,
        (("memory",), ("rank_gone", "traceback", "killed", "health_down", "exit", "ended")),
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
        (("rank_gone", "traceback", "exit", "crash", "ended"),),
        0.7,
        unless=("ranks_alive", *WEDGED),
        supports=("traceback", "rank_gone", "health_down", "crash", "exit", "killed", "restart", "memory"),
    ),
    Signature(Class.crash, (("rank_gone",),), 0.8, unless=("watchdog",), supports=("traceback", "health_down", "killed", "exit")),
    Signature(Class.loading_not_hung, (("loading",),), 0.8, unless=("traceback", "rank_gone"), supports=("ranks_alive",)),
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
        supports=("gpus_spin", "grammar_verify", "enqueued_equal", "payload_differs", "stacks_still", *HELD),
        against=("gpus_split", "gpus_idle", "sequence_differs"),
        decides="black boxes or a flight recorder of all ranks: they say whether the ranks laid out different batches",
    ),
    Signature(
        Class.hang_host_callback,
        (("callback",),),
        0.75,
        unless=MOVES,
        supports=("gpus_split", "uninterruptible", "others_wait", "enqueued_equal", "stacks_still", *HELD),
        against=("gpus_spin",),
    ),
    Signature(
        Class.hang_tp_desync,
        (("odd_elsewhere", "sequence_differs", "layout_differs", "accepted_differs", "timeouts_differ"),),
        0.7,
        unless=MOVES,
        supports=("odd_elsewhere", "others_wait", "sequence_differs", "layout_differs", "timeouts_differ", "stacks_still", *HELD),
        against=("enqueued_equal",),
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
        Class.hang_control_plane,
        (("all_at_rest",), ("no_progress", "work_held", "idle_line_with_work", "engine_waits", "peer_wait")),
        0.7,
        unless=MOVES,
        supports=("devices_idle", "gpus_idle", "engine_waits", "stacks_still", *HELD),
        against=("gpus_spin", "gauges_zero"),
    ),
    Signature(
        Class.hang_cpu_bound,
        (("host_busy",), ("no_progress", "idle_line_with_work", "peer_wait")),
        0.6,
        unless=("progress", "nothing_held", "loading", "batches_go_on"),
        supports=("devices_idle", "gpus_idle", "stacks_move", "frames_move", *HELD),
        against=("gpus_spin",),
    ),
    Signature(
        Class.hang_symmetric_spin,
        (("all_wait_alike", "payload_differs", "timeouts_equal"),),
        0.65,
        unless=MOVES,
        supports=("gpus_spin", "enqueued_equal", "payload_differs", "stacks_still", *HELD),
        against=("gpus_split", "gpus_idle", "uninterruptible"),
        decides="what each rank enqueued (black boxes, NCCL flight recorder): equal stacks do not prove equal calls",
    ),
    Signature(
        Class.hang_symmetric_spin,
        (("gpus_spin",), ("no_progress", "work_held", "idle_line_with_work", "watchdog", "batches_end_with_work")),
        0.5,
        unless=MOVES,
        supports=HELD,
        decides="stacks of every rank",
    ),
    Signature(
        Class.hang_symmetric_spin,
        (("watchdog",), ("batches_end_with_work",)),
        0.4,
        unless=MOVES,
        supports=("killed", *HELD),
        decides="stacks of every rank and GPU power, taken before the watchdog kills",
    ),
    Signature(
        Class.slow_not_hung, (("batches_go_on", "stacks_move"),), 0.7, supports=("health_failed", "health_down", "peer_wait", "work_held")
    ),
    Signature(Class.healthy, (("progress",),), 0.8, supports=("ranks_alive", "health_ok"), against=("health_down", "traceback")),
    Signature(
        Class.idle_not_hung,
        (("nothing_held",),),
        0.8,
        supports=("all_at_rest", "devices_idle", "gpus_idle", "health_ok"),
        against=("gpus_spin",),
    ),
    Signature(
        Class.hang_unknown,
        (("no_progress", "idle_line_with_work", "peer_wait", "rpc_timeout", "watchdog", "timeouts_equal"),),
        0.4,
        supports=HELD,
        decides="stacks of every rank, black boxes and GPU power",
    ),
    Signature(
        Class.idle_not_hung, (("gauges_zero", "all_at_rest"),), 0.5, unless=("batches_end_with_work",), supports=("gpus_idle", "health_ok")
    ),
    Signature(Class.healthy, (("batches_end_with_work",),), 0.3, supports=("health_ok",), decides="what came after the last line"),
)
