"""Two changes of a real vLLM server by ``opsctl rollout``: ``python -m tests.slow.vllm_rollout --vllm VENV/bin/python``.

Not part of the suite: vLLM is a peer, not a dependency (``vllm_monitor.py`` says how it is installed). It runs as a plain
systemd unit on a real node, with the operator at the other end of ssh and a client that never stops asking.

First what runs is verified, so that both changes may take the recorded baseline (``--incident``: on a CPU an answer takes
seconds). *good*: ``--max-num-seqs 8``, which must be committed. *bad*: ``--max-model-len 1000000``, a flag that vLLM knows with a value
that it refuses after half a minute of importing, at which it exits; it must be reverted, proven and paged.
Prints the transcript; exit status 1 when an end is not as it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine import default_model
from tests.e2e import nodes
from tests.opsctl.site import ROOT, wait_until
from tests.slow.prove_rollout import gaps

PREFIX, UNIT, URL = "lbvllm", "vllm.service", "http://10.77.0.11:8000"
PULSE = Path(__file__).parent / "prove_rollout" / "pulse.py"
BOOT_S = 240.0
UNIT_FILE = """[Service]
ExecStart={python} -m vllm.entrypoints.openai.api_server --model {model} --host 0.0.0.0 --port 8000 --max-model-len 1024 --enforce-eager
Environment=HOME={home} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=1
Environment=VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo
KillMode=mixed
TimeoutStopSec=20
Restart=on-failure
RestartSec=2
"""
FLEET = """[deployment.peer]
engine = "vllm"
api = "{url}"
service = "systemd"
stable_s = 10
[[deployment.peer.node]]
name = "n1"
ssh = "-F {folder}/ssh_config n1"
python = "{python}"
[[deployment.peer.node.service]]
unit = "{unit}"
ranks = [0]
[page]
urls = ["json://10.77.0.1:9000/"]
"""


class Failed(AssertionError):
    """What was to be shown was not seen."""


class Show:
    """The node, the client, the pager, and what was said so far."""

    def __init__(self, folder: Path, python: str, undo: contextlib.ExitStack) -> None:
        self.folder, self.lines, self.began = folder, list[str](), time.monotonic()
        self._hidden = {str(Path(python).parents[1]): "VENV", sys.executable: "python", str(ROOT): "LASTBATCH", str(folder): "FOLDER",
                        str(Path.home()): "~"}  # fmt: skip
        self._here = ("ip", "netns", "exec", f"{PREFIX}-ctl")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "id"], check=True)
        undo.callback(nodes.fabric, "down", PREFIX, 1)
        nodes.fabric("up", PREFIX, 1)
        undo.callback(nodes.SystemdNode(PREFIX, 0, folder / "nodes").stop)
        self.node = nodes.boot(PREFIX, folder / "nodes", netns=f"{PREFIX}-1", hook="sshd.sh", env={"NODES_KEY": str(folder / "id")})
        (folder / "ssh_config").write_text(
            f"Host n1\n  HostName 10.77.0.11\n  User root\n  IdentityFile {folder / 'id'}\n  IdentitiesOnly yes\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        (folder / "fleet.toml").write_text(FLEET.format(url=URL, folder=folder, python=sys.executable, unit=UNIT))
        (self.node.root / "etc/systemd/system" / UNIT).write_text(
            UNIT_FILE.format(python=python, model=default_model.path(), home=Path.home())
        )
        self.pages_file, self.beats_file = folder / "pages", folder / "beats"
        for file in (self.pages_file, self.beats_file):
            file.touch()
        for argv in ((ROOT / "tests/opsctl/page_sink.py", "10.77.0.1", "9000", self.pages_file), (PULSE, URL, self.beats_file, "2", "20")):
            process = subprocess.Popen([*self._here, sys.executable, *argv])
            undo.callback(process.wait, 10)
            undo.callback(process.kill)

    def tell(self, text: str) -> None:
        for hidden, name in self._hidden.items():
            text = text.replace(hidden, name)
        line = f"{time.monotonic() - self.began:6.1f} s  {text}" if text else ""
        self.lines.append(line)
        print(line, flush=True)

    def start(self) -> float:
        """Seconds until the client is served."""
        begun = time.monotonic()
        for words in (["daemon-reload"], ["start", "--no-block", UNIT]):
            self.node.run(["systemctl", *words])
        wait_until(lambda: self.served(begun), BOOT_S, "vLLM to serve")
        return time.monotonic() - begun

    def served(self, since: float) -> bool:
        return any(good for _, good in gaps.beats(self.beats_file.read_text(), since))

    def opsctl(self, *words: str) -> int:
        """Run as a person would; everything that it says goes to the transcript as it comes."""
        self.tell("")
        self.tell(f"$ opsctl {' '.join(words)}")
        env = {"PATH": os.environ["PATH"], "HOME": str(Path.home()), "XDG_STATE_HOME": str(self.folder / "state"), "NO_COLOR": "1"}
        argv = [*self._here, sys.executable, "-m", "opsctl.cli", *words, "--fleet", str(self.folder / "fleet.toml")]
        process = subprocess.Popen(argv, cwd=ROOT, env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT)  # fmt: skip
        try:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    self.tell(line.rstrip())
            self.tell(f"exit status {process.wait()}")
        finally:
            process.kill()
            process.wait()
        return process.returncode

    def argv(self) -> list[str]:
        pid = self.node.run(["systemctl", "show", "-P", "MainPID", UNIT]).out.decode().strip()
        return self.node.run(["cat", f"/proc/{pid}/cmdline"]).out.decode().split("\0")[:-1] if pid != "0" else []

    def pages(self) -> list[str]:
        return [json.loads(line)["title"] for line in self.pages_file.read_text().splitlines()]


def verify(show: Show) -> None:
    if code := show.opsctl("rollout", "verify", "--stable-s", "10"):
        raise Failed(f"verify: exit status {code}")


def change(show: Show, flag: str, value: str, boot_s: float, *, code: int, page: bool) -> None:
    """One rollout, and how it ended as the node, the client and the pager saw it."""
    pages, since = len(show.pages()), time.monotonic()
    why = ("--reason", "shown on a peer")
    ended = show.opsctl("rollout", "apply", "--yes", "--incident", "--stable-s", "10", "--set", f"{flag}={value}", *why)
    now = time.monotonic()
    wait_until(lambda: show.served(now), 60, "the client to be served")
    without = gaps.without_service(gaps.beats(show.beats_file.read_text(), since))
    runs, paged = show.argv(), show.pages()[pages:]
    new = f"--{flag}" in runs and runs[runs.index(f"--{flag}") + 1] == value
    show.tell(f"the node runs the {'new' if new else 'old'} arguments, the client is served, pages: {paged or 'none'}, "
              f"without service {without:.0f} s = {without / boot_s:.1f} boots")  # fmt: skip
    if ended != code or new != (code == 0) or bool(paged) != page:
        raise Failed(f"--{flag}={value}: exit status {ended}, {code} was due; {'new' if new else 'old'} runs; pages {paged}")


def good(show: Show, boot_s: float) -> None:
    change(show, "max-num-seqs", "8", boot_s, code=0, page=False)


def bad(show: Show, boot_s: float) -> None:
    change(show, "max-model-len", "1000000", boot_s, code=3, page=True)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slow.vllm_rollout", description=__doc__)
    parser.add_argument("--vllm", required=True, help="the interpreter that vLLM is installed for")
    asked = parser.parse_args(words)
    if why := nodes.missing(ssh=True):
        print(f"vllm_rollout: {why}", file=sys.stderr)
        return 7
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the node is taken down then, too
    with tempfile.TemporaryDirectory(prefix="vllm-rollout-") as name, contextlib.ExitStack() as undo:
        show = Show(Path(name), asked.vllm, undo)
        try:
            boot_s = show.start()
            show.tell(f"vLLM serves {boot_s:.0f} s after its unit was started")
            verify(show)
            good(show, boot_s)
            bad(show, boot_s)
        except AssertionError as error:
            log = show.node.run(["journalctl", "-u", UNIT, "-o", "cat", "--no-pager", "-n", "60"]).out.decode(errors="replace")
            print(f"FAILED: {error}\nthe journal of the unit ends:\n{log}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
