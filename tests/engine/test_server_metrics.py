"""Every metric of the table is served, with its name, kind and labels, and nothing else is; and the values are true."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.blackbox import COUNTERS, Phase
from engine.server.metrics import COUNTED, METRICS, OF_EVERY_RANK, STATES
from tests.engine.api_process import Api, api_process, write_box

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_process(tmp_path_factory.mktemp("api"), "--tp", "2", "--page-size", "16") as api:
        box = write_box(api.run_directory, 1, api.settings)
        box = write_box(api.run_directory, 0, api.settings)
        box.counters.update(dict(zip(COUNTERS, range(100, 100 + len(COUNTERS)), strict=True)))
        box.counters.update(
            pages_total=100, pages_free=40, pages_cached=35, drafted_tokens=50, accepted_tokens=20, prompt_tokens=200, cached_tokens=50
        )
        box.enter(Phase.schedule)
        box.enter(Phase.wait_device)
        box.beat(step=7, running=3, waiting=2, held=5)
        box.collective_enqueued(1, 12, 64)
        box.publish()
        yield api


def scrape(api: Api) -> Samples:
    text = api.client.get("/metrics").text
    return {(s.name, frozenset(s.labels.items())): s.value for family in text_string_to_metric_families(text) for s in family.samples}


def test_what_is_served_is_what_the_table_says(api: Api) -> None:
    api.chat()
    api.chat(frobnicate=1)
    samples = scrape(api)
    suffixes = ("_bucket", "_sum", "_count")
    expected = {metric.name: metric for metric in METRICS}
    histograms = {metric.name for metric in METRICS if metric.kind == "histogram"}
    seen: dict[str, set[frozenset[str]]] = {}
    for name, labels in samples:
        base = next((name.removesuffix(s) for s in suffixes if name.endswith(s) and name.removesuffix(s) in histograms), name)
        seen.setdefault(base, set()).add(frozenset(key for key, _ in labels) - ({"le"} if base in histograms else set()))
    assert set(seen) == set(expected)
    for name, labels_seen in seen.items():
        assert labels_seen == {frozenset(expected[name].labels)}, name
    assert all(metric.name.startswith("lastbatch:") and metric.help for metric in METRICS)
    assert all(metric.name.endswith("_total") for metric in METRICS if metric.kind == "counter")


def test_the_table_is_pinned() -> None:
    names = {metric.name.removeprefix("lastbatch:") for metric in METRICS}
    assert {
        "num_running_reqs", "num_queue_reqs", "token_usage", "gen_throughput", "generation_tokens_total", "prompt_tokens_total",
        "cache_hit_rate", "phase_seconds_total", "phase_calls_total", "phase_rolling_max_seconds", "rank_useful_tokens_total",
        "rank_executed_tokens_total", "rank_pages_free", "http_requests_total", "refused_requests_total", "disconnects_total",
        "parse_failures_total", "in_flight_requests", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_duration_seconds", "rank_up", "rank_record_age_seconds",
    } <= names  # fmt: skip
    assert len(names) == len(METRICS)
    assert set(COUNTERS) > STATES and set(COUNTERS) > OF_EVERY_RANK


def test_the_boxes_values_are_shown(api: Api) -> None:
    samples = scrape(api)
    rank0 = frozenset({("rank", "0")})
    model = frozenset({("rank", "0"), ("model_name", "tiny")})
    assert samples["lastbatch:rank_step", rank0] == 7
    assert samples["lastbatch:rank_held_requests", rank0] == 5
    assert samples["lastbatch:rank_requests_received_total", rank0] == 100
    assert samples["lastbatch:rank_pages_free", rank0] == 40
    assert samples["lastbatch:rank_collectives_enqueued", rank0] == 12
    assert samples["lastbatch:rank_collectives_completed", rank0] == 0
    assert samples["lastbatch:num_running_reqs", model] == 3
    assert samples["lastbatch:num_queue_reqs", model] == 2
    assert samples["lastbatch:token_usage", model] == 0.25
    assert samples["lastbatch:num_used_tokens", model] == 25 * 16
    assert samples["lastbatch:spec_accept_rate", model] == 0.4
    assert samples["lastbatch:cache_hit_rate", model] == 0.25
    assert samples["lastbatch:phase_calls_total", frozenset({("rank", "0"), ("phase", "schedule")})] == 1
    assert samples["lastbatch:rank_phase", frozenset({("rank", "0"), ("phase", "wait_device")})] == 1
    assert samples["lastbatch:rank_phase", frozenset({("rank", "0"), ("phase", "idle")})] == 0
    rank1 = frozenset({("rank", "1")})
    assert samples["lastbatch:rank_up", rank1] == 1
    counted = {name for name, labels in samples if labels == rank1} & {metric.name for metric in COUNTED}
    own = {f"lastbatch:rank_{name}_total" for name in OF_EVERY_RANK - STATES} | {"lastbatch:rank_running"}
    assert counted == own, "what rank 0 alone knows is not there as 0"


def test_a_rank_without_a_box_is_down_and_its_numbers_are_gone(api: Api) -> None:
    box = api.run_directory / "rank-1.box"
    box.rename(box.with_suffix(".away"))
    try:
        samples = scrape(api)
        assert samples["lastbatch:rank_up", frozenset({("rank", "1")})] == 0
        assert not [name for name, labels in samples if ("rank", "1") in labels and name != "lastbatch:rank_up"]
    finally:
        box.with_suffix(".away").rename(box)


def test_requests_are_counted_by_route_and_status_and_refusals_by_reason(api: Api) -> None:
    before = scrape(api)
    api.scheduler.script = api.scheduler.says("a b c")
    api.chat()
    api.chat(frobnicate=1)
    api.client.get("/nowhere/at/all")
    after = scrape(api)

    def grew(name: str, **labels: str) -> float:
        key = (f"lastbatch:{name}", frozenset(labels.items()))
        return after[key] - before.get(key, 0)

    assert grew("http_requests_total", route="/v1/chat/completions", status="200") == 1
    assert grew("http_requests_total", route="/v1/chat/completions", status="400") == 1
    assert grew("http_requests_total", route="other", status="404") == 1
    assert grew("refused_requests_total", reason="unknown_parameter") == 1
    assert grew("time_to_first_token_seconds_count") == 1
    assert grew("inter_token_latency_seconds_count") == len(api.scheduler.tokenizer.encode("a b c"))
    assert after["lastbatch:gen_throughput", frozenset()] > 0
    assert after["lastbatch:ready", frozenset()] == 1


def test_a_health_probe_does_not_disturb_the_latencies(api: Api) -> None:
    before = scrape(api)["lastbatch:time_to_first_token_seconds_count", frozenset()]
    assert api.client.get("/health_generate").status_code == 200
    assert scrape(api)["lastbatch:time_to_first_token_seconds_count", frozenset()] == before
