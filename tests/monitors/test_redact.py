"""What is taken out of texts before they are kept, and what the ledger says of it."""

from __future__ import annotations

import pytest

from monitors.capture.redact import Policy, redact


@pytest.mark.parametrize(
    ("line", "rule", "secret"),
    [
        ("Authorization: Bearer abcdefghijkl", "bearer", "abcdefghijkl"),
        ("Authorization: Basic dXNlcjpwYXNz", "basic-auth", "dXNlcjpwYXNz"),
        ("got key sk-abcdefghijklmnop", "api-key", "sk-abcdefghijklmnop"),
        ("token xoxb-1234567890-abcdef", "api-key", "xoxb-1234567890-abcdef"),
        ("--api-key hunter2-long", "named-secret", "hunter2-long"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.sig_x", "jwt", "eyJzdWIiOiIx"),
        ("GET /x?token=abcd1234 HTTP/1.1", "url-token", "abcd1234"),
        ("cookie: session=abcdef", "cookie", "session=abcdef"),
        ("mail to jane.doe@example.org now", "e-mail", "jane.doe@example.org"),
        ("http://user:pa55word@host/", "url-password", "pa55word"),
        ('prompt: "tell me a secret"', "prompt", "tell me a secret"),
        ("prompt_token_ids: [1, 2, 3]", "token-ids", "1, 2, 3"),
    ],
)
def test_a_secret_is_taken_out_and_the_ledger_names_the_rule(line: str, rule: str, secret: str) -> None:
    clean, ledger = redact(f"before\n{line}\nafter", "server.log")
    assert secret not in clean and clean.startswith("before\n") and clean.endswith("\nafter")
    assert (ledger[0].artefact, ledger[0].line) == ("server.log", 2) and rule in {entry.rule for entry in ledger}


def test_a_private_key_is_taken_out_over_all_its_lines() -> None:
    text = "a\n-----BEGIN RSA PRIVATE KEY-----\nMIIabc\nMIIdef\n-----END RSA PRIVATE KEY-----\nb"
    clean, ledger = redact(text, "x")
    assert "MII" not in clean and clean.split("\n")[0] == "a" and clean.split("\n")[-1] == "b" and len(clean.split("\n")) == 6
    assert {entry.rule for entry in ledger} == {"private-key"}


def test_whoever_is_paged_is_not_named_by_the_fleet_file_of_a_bundle() -> None:
    text = 'api = "http://10.0.0.1:30000"\nurls = [\n  "slack://TokenA/TokenB",\n]\nurl = "https://hc.example/uuid-1"\n'
    clean, _ = redact(text, "fleet.toml")
    assert 'api = "http://10.0.0.1:30000"' in clean and "slack://[redacted:page-url]" in clean
    assert "TokenA" not in clean and "uuid-1" not in clean


def test_prompts_stay_only_when_asked_for_and_addresses_go_only_when_asked_for() -> None:
    line = 'from 10.1.2.3 and fe80::1ff:fe23:4567:890a at 12:30:45: prompt="hello there" password=secret99'
    default, _ = redact(line, "x")
    assert "10.1.2.3" in default and "hello" not in default and "secret99" not in default
    kept, _ = redact(line, "x", Policy(include_prompts=True, addresses=True))
    assert "hello there" in kept and "secret99" not in kept
    assert "10.1.2.3" not in kept and "fe80::" not in kept and "12:30:45" in kept


@pytest.mark.parametrize(
    "line",
    [
        "Decode batch, #running-req: 1, #token: 119000, token usage: 0.01, gen throughput (token/s): 91.28, #queue-req: 0",
        "[2026-11-30 00:14:29] req rid=39ebeb72 caller=ca9b shape=text prompt_sha=48b57957 status=200 in=160 out=48 finish=length",
        'vllm 0.9.1.post2 File "/usr/lib/python3.11/x.py", line 10, in f',
    ],
)
def test_the_lines_that_a_judge_reads_stay_as_they_are(line: str) -> None:
    assert redact(line, "server.log", Policy(addresses=True)) == (line, [])
