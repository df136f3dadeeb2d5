"""What import-linter cannot see: modules as they are really loaded, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded_by(module: str) -> set[str]:
    """Top-level names, and our own modules in full, that importing ``module`` loads."""
    code = f"import sys; import {module}; print('\\n'.join(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(ran.stdout.split())


def test_the_black_box_needs_the_standard_library_and_nothing_else() -> None:
    plain = subprocess.run([sys.executable, "-c", "import sys; print('\\n'.join(sys.modules))"],
                           capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
    added = {name for name in loaded_by("engine.blackbox") - set(plain.stdout.split()) if name.split(".")[0] not in sys.stdlib_module_names}
    rooms = {f"engine.blackbox.{name}" for name in ("layout", "reader", "records", "writer")}
    assert added == {"engine", "engine.blackbox"} | rooms


@pytest.mark.parametrize("module", ["engine.server.main", "engine.text", "engine.config", "engine.default_model", "engine.reference"])
def test_what_must_start_fast_loads_no_torch(module: str) -> None:
    assert loaded_by(module) & {"torch", "transformers", "xgrammar"} == set()
