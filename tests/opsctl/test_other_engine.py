"""A rollout of a server that tells what SGLang tells: counters instead of request lines, settings instead of digests."""

from __future__ import annotations

from collections.abc import Callable

from tests.opsctl.site import Site


def test_a_good_change_is_proven_by_counters_and_settings_and_a_setting_that_is_not_as_planned_is_reverted(
    make_site: Callable[..., Site],
) -> None:
    site = make_site(engine="sglang", args=["--speaks", "sglang"])
    ran = site.apply("--set", "page-size=32")
    assert ran.code == 0, ran.err
    evidence = {check["name"]: check["evidence"] for check in ran.data["checks"]}
    assert {check["outcome"] for check in ran.data["checks"]} == {"passed"}
    assert "the server's own settings agree" in evidence["ranks"] and "no alarm of the hang monitor" in evidence["steady"]
    ran = site.apply("--set", "grammar-backend=none", "--set", "hides=grammar_backend")
    assert ran.code == 3, ran.err
    failed = ran.data["checks"][-1]
    assert (failed["name"], failed["outcome"]) == ("ranks", "failed")
    assert "--grammar-backend is planned as none and the server has 'another'" in failed["evidence"]
