"""What is said of a flag that `serve` does not have: the one that was meant, or what does the same here. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

_GRAPHS = "there are no CUDA graphs here, leave it out"
_REPLICA = "a server is one replica; start several and put a router in front"
_KERNELS = "kernels are chosen by the device, and /server_info says which run; leave it out"
_STORED = "weights are served as they are stored, or as --dtype says"
_ON = "that is always on, leave it out"

ELSEWHERE: Mapping[str, str] = {
    "--api-key": "--api-key-file or LASTBATCH_API_KEY, so that no list of processes shows the key",
    "--admin-api-key": "--admin-key-file or LASTBATCH_ADMIN_KEY, so that no list of processes shows the key",
    "--attention-backend": _KERNELS,
    "--cpu-offload-gb": "a model must fit into its device",
    "--cuda-graph-bs": _GRAPHS,
    "--cuda-graph-max-bs": _GRAPHS,
    "--data-parallel-size": _REPLICA,
    "--disable-cuda-graph": _GRAPHS,
    "--dp": _REPLICA,
    "--dp-size": _REPLICA,
    "--enable-auto-tool-choice": "--tool-call-parser says how calls are read, and they are by default",
    "--enable-chunked-prefill": "on by default; --chunked-prefill-size says in which pieces",
    "--enable-metrics": _ON,
    "--enable-prefix-caching": "on by default; --disable-radix-cache turns it off",
    "--enforce-eager": _GRAPHS,
    "--gpu-memory-utilization": "--mem-fraction-static means the same",
    "--guided-decoding-backend": "--grammar-backend means the same",
    "--kv-cache-dtype": "keys and values have the type of --dtype",
    "--log-requests": _ON,
    "--max-model-len": "--context-length means the same",
    "--max-num-batched-tokens": "--chunked-prefill-size is what bounds a prefill step",
    "--max-num-seqs": "--max-running-requests means the same",
    "--quantization": _STORED,
    "--sampling-backend": _KERNELS,
    "--schedule-policy": "requests are taken in the order they come",
    "--seed": "--random-seed means the same",
    "--tokenizer": "the tokenizer is that of the model's folder",
    "--tokenizer-path": "the tokenizer is that of the model's folder",
    "--trust-remote-code": "no code of a model's folder is ever run, leave it out",
}
"""Flags of SGLang and vLLM that people bring along."""


def refusal(left: Sequence[str], names: Iterable[str]) -> str:
    """One line for the arguments that no flag took. ``names``: every flag there is."""
    flags = [word.partition("=")[0] for word in left if word.startswith("-")]
    if not flags:
        return f"{left[0]!r} stands alone: `serve` takes flags and their values, see `lastbatch serve --help`"
    known = sorted(names)
    return "; ".join(dict.fromkeys(_of(flag, known) for flag in flags))


def _of(flag: str, known: Sequence[str]) -> str:
    said = f"{flag} is not a flag of this engine"
    if hint := ELSEWHERE.get(flag):
        return f"{said}: {hint}"
    near = difflib.get_close_matches(flag, known, n=1)
    return f"{said}; did you mean {near[0]}?" if near else f"{said}; `lastbatch serve --help` lists them"
