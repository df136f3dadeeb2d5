"""Small tokenizers of the kinds that models come with, made on the spot."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tiny_models import tiny_model
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from engine.text.tokenizer import Tokenizer

BARRED = "\N{FULLWIDTH VERTICAL LINE}é\N{FULLWIDTH VERTICAL LINE}"


def _loaded(fast: FastTokenizer) -> Tokenizer:
    with TemporaryDirectory() as folder:
        fast.save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
        return Tokenizer.load(folder)


@cache
def byte_level() -> Tokenizer:
    """GPT-2's kind, as Llama 3, Qwen and SmolLM2 have it; with an added token that holds a space and one outside ASCII."""
    with TemporaryDirectory() as folder:
        tiny_model(folder, vocab=512)
        fast = FastTokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        fast.add_tokens([AddedToken("two words", normalized=False), AddedToken(BARRED, normalized=False)])
        fast.save(str(Path(folder) / "tokenizer.json"))
        return Tokenizer.load(folder)


@cache
def byte_fallback() -> Tokenizer:
    """SentencePiece's kind, as Llama 2 and Mistral have it: ``▁`` for a space, single bytes for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefgehilnorstwxy.,:{}\"'0123456789", "▁a", "▁the", "th", "he", "in", "é", "▁▁"]
    vocab = {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("t", "h"), ("h", "e"), ("i", "n"), ("▁", "a"), ("▁", "▁")]
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _loaded(fast)


@cache
def metaspace() -> Tokenizer:
    """Words marked by ``▁``, without byte fallback."""
    vocab = {piece: n for n, piece in enumerate(["<unk>", "<s>", "</s>", "▁", "▁one", "▁two", "s", ".", "é"])}
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _loaded(fast)


@cache
def wordpiece() -> Tokenizer:
    """BERT's kind: pieces inside a word begin with ``##``, and spaces before punctuation are cleaned up."""
    vocab = {piece: n for n, piece in enumerate(["[UNK]", "<s>", "</s>", "one", "##s", "two", ".", ",", "do", "n't", "'s"])}
    fast = FastTokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.WordPiece()
    fast.add_special_tokens(["<s>", "</s>"])
    return _loaded(fast)


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace, "wordpiece": wordpiece}
