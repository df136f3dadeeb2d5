"""What a server takes from the model's folder: how tokens are drawn by default, and a chat template without tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import ConfigError
from engine.flags import parse
from engine.server.sampling_defaults import SamplingDefaults, read_defaults
from tests.engine.api_process import api_process

PLAIN = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def test_the_models_ways_are_told_at_start_and_hold_for_what_a_request_does_not_set(tmp_path: Path) -> None:
    (tmp_path / "plain.jinja").write_text(PLAIN)
    generation = {"eos_token_id": 2, "do_sample": True, "temperature": 0.2, "top_p": 0.9, "top_k": 20}
    with api_process(tmp_path, "--chat-template", str(tmp_path / "plain.jinja"), generation=generation) as api:
        assert api.log().count("the chat template has no place for tools") == 1
        assert "What a request does not set is the model's: temperature 0.2, top_p 0.9, top_k 20" in api.log()
        assert api.client.get("/server_info").json()["sampling_defaults"]["temperature"] == 0.2

        assert api.chat().status_code == 200
        assert api.chat(temperature=1, top_p=1, top_k=-1, repetition_penalty=1.1).status_code == 200
        drawn = [(s.temperature, s.top_p, s.top_k, s.min_p, s.repetition_penalty) for s in (one.sampling for one in api.scheduler.requests)]
        assert drawn == [(0.2, 0.9, 20, 0.0, 1.0), (1.0, 1.0, 0, 0.0, 1.1)]

        api.scheduler.script = api.scheduler.says('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>')
        answer = api.chat(tools=[CLOCK]).json()["choices"][0]
        assert (answer["finish_reason"], answer["message"]["tool_calls"][0]["function"]["name"]) == ("tool_calls", "clock")
        shown = api.scheduler.tokenizer.decode(api.scheduler.requests[-1].input_ids, skip_special=False)
        assert shown.startswith("<|im_start|>system\nYou may call functions.") and json.dumps(CLOCK) in shown
        assert api.chat(tools=[CLOCK], tool_choice="none").status_code == 200
        assert "clock" not in api.scheduler.tokenizer.decode(api.scheduler.requests[-1].input_ids, skip_special=False)


def test_openais_defaults_can_be_asked_for_and_what_no_request_could_have_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    assert read_defaults(parse([]), tmp_path) == SamplingDefaults()
    path.write_text('{"temperature": 0.6, "top_p": null}')
    assert read_defaults(parse([]), tmp_path) == SamplingDefaults(temperature=0.6)
    assert read_defaults(parse(["--sampling-defaults", "openai"]), tmp_path) == SamplingDefaults()
    for text in ('{"temperature": -1}', '{"top_p": 0}', '{"top_k": "all"}', "[]", "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"generation_config\.json: .*--sampling-defaults openai"):
            read_defaults(parse([]), tmp_path)
