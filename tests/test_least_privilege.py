"""What docs/least-privilege.md tells people to copy is read by the programs that it is for, where they are here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs/least-privilege.md").read_text()
ASKS = [  # action, unit, verb, user, whether it is let through
    ("org.freedesktop.systemd1.manage-units", "lastbatch@flash.service", "start", "opsctl", True),
    ("org.freedesktop.systemd1.manage-units", "lastbatch@flash.service", "reset-failed", "opsctl", True),
    ("org.freedesktop.systemd1.manage-units", "lastbatch@flash.service", "kill", "opsctl", False),
    ("org.freedesktop.systemd1.manage-units", "ssh.service", "stop", "opsctl", False),
    ("org.freedesktop.systemd1.manage-units", "lastbatch@flash.service", "start", "somebody", False),
    ("org.freedesktop.systemd1.manage-unit-files", "lastbatch@flash.service", "start", "opsctl", False),
]


def block(first: str) -> str:
    """The indented block in which a line begins so."""
    found = re.search(rf"^    {re.escape(first)}.*\n(?:    .*\n)*", PAGE, re.MULTILINE)
    assert found is not None, first
    return re.sub(r"^    ", "", found[0], flags=re.MULTILINE)


def ran(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.skipif(shutil.which("visudo") is None, reason="no visudo here")
def test_sudo_reads_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "opsctl"
    path.write_text(block("Defaults!"))
    path.chmod(0o440)
    ran("visudo", "-c", "-f", str(path))


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_polkits_rule_lets_one_user_start_and_stop_one_unit_and_nothing_more() -> None:
    """The rule itself in another JavaScript than polkit's own."""
    rule = block("// /etc/polkit-1")
    program = f"""
        let rule; const polkit = {{Result: {{YES: "yes"}}, addRule: one => {{ rule = one; }}}};
        {rule}
        console.log(JSON.stringify({json.dumps(ASKS)}.map(([id, unit, verb, user]) =>
            rule({{id, lookup: key => ({{unit, verb}})[key]}}, {{user}}) === polkit.Result.YES)));
    """
    assert json.loads(ran("node", "-e", program)) == [one[-1] for one in ASKS]


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")
def test_ssh_reads_the_key_with_its_forced_command(tmp_path: Path) -> None:
    ran("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "id"))
    kind, key, *_ = (tmp_path / "id.pub").read_text().split()
    line = block('command="/usr/local/lib/opsctl-gate"')
    assert f"{kind} AAAA..." in line
    for options in (line.partition(f" {kind}")[0], 'command="sudo /usr/local/lib/opsctl-gate",restrict'):
        assert options in PAGE
        (tmp_path / "authorized_keys").write_text(f"{options} {kind} {key} operator\n")
        assert "operator (ED25519)" in ran("ssh-keygen", "-l", "-f", str(tmp_path / "authorized_keys"))
