#!/usr/bin/env bash
# Make .venv ready: system packages, virtual environment, pinned dependencies. Safe to run again, and twice at once.
#
# $PYTHON picks the interpreter. Plain pip, so that the machine's own pip configuration (mirrors, find-links)
# decides where torch comes from. The last step touches .venv/.ready, which is what `make` looks at.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv ready=.venv/.ready

say() { echo "set-up: $*"; }
die() { echo "set-up: $*" >&2; exit 1; }

recent_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON: no such program; give one that is Python 3.11 or newer"
        recent_enough "$PYTHON" || die "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1 | sed -n 1p); Lastbatch needs Python 3.11 or newer"
        return
    fi
    for PYTHON in python3 python3.14 python3.13 python3.12 python3.11; do
        if recent_enough "$PYTHON"; then return; fi
    done
    die "no Python 3.11 or newer found (python3 is $(python3 --version 2>&1 || true)); install one, or name it: make setup PYTHON=/path/to/python3.11"
}

is_ready() { [[ -e $ready && ! pyproject.toml -nt $ready && ! constraints.txt -nt $ready ]]; }

# The lock is on this script itself, so that nothing is left behind: a second `make` waits here and finds the work done.
exec 9<"tools/setup.sh"
if ! flock --nonblock 9; then
    say "another set-up is at work in this checkout; waiting for it"
    flock --timeout 3600 9 || die "the other set-up has not ended in an hour"
    if is_ready; then exit 0; fi
fi

find_python
say "$("$PYTHON" --version) ($(command -v "$PYTHON"))"
tools/system_packages.sh build "$PYTHON" 9<&- || say "going on without them; when they are there, run: make -B setup"

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    [[ ! -e $venv ]] || say "$venv is not a virtual environment with pip; making it anew"
    "$PYTHON" -m venv --clear "$venv" || die "python -m venv failed: install the package $("$PYTHON" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])') and run make again"
fi
quiet=()
[[ -t 1 ]] || quiet=(--quiet) # a terminal sees pip's progress, a log only what went wrong
pip() { timeout 3000 "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

say "installing the pinned dependencies (about 2.5 GB in $venv, some minutes the first time)"
pip install "${quiet[@]}" --constraint constraints.txt --editable '.[dev]' || die "pip could not install the dependencies; its reason is above. Run make again after mending it."

if pkg-config --exists libsystemd 2>/dev/null; then
    pip install "${quiet[@]}" --constraint constraints.txt systemd-python ||
        say "systemd-python did not build (above); the journal is read through journalctl instead"
else
    say "libsystemd's headers are not here: no systemd-python; the journal is read through journalctl instead"
fi

touch "$ready"
say "done"
