"""A commit of a unit file, and the way back, killed before each single command of theirs: whoever comes next ends on one
side, the drop-in and the unit file together. Real shell on real files; ``systemctl`` is a stand-in that does nothing (the
same with a real one is in ``test_unit_file_contract.py``)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from monitors.remote import Done
from opsctl.service import deadman, dropin, fragment
from opsctl.service.manager import Change, Override, ServiceError, UnitFile
from opsctl.service.systemd import SystemdService

OLD, NEW = "[Service]\nExecStart=/bin/old\n", "[Service]\nExecStart=/bin/new\n"
STEPS = ("cat", "mv", "rm", "sync", "cmp", "mkdir", "ln", "date")
STEP = '#!/bin/sh\nread -r n <"$CUT/at"; n=$((n - 1)); echo $n >"$CUT/at"; [ $n -ne 0 ] || {{ kill -9 $PPID; exit; }}\nexec {real} "$@"\n'


class Here:
    """A node that is this machine, with a user's folders of its own. ``cut``: before which of the next commands it dies."""

    name = "here"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("bin", "config", "run", "state"):
            (folder / name).mkdir(parents=True)
        for step in STEPS:
            self._program(step, STEP.format(real=shutil.which(step)))
        self._program("systemctl", '#!/bin/sh\necho "$@" >>"$CUT/told"\n[ "$2" != is-active ] || echo active\n')
        self._program("sleep", "#!/bin/sh\nexit 0\n")
        self.env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "CUT": str(folder), "XDG_CONFIG_HOME": f"{folder}/config",
                    "XDG_RUNTIME_DIR": f"{folder}/run", "XDG_STATE_HOME": f"{folder}/state"}  # fmt: skip
        self.cut(0)

    def _program(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(text)
        (self.folder / "bin" / name).chmod(0o755)

    def cut(self, at: int) -> None:
        (self.folder / "at").write_text(f"{at or 1 << 30}\n")

    def run(self, command: Sequence[str], *, deadline_s: float, stdin: bytes = b"") -> Done:
        done = subprocess.run(command, env=self.env, input=stdin, capture_output=True, timeout=deadline_s, check=False)
        return Done(done.returncode, done.stdout, done.stderr.decode(), 0.0)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.node = Here(folder)
        self.service = SystemdService(self.node, "u.service", user=True)
        self.own = folder / "config/systemd/user/u.service"
        self.own.parent.mkdir(parents=True)
        self.own.write_text(OLD)
        unit = UnitFile(fragment.name(NEW, "u.service"), fragment.name(OLD, "u.service"))
        self.made = Override(("/bin/new", "--more"), {"A": "b"}, unit=unit)
        self.service.keep_file(unit.name, NEW.encode())

    def lay(self) -> None:
        assert self.made.unit is not None
        self.service._fragment.lay(self.made.unit)
        self.service.put(str(Path(self.service.trial_path()).parent), dropin.TRIAL, dropin.render(self.made).encode())

    def power_off(self) -> None:
        shutil.rmtree(self.node.folder / "run")
        (self.node.folder / "run").mkdir()

    def side(self) -> str:
        text, change = self.own.read_text(), self.service.read_change()
        if text == NEW and change == Change(self.made):
            return "new"
        return "old" if text == OLD and change == Change() else f"{text} {change}"


def test_one_unit_file_after_another_is_put_there_and_taken_back_step_by_step(tmp_path: Path) -> None:
    bench, third = Bench(tmp_path / "b"), "[Service]\nExecStart=/bin/third\n"
    bench.lay()
    bench.service.commit_trial()
    after = Override(("/bin/third",), {}, unit=UnitFile(fragment.name(third, "u.service"), fragment.name(NEW, "u.service")))
    bench.service.keep_file(fragment.name(third, "u.service"), third.encode())
    bench.service.restore(after)  # decided elsewhere, and this node lost its trial
    assert bench.own.read_text() == third and bench.service.read_change() == Change(after)
    bench.service.restore(bench.made)
    assert bench.side() == "new"
    bench.service.restore(None)
    assert bench.side() == "old"


def commit(bench: Bench) -> None:
    bench.lay()
    bench.service.commit_trial()


def back(bench: Bench) -> None:
    bench.service.restore(None)


def forward(bench: Bench) -> None:
    bench.service.restore(bench.made)


@pytest.mark.slow  # a quarter of a minute of shell
@pytest.mark.parametrize("power", [True, False])
@pytest.mark.parametrize(("before", "act"), [("old", commit), ("new", back), ("old", forward)])
def test_whoever_comes_after_a_cut_ends_on_one_side(tmp_path: Path, before: str, act: Callable[[Bench], None], power: bool) -> None:
    cuts = 0
    for at in range(1, 60):
        bench = Bench(tmp_path / str(at))
        if act is not commit:
            bench.lay()
            bench.service.commit_trial()
        if act is forward:
            bench.service.restore(None)
        assert bench.side() == before
        bench.node.cut(at)
        try:
            act(bench)
            break
        except ServiceError:
            cuts += 1
        bench.node.cut(0)
        if power:
            bench.power_off()
        if not power and bench.service.read_change().trial is not None and at % 2:
            bench.service.commit_trial()
            assert bench.side() == "new", at
        for end, want in ((forward, "new"), (back, "old")) if at % 2 else ((back, "old"), (forward, "new")):
            end(bench)
            assert bench.side() == want, (at, want)
    assert cuts >= 5


@pytest.mark.slow
@pytest.mark.parametrize("decided", ["commit", "revert"])
def test_a_dead_man_that_comes_back_does_the_rest_of_its_work(tmp_path: Path, decided: str) -> None:
    cuts = 0
    for at in range(1, 60):
        bench = Bench(tmp_path / str(at))
        bench.lay()
        folder = tmp_path / str(at) / "run/opsctl/u.service"
        folder.mkdir(parents=True)
        for name, text in (("lease", "t 0\n"), ("deadman.sh", deadman.SCRIPT), ("touched-t", ""), (f"wish-{decided}", decided),
                           ("page.sh", 'echo "$4" >>"$1/paged"\n'), ("page.urls", "")):  # fmt: skip
            (folder / name).write_text(text)
        if decided == "commit":
            (folder / "decision-t").write_text("commit")
        own = [str(folder), "t", "u.service", bench.service.trial_path(), bench.service.committed_file(None)[0], "--user"]

        def run(own: list[str] = own, bench: Bench = bench) -> int:
            return bench.node.run(["sh", f"{own[0]}/deadman.sh", *own], deadline_s=20.0).code

        bench.node.cut(at)
        code = run()
        if int((bench.node.folder / "at").read_text()) > 0:
            break
        cuts += 1
        bench.node.cut(0)
        assert code == 0 or run() == 0  # what systemd starts again after a failure
        assert bench.side() == {"commit": "new", "revert": "old"}[decided], at
        assert (folder / "paged").exists() and not (folder / "lease").exists()
        told = (tmp_path / str(at) / "told").read_text()
        assert decided == "commit" or "--no-block start u.service" in told, (at, told)
    assert cuts >= 5
