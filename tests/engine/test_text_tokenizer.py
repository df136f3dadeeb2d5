"""The tokenizer of a folder, and its chat template."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from small_tokenizers import BARRED, byte_fallback, byte_level
from tiny_models import tiny_model

from engine.text.chat_template import TemplateError
from engine.text.tokenizer import Tokenizer, TokenizerError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def with_template(folder: Path, tmp_path: Path, source: str) -> Tokenizer:
    path = tmp_path / "given.jinja"
    path.write_text(source)
    return Tokenizer.load(folder, path, now=lambda: datetime(2031, 5, 17))


def test_text_makes_the_round_trip_and_special_tokens_are_skipped_on_demand(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("<|im_start|>Grüße, 世界\n<|im_end|>")
    assert tokenizer.decode(ids) == "Grüße, 世界\n"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>Grüße, 世界\n<|im_end|>"
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (512, 1, 2)


def test_a_folder_saved_with_truncation_and_padding_still_gives_every_token(folder: Path, tmp_path: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    raw["padding"] = {"strategy": {"Fixed": 4}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
                      "pad_token": "<|endoftext|>"}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a longer text"), skip_special=False) == "a longer text"
    assert len(tokenizer.encode("a")) == 1


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "é 世 {x}: the, 'a' two words"
    data = b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text))
    assert data.decode().removeprefix(" ") == text
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_an_added_token_is_its_own_bytes() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(f"{BARRED}two words")
    assert [tokenizer.token_text(token) for token in ids] == [BARRED, "two words"]


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_conversation_with_tools_renders_as_transformers_renders_it(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": "add", "description": "<sum> & ü", "parameters": {"type": "object"}}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": [1, "ß"]}}}]},
        {"role": "tool", "content": "2"},
    ]
    ours = Tokenizer.load(folder)
    expected = reference.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages, tools) == expected
    assert ours.render_chat(messages, add_generation_prompt=False) == reference.apply_chat_template(messages, tokenize=False)


def test_openai_forms_reach_the_template_as_it_expects_them(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path, "{{ messages[0].content }}|{{ messages[1].content }}|"
                                                "{{ messages[1].tool_calls[0].function.arguments.a }}")  # fmt: skip
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 7}'}}]},
    ]
    assert tokenizer.render_chat(messages) == "one two||7"
    assert messages[1]["content"] is None


def test_the_helpers_of_hugging_face_templates_are_there(folder: Path, tmp_path: Path) -> None:
    source = (
        "{{ strftime_now('%d %b %Y') }} {{ bos_token }} {{ {'b': '<é>', 'a': 1} | tojson }} "
        "{% for n in range(9) %}{% if n == 1 %}{% continue %}{% endif %}{% if n == 3 %}{% break %}{% endif %}{{ n }}{% endfor %}"
        "{% generation %}!{% endgeneration %}{{ colour }}"
    )
    tokenizer = with_template(folder, tmp_path, source)
    assert tokenizer.render_chat([], colour="red") == '17 May 2031 <|im_start|> {"b": "<é>", "a": 1} 02!red'


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "fails on these messages: TypeError"),
        ("{{ messages[3].content }}", "has no element 3"),
    ],
)
def test_a_template_that_fails_says_what_and_where(folder: Path, tmp_path: Path, source: str, says: str) -> None:
    tokenizer = with_template(folder, tmp_path, source)
    with pytest.raises(TemplateError) as caught:
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert says in str(caught.value)


def test_a_template_with_a_syntax_error_is_refused_at_load_with_its_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=r"given\.jinja: chat template 'default', line 2"):
        with_template(folder, tmp_path, "fine\n{% if %}")
    with pytest.raises(TemplateError, match=r"missing\.jinja: No such file"):
        Tokenizer.load(folder, tmp_path / "missing.jinja")


def test_named_templates_are_chosen_by_tools_and_none_at_all_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.render_chat([]), tokenizer.render_chat([], [{"type": "function"}])) == ("plain", "tools")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    bare = Tokenizer.load(tmp_path)
    assert not bare.has_chat_template
    with pytest.raises(TemplateError, match="no chat template"):
        bare.render_chat([])


CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


def test_a_template_without_a_place_for_tools_gets_them_in_the_conversation(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path, CHATML)
    assert not tokenizer.renders_tools and "no place for tools" in tokenizer.template_note
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}] * 2}
    answers = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("noon", "one")]
    asked = {"role": "user", "content": "Hi"}
    text = tokenizer.render_chat([{"role": "system", "content": "Be brief."}, asked, called, *answers], [CLOCK])
    system, user, assistant, tool, _ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n") and json.dumps(CLOCK) in system and "<tool_call>" in system
    assert user == "user\nHi<|im_end|>\n"
    call = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    assert assistant == f"assistant\n{call}\n{call}<|im_end|>\n"
    assert tool == "user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response><|im_end|>\n"
    assert tokenizer.render_chat([asked], [CLOCK]).startswith("<|im_start|>system\nYou may call functions.")
    assert tokenizer.render_chat([asked]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant"


def test_a_template_with_a_place_for_tools_is_left_alone_and_a_missing_one_is_told(folder: Path, tmp_path: Path) -> None:
    assert Tokenizer.load(folder).renders_tools and Tokenizer.load(folder).template_note == ""
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "chat_template"}))
    assert "no chat template: chat is refused" in Tokenizer.load(bare).template_note


def test_variables_cannot_replace_the_conversation(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    for name in ("messages", "tools"):
        with pytest.raises(TemplateError, match=f"{name} cannot be given"):
            tokenizer.render_chat([{"role": "user", "content": "x"}], None, **{name: []})


def test_the_default_models_tokenizer_and_template_are_those_of_transformers(default_model: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(default_model)
    ours = Tokenizer.load(default_model)
    for text in ("Hello, world! 12345 naïve 世界\n\tdef f(x):\n  return x", "<|im_start|>user\nhi<|im_end|>", "  leading .  , it 's"):
        ids = ours.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special=False) == text
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "why?"}]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(messages) == expected
