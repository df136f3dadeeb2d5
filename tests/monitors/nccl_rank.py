"""A process that shows of NCCL what a monitor sees of it: the library in its map, a flight recorder behind a pipe that
writes its dump slowly and over an older one, and, on the first rank, RAS on a port.

``python nccl_rank.py RANK PIPE_STEM DUMP_STEM RAS_PORT LIBRARY``; speaks JSON on RAS where the port is even.
"""

import json
import mmap
import os
import pickle
import socket
import sys
import threading
import time
from pathlib import Path

import setproctitle

rank, pipe, target, port, library = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]
lag = rank == 1  # this one has not come to the last collective


def dump() -> bytes:
    last = 40 if lag else 41
    rows = [{"collective_seq_id": n, "profiling_name": "nccl:all_reduce", "state": "completed" if n < last else "started",
             "input_sizes": [[4, 8]], "process_group": ["0", "tp"]} for n in range(1, last + 1)]  # fmt: skip
    return pickle.dumps({"version": "2.4", "entries": rows})


def records() -> None:
    while True:
        with Path(f"{pipe}{rank}.pipe").open("rb") as asked:
            asked.readline()
        data = dump()
        with Path(f"{target}{rank}").open("wb") as out:  # not beside and renamed: over what stands there, in pieces
            for start in range(0, len(data), len(data) // 3 + 1):
                out.write(data[start : start + len(data) // 3 + 1])
                out.flush()
                time.sleep(0.1)


def answer(line: str) -> str:
    if line == "set format json":
        return "OK\n" if port % 2 == 0 else "ERROR unknown command\n"
    ranks = [{"rank": n, "collective_counts": {"AllReduce": 41 - (n == 1)}} for n in range(2)]
    if port % 2 == 0:
        return json.dumps({"communicators": [{"hash": "5d1f", "ranks": ranks}]})
    return ("Errors\n  1 rank has launched up to operation 40\n  1 rank has launched up to operation 41\n"
            "  Rank 1 -- operation 40\n")  # fmt: skip


def ras() -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            link, _ = server.accept()
            with link, link.makefile("r") as lines:
                for line in lines:
                    link.sendall(answer(line.strip().lower()).encode())
                    if line.strip().lower() == "verbose status":
                        break


with Path(library).open("rb") as file:
    loaded = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
os.mkfifo(f"{pipe}{rank}.pipe")
threading.Thread(target=records, daemon=True).start()
if rank == 0:
    threading.Thread(target=ras, daemon=True).start()
setproctitle.setproctitle(f"VLLM::Worker_TP{rank}")  # which covers the environment, as a real rank's title does
print("up", flush=True)
sys.stdin.read()
