"""A small real server that speaks the bundled engine's contract and boots in milliseconds.

``serve ARGS`` takes the engine's own flags (they make the digest, as they do there) and some that make trouble:

    --fail-at-boot       a traceback and exit 1 before it is ready
    --never-ready        it loads for ever
    --crash-after N      it dies at the N-th completion, with a traceback
    --crash-exit N       with this status
    --complain-after N   a traceback in its log at the N-th completion, which is answered all the same
    --crash-sequential   it dies at its first completion when --disable-overlap-schedule is set
    --garbage            healthy, and every answer is one character
    --scrambled          healthy, and every answer is fluent and not the model's
    --text-for WORD      JSON asked for with this word in the prompt is answered in prose
    --no-tools           no tool is ever called
    --no-stream          a stream is cut off before its end
    --most-prompt N      a prompt of more characters is answered 500
    --slow-s S           every answer takes so long
    --speaks sglang      it tells what SGLang tells: its counters and settings, no line of a request, no digest, no box
    --hides FLAG         as SGLang: it runs another value of this flag than it was given
    --deaf               healthy, and no completion is ever answered
    --split-rank N       rank N runs with another configuration
    --no-box N           rank N keeps no black box
    --poison PATH        it creates PATH and dies at boot
    --dies-of PATH       it dies at boot when PATH exists
    --fails-once NAME    it dies at boot when NAME is in its run folder, and takes it away

``config --json -- ARGS`` prints the digest of the arguments. With ``--nnodes 2 --node-rank 1`` it is the second node of
a group: no HTTP, only its ranks' black boxes.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine import blackbox, config, flags

GRAMMAR_OFF = (
    "Grammar-based generation (json_schema, regex, ebnf, structural_tag) is not supported "
    "when the server is launched with --grammar-backend none"
)
INVOCATION = os.environ.get("INVOCATION_ID", "0" * 32)


def troubles(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--fail-at-boot", "--never-ready", "--crash-sequential", "--garbage", "--deaf", "--scrambled",
                 "--no-tools", "--no-stream"):  # fmt: skip
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--crash-after", type=int, default=0)
    parser.add_argument("--complain-after", type=int, default=0)
    parser.add_argument("--crash-exit", type=int, default=1)
    parser.add_argument("--split-rank", type=int, default=-1)
    parser.add_argument("--no-box", type=int, default=-1)
    parser.add_argument("--text-for", default="\0")
    parser.add_argument("--most-prompt", type=int, default=1 << 30)
    parser.add_argument("--slow-s", type=float, default=0.0)
    parser.add_argument("--speaks", default="lastbatch")
    parser.add_argument("--hides", default="")
    parser.add_argument("--poison", default="")
    parser.add_argument("--fails-once", default="")
    parser.add_argument("--dies-of", default="")
    if any(word.startswith("--help") for word in args):
        print(parser.format_help(), *(option.flag for option in flags.options()), sep="\n")
        sys.exit(0)
    return parser.parse_known_args(args)


def notify(text: str) -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(text.encode(), "\0" + address[1:] if address[0] == "@" else address)


class Served:
    """What the handlers share."""

    def __init__(self, settings: config.Settings, trouble: argparse.Namespace) -> None:
        self.settings, self.trouble = settings, trouble
        self.lock = threading.Lock()
        self.completions = 0
        self.tokens = 0

    def complete(self, body: dict[str, Any], rid: str, caller: str) -> tuple[int, dict[str, Any]]:
        trouble = self.trouble
        with self.lock:
            self.completions += 1
            number = self.completions
        if trouble.deaf:
            time.sleep(3600)
        sequential = trouble.crash_sequential and self.settings.scheduler.disable_overlap_schedule
        if sequential or (trouble.crash_after and number >= trouble.crash_after):
            die(trouble.crash_exit)
        if number == trouble.complain_after:
            complain()
        time.sleep(trouble.slow_s)
        prompt = next(m["content"] for m in reversed(body["messages"]) if m["role"] == "user")
        forced = isinstance(body.get("tool_choice"), dict)
        shape = "tool" if body.get("tools") else "json" if "response_format" in body else "text"
        refused = (shape == "json" or forced) and self.settings.grammar.backend == "none"
        status = 400 if refused else 500 if len(prompt) > trouble.most_prompt else 200
        sha = hashlib.sha256(prompt.encode()).hexdigest()[:8]
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        rid = rid or f"r{number}"
        if trouble.speaks == "lastbatch":
            print(
                f"[{now}] req rid={rid} caller={caller} shape={shape} prompt_sha={sha} status={status} in=5 out=7 finish=stop", flush=True
            )
        if refused:
            return 400, {"error": {"message": GRAMMAR_OFF, "type": "invalid_request_error", "param": None, "code": "grammar_disabled"}}
        if status == 500:
            return 500, {"error": {"message": "the prompt does not fit"}}
        with self.lock:
            self.tokens += 12
        message: dict[str, Any] = {"role": "assistant", "content": self.text(prompt, shape)}
        if forced and not trouble.no_tools:
            function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"yes": true}'}
            call = {"id": "c1", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return 200, {
            "id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "model": "contract",
            "system_fingerprint": f"lb-{self.settings.digest[:12]}-{INVOCATION[:8]}" if trouble.speaks == "lastbatch" else None,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12},
        }  # fmt: skip

    def text(self, prompt: str, shape: str) -> str:
        if self.trouble.garbage:
            return "!" * 24
        if shape == "json" and self.trouble.text_for not in prompt:
            return '{"colour": "red"}'
        text = f"One, two, three. I was asked {len(prompt)} characters."
        return text[::-1] if self.trouble.scrambled else text

    def info(self) -> dict[str, Any]:
        if self.trouble.speaks == "sglang":
            flat = {name: value for values in self.settings.declared().values() for name, value in values.items()}
            return {**flat, "port": self.settings.server.port, **({self.trouble.hides: "another"} if self.trouble.hides else {})}
        ranks = [{"rank": rank, "dp": 0, "pp": 0, "tp": rank, "ep": 0, "node": self.settings.node_of(rank), "pid": os.getpid(),
                  "config_digest": self.settings.digest} for rank in range(self.settings.parallel.tp)]  # fmt: skip
        return {"version": "0", "config": self.settings.declared(), "config_digest": self.settings.digest, "invocation_id": INVOCATION,
                "ranks": ranks, "paths": {}}  # fmt: skip


def die(status: int) -> None:
    """As an engine dies whose decode raised: the traceback, then the whole process."""
    complain()
    os._exit(status)


def complain() -> None:
    try:
        raise TypeError("unsupported operand type(s) for +: 'NoneType' and 'int'")
    except TypeError:
        import traceback

        print(traceback.format_exc(), end="", file=sys.stderr, flush=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Served

    def do_GET(self) -> None:
        if self.path == "/health":
            self._json(200, {})
        elif self.path == "/v1/models":
            self._json(200, {"data": [{"id": "contract", "max_model_len": 512}]})
        elif self.path == "/server_info":
            self._json(200, self.served.info())
        elif self.path == "/metrics":
            name, tokens = self.served.trouble.speaks, self.served.tokens
            gauges = f"{name}:num_running_reqs 0\n{name}:num_queue_reqs 0\n" if name != "lastbatch" else ""
            self._text(200, f'{gauges}{name}:generation_tokens_total{{rank="0"}} {tokens}\n')
        else:
            self._json(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sender = self.headers.get("Authorization", "").removeprefix("Bearer ") or self.headers.get("User-Agent", "")
        status, answer = self.served.complete(body, self.headers.get("X-Request-Id", ""), hashlib.sha256(sender.encode()).hexdigest()[:8])
        if status == 200 and body.get("stream"):
            self._stream(answer)
        else:
            self._json(status, answer)

    def _stream(self, answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        pieces = [{"delta": {"content": word}, "finish_reason": None} for word in choice["message"]["content"].split(" ")]
        pieces.append({"delta": {}, "finish_reason": choice["finish_reason"]})
        events = [json.dumps({**answer, "object": "chat.completion.chunk", "choices": [{"index": 0, **piece}]}) for piece in pieces]
        events += [] if self.served.trouble.no_stream else ["[DONE]"]
        self._text(200, "".join(f"data: {event}\n\n" for event in events))

    def _json(self, status: int, body: dict[str, Any]) -> None:
        self._text(status, json.dumps(body))

    def _text(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server's, and no traceback in its log."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def write_boxes(settings: config.Settings, trouble: argparse.Namespace) -> None:
    folder = config.run_directory(settings)
    folder.mkdir(parents=True, exist_ok=True)
    other = dataclasses.replace(settings, scheduler=dataclasses.replace(settings.scheduler, max_running_requests=7))
    for rank in settings.local_ranks:
        if rank != trouble.no_box:
            digest = (other if rank == trouble.split_rank else settings).digest
            header = blackbox.Header(os.getpid(), rank, settings.parallel.tp, digest, INVOCATION, tp=rank, node=settings.parallel.node_rank)
            blackbox.BlackBox(folder / f"rank-{rank}.box", header, settings.declared_json()).close()


def serve(args: list[str]) -> int:
    trouble, rest = troubles(args)
    settings = flags.parse(rest)
    print(f"boot of {INVOCATION}", flush=True)
    if trouble.poison:
        Path(trouble.poison).touch()
    once = Path(os.environ.get("RUNTIME_DIRECTORY", ".")) / trouble.fails_once
    if trouble.fails_once and once.exists():
        once.unlink()
        raise RuntimeError("not this time")
    if trouble.fail_at_boot or trouble.poison or (trouble.dies_of and Path(trouble.dies_of).exists()):
        raise RuntimeError("the weights do not fit")
    if trouble.speaks == "lastbatch":
        write_boxes(settings, trouble)
    if trouble.never_ready:
        time.sleep(3600)
    if settings.parallel.node_rank:
        notify("READY=1")
        time.sleep(3600)
    Handler.served = Served(settings, trouble)
    Server.daemon_threads = True
    with Server((settings.server.host, settings.server.port), Handler) as server:
        notify("READY=1")
        print("The server is fired up and ready to roll!", flush=True)
        server.serve_forever(poll_interval=0.05)
    return 0


def main() -> int:
    command, *args = sys.argv[1:]
    if command == "serve":
        return serve(args)
    _, rest = troubles(args[args.index("--") + 1 :])
    try:
        settings = flags.parse(rest)
    except config.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"settings": settings.declared(), "digest": settings.digest}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
