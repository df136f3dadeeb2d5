"""The tokenizer of a model folder: text to ids and back, the bytes of a token, and the chat template.

It reads ``tokenizer.json`` through the ``tokenizers`` library, so the API process needs neither torch nor transformers.
``clean_up_tokenization_spaces`` of the folder is not applied: it rewrites text that was already streamed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from engine.text.chat_template import ChatTemplate, TemplateError
from engine.text.hermes_prompt import with_tools


class TokenizerError(ValueError):
    """A model folder whose tokenizer cannot be used; the text names the file."""


_PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}}
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: GPT-2's table, read backwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in printable)
    table.update({chr(256 + n): b for n, b in enumerate(others)})
    return table


_ALPHABET = _byte_level_alphabet()


class Tokenizer:
    """Text to ids and back, for one model. Safe to share between threads after ``load``."""

    def __init__(self, fast: FastTokenizer, config: Mapping[str, Any], template: ChatTemplate | None, *, where: str) -> None:
        fast.no_truncation()  # a tokenizer saved after training often truncates or pads; a server must do neither
        fast.no_padding()
        self._fast = fast
        self._template = template
        self._where = where
        vocabulary = fast.get_vocab(with_added_tokens=True)
        self._text_of: dict[int, str] = {token: text for text, token in vocabulary.items()}
        self._added: dict[int, str] = {token: added.content for token, added in fast.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(token for token, added in fast.get_added_tokens_decoder().items() if added.special)
        self.byte_level, self._byte_fallback, self._space_mark = _decoder_traits(fast)
        self._special_text = {name: text for name in SPECIAL_NAMES if (text := _token_content(config.get(name)))}

    @staticmethod
    def load(folder: str | Path, chat_template: Path | None = None, *, now: Callable[[], datetime] = datetime.now) -> Tokenizer:
        """Read a Hugging Face folder. ``chat_template`` replaces the folder's own; ``now`` is the clock of ``strftime_now``.

        Raises:
            TokenizerError: no usable tokenizer.json or tokenizer_config.json.
            TemplateError: the chat template does not compile.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path}: no such file; a folder with a fast tokenizer (tokenizer.json) is needed")
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises bare Exception
            raise TokenizerError(f"{path}: not a tokenizer that can be read: {error}") from error
        config = _read_object(folder / "tokenizer_config.json")
        template = _find_template(folder, config, chat_template, now)
        return Tokenizer(fast, config, template, where=str(folder))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id. The model's output layer may be wider."""
        return max(self._text_of, default=-1) + 1

    @property
    def bos_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_id(self) -> int | None:
        """The folder's end-of-text token; a model may have more (``eos_ids`` of ``messages.Ready``)."""
        return self._id_of("eos_token")

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the chat template shows tools to the model. Where it does not, ``render_chat`` writes them into the messages."""
        if self._template is None:
            return False
        asked = [{"role": "user", "content": "Hi"}]
        try:
            return self._template.render(asked, [_PROBE], self._special_text) != self._template.render(asked, None, self._special_text)
        except TemplateError:
            return True  # it does something with them

    @property
    def template_note(self) -> str:
        """What whoever starts a server should know of the chat template; empty: nothing."""
        if self._template is None:
            return "the model has no chat template: chat is refused, /v1/completions works; --chat-template FILE gives it one"
        if not self.renders_tools:
            return "the chat template has no place for tools: they are written into the system message, in Hermes's form"
        return ""

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Ids of ``text``. ``add_special`` adds what the model expects around a plain text (often a first token).

        Special tokens written out in ``text`` become these tokens, as the chat template needs.
        """
        # The batch call lets go of the interpreter's lock, the single one holds it: a long prompt would stop everybody.
        ids: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``. Ids that the tokenizer does not know (padding of the output layer) give nothing."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, /, **variables: Any
    ) -> str:
        """The prompt of a conversation in OpenAI's form; ``variables`` are what else the template reads.

        ``add_generation_prompt`` is true unless given. Encode the result without ``add_special``: the template has
        written the special tokens.

        Raises:
            TemplateError: there is no template, or it refuses or cannot render these messages, or a variable has a name that is taken.
        """
        if self._template is None:
            raise TemplateError(f"{self._where}: the model has no chat template; use /v1/completions or start with --chat-template FILE")
        if taken := sorted({"messages", "tools"} & variables.keys()):
            raise TemplateError(f"chat template: {taken[0]} cannot be given as a variable")
        if not self.renders_tools:
            messages, tools = with_tools(messages, tools), None
        return self._template.render(messages, tools, {**self._special_text, **variables})

    def knows(self, token: int) -> bool:
        return token in self._text_of

    def is_byte_piece(self, token: int) -> bool:
        """Whether this token is one raw byte of a byte-fallback vocabulary, such as ``<0x0A>``."""
        return self._byte_fallback and token not in self._added and _byte_piece(self._text_of.get(token, "")) is not None

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token stands for, alone; a token may be part of a character. Unknown ids give none."""
        if self.byte_level:
            return self.byte_level_bytes(token)
        if token in self._added:
            return self._added[token].encode()
        text = self._text_of.get(token, "")
        byte = _byte_piece(text) if self._byte_fallback else None
        return bytes([byte]) if byte is not None else text.replace(self._space_mark, " ").encode() if self._space_mark else text.encode()

    def byte_level_bytes(self, token: int) -> bytes:
        """Bytes of a token as the byte-level decoder takes them: an added token with a character outside the alphabet is itself."""
        text = self._text_of.get(token, "")
        try:
            return bytes([_ALPHABET[char] for char in text])
        except KeyError:
            return text.encode()

    def token_text(self, token: int) -> str:
        """``token_bytes`` as text, with U+FFFD for what is not a whole character."""
        return self.token_bytes(token).decode(errors="replace")

    def _id_of(self, name: str) -> int | None:
        text = self._special_text.get(name)
        return None if text is None else self._fast.token_to_id(text)


def _decoder_traits(fast: FastTokenizer) -> tuple[bool, bool, str]:
    """(is it byte level alone, has it byte fallback, the character that stands for a space)."""
    decoder = json.loads(fast.to_str()).get("decoder") or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    mark = ""
    for step in steps:
        if step.get("type") == "Metaspace":
            mark = step.get("replacement", "▁")
        elif step.get("type") == "Replace" and step.get("content") == " ":
            mark = step.get("pattern", {}).get("String", "")
    return kinds == ["ByteLevel"], "ByteFallback" in kinds, mark


def _byte_piece(text: str) -> int | None:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        try:
            return int(text[3:5], 16)
        except ValueError:
            return None
    return None


def _token_content(entry: Any) -> str:
    """A special token is written as its text, or as an object with ``content``."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else ""


def _read_object(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return found


def _find_template(folder: Path, config: Mapping[str, Any], given: Path | None, now: Callable[[], datetime]) -> ChatTemplate | None:
    """The given file, else chat_template.jinja, else tokenizer_config.json: one text, or a list of named ones."""
    for path in (given, folder / "chat_template.jinja"):
        if path is not None and (path.is_file() or path == given):
            try:
                source = path.read_text(encoding="utf-8")
            except OSError as error:
                raise TemplateError(f"{path}: {error.strerror}") from error
            return ChatTemplate({"default": source}, where=str(path), now=now)
    entry = config.get("chat_template")
    where = str(folder / "tokenizer_config.json")
    if isinstance(entry, str):
        return ChatTemplate({"default": entry}, where=where, now=now)
    if isinstance(entry, list):
        try:
            return ChatTemplate({str(one["name"]): str(one["template"]) for one in entry}, where=where, now=now)
        except (KeyError, TypeError) as error:
            raise TemplateError(f"{where}: chat_template: each entry of the list needs a name and a template") from error
    return None
