"""Every environment variable that the engine reads, for the reference page. A test compares it with the code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    name: str
    meaning: str


FOR_PEOPLE = (
    Variable(
        "LASTBATCH_API_KEY", "the key that clients must send; `--api-key-file` comes first. Taken out of the environment when it was read"
    ),
    Variable("LASTBATCH_ADMIN_KEY", "the key for /admin; `--admin-key-file` comes first. Taken out of the environment when it was read"),
    Variable(
        "LASTBATCH_NATIVE",
        "0 turns the C parts off, and their Python equivalents run; an instruction set (avx512-bf16, avx512, avx2, portable) picks one",
    ),
    Variable("CC", "the C compiler for those parts; else the first of gcc, cc and clang"),
    Variable("PATH", "where that compiler is looked for"),
    Variable("XDG_CACHE_HOME", "the default model and the compiled C parts lie in lastbatch in here; else in ~/.cache"),
    Variable(
        "XDG_RUNTIME_DIR",
        "without `--run-dir` and RUNTIME_DIRECTORY, the run directory is lastbatch/NAME in here, else /tmp/lastbatch-UID/NAME",
    ),
    Variable("GLOO_SOCKET_IFNAME", "the network interface for ranks on several nodes; else the one that leads to node 0"),
    Variable("OMP_NUM_THREADS", "compute threads of a rank; set by the launcher from `--threads-per-rank`"),
)
"""What a person may set."""

FROM_THE_SUPERVISOR = (
    Variable("RUNTIME_DIRECTORY", "run directory (systemd's RuntimeDirectory=); `--run-dir` comes first"),
    Variable("INVOCATION_ID", "which start of the unit this is; drawn anew where there is no supervisor"),
    Variable("NOTIFY_SOCKET", "where READY=1, STOPPING=1 and WATCHDOG=1 are sent (Type=notify)"),
    Variable("WATCHDOG_USEC", "how often at least WATCHDOG=1 is due (WatchdogSec=)"),
)

BETWEEN_PROCESSES = (
    Variable("LASTBATCH_SETTINGS", "all settings as JSON"),
    Variable("LASTBATCH_RANK", "the rank's number"),
    Variable("LASTBATCH_SOCKETS", "folder of the ZMQ sockets"),
    Variable("LASTBATCH_RUN_DIR", "folder of the black boxes"),
    Variable("LASTBATCH_MODEL_FOLDER", "the model's folder"),
    Variable("LASTBATCH_CONTROL_FD", "descriptor on which the launcher speaks to the process"),
    Variable("LASTBATCH_KEYS_FD", "descriptor on which the API process is handed the keys, so that no environment holds them"),
    Variable("LASTBATCH_READY_FD", "descriptor on which the process says that it is ready"),
)
"""Set by the launcher for the processes that it starts; nobody else sets them."""
