"""The engine's part of the reference page, made from the declarations that the code itself runs on.

``opsctl reference`` prints the whole page, docs/REFERENCE.md: this part and what stands above the engine.

A subject gets on the page by a function here that turns its declarations into a table; ``SECTIONS`` is the order. Nothing
on the page is written by hand, and a test fails when the page on disk is not the one that the code gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine import blackbox, environment, faults
from engine.flags import options
from engine.server.app import HEALTH_ROUTES, ROUTES
from engine.server.metrics import METRICS, STATES
from engine.server.protocol import WITHOUT_EFFECT


@dataclass(frozen=True)
class Table:
    """``rows`` hold Markdown text, one cell for each of ``columns``."""

    title: str
    intro: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", *([self.intro, ""] if self.intro else []), _row(self.columns), _row("---" for _ in self.columns)]
        return "\n".join(lines + [_row(row) for row in self.rows]) + "\n"


EXIT_CODES = (
    (0, "done; for `serve`: ended by SIGTERM or SIGINT, in order"),
    (1, "failed: the reason is on standard error; for `serve`: a process died or was stuck, the evidence is in the run directory"),
    (2, "wrong arguments, or a setting that cannot be used"),
    (75, "`serve`: another node of the deployment ended; a service manager should start this one again"),
    (130, "interrupted; for `serve`: a second Ctrl-C broke the drain off"),
)


def flags() -> Table:
    rows = []
    for option in options():
        names = ", ".join(_code(name) for name in (option.flag, *option.aliases))
        choices = f" One of {', '.join(_code(choice) for choice in option.choices)}." if option.choices else ""
        repeat = " May be given more than once." if option.repeat else ""
        default = "" if option.default in ("", ()) else "off" if option.default is False else _code(str(option.default))
        rows.append((names, default, option.unit, option.help + "." + choices + repeat, "yes" if option.declared else "no"))
    return Table(
        "Flags of `lastbatch serve`",
        "A declared flag is part of the configuration digest; the others say where this process runs.",
        ("flag", "default", "unit", "meaning", "declared"),
        tuple(rows),
    )


def variables() -> Table:
    groups = (
        ("a person", environment.FOR_PEOPLE),
        ("the service manager", environment.FROM_THE_SUPERVISOR),
        ("the launcher, for its children", environment.BETWEEN_PROCESSES),
    )
    rows = tuple((_code(variable.name), setter, variable.meaning) for setter, group in groups for variable in group)
    return Table("Environment", "Variables that the engine reads, and who sets them.", ("variable", "set by", "meaning"), rows)


def routes() -> Table:
    rows = tuple((_code(path), " ".join(methods), key, meaning) for path, methods, key, meaning in ROUTES)
    intro = (
        "OpenAI's shapes. `Authorization: Bearer KEY` where a key is configured; without an admin key, /admin answers this host alone, and "
        "only under `--enable-faults`. Every answer bears `x-request-id`, the client's own if it sent one."
    )
    return Table("Routes", intro, ("route", "methods", "key", "what it is for"), rows)


def parameters() -> Table:
    rows = tuple((_code(name), reason) for name, reason in WITHOUT_EFFECT)
    intro = (
        "An unknown parameter is refused by its name, for one that is silently ignored is a wrong answer that nobody notices. These of "
        "OpenAI's are taken, and change nothing. `reasoning_effort` is handed to the chat template, and does what that makes of it. "
        "Without `max_tokens` an answer may be as long as the context or the KV pool leaves room for, and says `length` when it comes to "
        "that end; a client that leaves ends it at once."
    )
    return Table("Parameters without effect", intro, ("parameter", "why"), rows)


def health_routes() -> Table:
    rows = tuple((_code(route), meaning) for route, meaning in HEALTH_ROUTES)
    return Table("Health routes", "None of them needs a key.", ("route", "meaning"), rows)


def metrics() -> Table:
    rows = tuple(
        (_code(metric.name), metric.kind, ", ".join(_code(label) for label in metric.labels), metric.help + ".") for metric in METRICS
    )
    return Table("Metrics", "What `/metrics` gives, in Prometheus' text format.", ("metric", "kind", "labels", "meaning"), rows)


def exit_codes() -> Table:
    rows = tuple((str(code), meaning) for code, meaning in EXIT_CODES)
    return Table("Exit codes of `lastbatch`", "", ("code", "meaning"), rows)


def fault_points() -> Table:
    rows = tuple(
        (_code(kind.name), ", ".join(_code(f"{key}={_value(value)}") for key, value in kind.defaults.items()), kind.effect)
        for kind in faults.KINDS.values()
    )
    intro = "For drills. `--fault NAME[:key=value,...]` or `/admin/faults`, both only under `--enable-faults`."
    return Table("Faults", intro, ("fault", "parameters and defaults", "effect"), rows)


def phases() -> Table:
    rows = tuple((str(phase.value), _code(phase.name)) for phase in blackbox.Phase)
    intro = "What a rank's main thread is doing, in the host record; each has total time, calls and a rolling maximum over 30 to 60 s."
    return Table("Black box: phases", intro, ("number", "phase"), rows)


def counters() -> Table:
    rows = tuple((str(number), _code(name), "state" if name in STATES else "total") for number, name in enumerate(blackbox.COUNTERS))
    intro = "In the host record, in this order. A total counts from the start of the rank; a state is what holds now."
    return Table("Black box: counters", intro, ("number", "counter", "kind"), rows)


def events() -> Table:
    rows = tuple((str(kind.value), _code(kind.name)) for kind in blackbox.EventKind)
    intro = f"Kinds of the last {blackbox.RING_SLOTS:,} events in the ring; `engine/blackbox/layout.py` gives the fields of each."
    return Table("Black box: events", intro, ("number", "event"), rows)


SECTIONS: tuple[Callable[[], Table], ...] = (
    flags,
    variables,
    routes,
    parameters,
    health_routes,
    metrics,
    fault_points,
    exit_codes,
    phases,
    counters,
    events,
)


def page() -> str:
    """The whole page."""
    head = "# Reference\n\nMade from the code by `make reference`; edit the code, not this page.\n"
    return "\n".join((head, *(section().markdown() for section in SECTIONS)))


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(text: str) -> str:
    return f"`{text}`"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
