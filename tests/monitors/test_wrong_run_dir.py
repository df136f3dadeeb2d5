"""A monitor of the bundled engine whose fleet file names the wrong run directory: it is blind for the best evidence, not for a wedge."""

from __future__ import annotations

from pathlib import Path

from monitors import fleet
from monitors.judge.progress import Limits, Memory, State, advance
from monitors.lookout import Lookout
from tests.monitors.cluster import until, web

PAGE = "lastbatch:num_running_reqs 2\nlastbatch:num_queue_reqs 0\nlastbatch:generation_tokens_total 5\nlastbatch:prompt_tokens_total 9\n"


def test_a_wedge_is_seen_by_the_counters_where_no_black_box_is_to_be_found(tmp_path: Path) -> None:
    now = [1000.0]
    with web({"/metrics": (200, PAGE), "/health": (200, "")}) as server:
        text = f'[deployment.d]\nengine = "lastbatch"\napi = "{server.url}"\nservice = "embedded"\n[[deployment.d.node]]\nname = "a"\n'
        text += f'[[deployment.d.node.service]]\nunit = "d"\nranks = [0]\nlog = "{tmp_path}/no.log"\nrun_dir = "{tmp_path}/wrong"\n'
        lookout, memory = Lookout(fleet.parse(text, "fleet.toml").one(), clock=lambda: now[0]), Memory()
        states: list[State] = []

        def turned() -> bool:
            nonlocal memory
            now[0] += 0.5
            look = lookout.look(quiet_s=memory.quiet_s)
            memory, judgement = advance(memory, look.sample, Limits(4.0))
            states.append(judgement.state)
            assert judgement.state is not State.stalled or any("no folder of black boxes" in gap for gap in look.gaps)
            return judgement.state is State.stalled

        try:
            until(turned, f"a stall; so far {states}")
        finally:
            lookout.close()
        assert states[0] is State.unknown and now[0] > 1020
