"""The engine's part of the reference page says everything that the code reads."""

from __future__ import annotations

import ast
from pathlib import Path

from engine import environment, reference

ROOT = Path(__file__).parents[2]


def test_every_flag_metric_counter_and_fault_is_on_the_page() -> None:
    from engine import blackbox, faults, flags
    from engine.server.metrics import METRICS

    page = reference.page()
    names = [option.flag for option in flags.options()]
    names += [metric.name for metric in METRICS] + list(blackbox.COUNTERS) + list(faults.KINDS)
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_environment_table_lists_what_the_code_reads() -> None:
    read: dict[str, str] = {}
    for file in (ROOT / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            for name in _read_variables(node):
                read.setdefault(name, str(file.relative_to(ROOT)))
    groups = (environment.FOR_PEOPLE, environment.FROM_THE_SUPERVISOR, environment.BETWEEN_PROCESSES)
    listed = {variable.name for group in groups for variable in group}
    assert {name: where for name, where in read.items() if name not in listed} == {}, "add them to engine/environment.py"
    assert listed - read.keys() == set(), "nothing reads these"


def _read_variables(node: ast.AST) -> list[str]:
    """Names read in ``env.get("X")``, ``env["X"]``, ``os.environ...``, ``os.getenv("X")`` and ``"X" in env``."""
    match node:
        case ast.Call(func=ast.Attribute(value=source, attr="get" | "pop" | "setdefault"), args=[ast.Constant(value=str(name)), *_]):
            return [name] if _is_environment(source) else []
        case ast.Call(func=ast.Attribute(attr="getenv"), args=[ast.Constant(value=str(name)), *_]):
            return [name]
        case ast.Subscript(value=source, slice=ast.Constant(value=str(name)), ctx=ast.Load()):
            return [name] if _is_environment(source) else []
        case ast.Compare(left=ast.Constant(value=str(name)), comparators=[source]):
            return [name] if _is_environment(source) else []
    return []


def _is_environment(source: ast.expr) -> bool:
    match source:
        case ast.Name(id="env" | "environ" | "environment") | ast.Attribute(attr="environ" | "env" | "environment"):
            return True
    return False
