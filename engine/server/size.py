"""How large a request may be: refused by its length, before anything is done for each of its characters or ids.

Tokenising a long text keeps the other requests waiting. A text of more characters than the context's tokens could
spell, each as long as the vocabulary's longest, cannot fit, whatever it says.
"""

from __future__ import annotations

from typing import Any

from engine.messages import Ready
from engine.server.errors import bad
from engine.text.tokenizer import Tokenizer

_BODY_BASE_BYTES = 4 * 2**20  # schemas, tools and several prompts beside the context's own text
_BODY_TOKEN_BYTES = 64  # a token's text, even where every character of it is escaped as \uXXXX
_BODY_MOST_BYTES = 32 * 2**20


def body_bytes(ready: Ready | None) -> int:
    """The largest body that is read, for the context of ``ready``; before that is known, without a share for it."""
    context = ready.context_length if ready else 0
    return min(_BODY_BASE_BYTES + _BODY_TOKEN_BYTES * context, _BODY_MOST_BYTES)


def longest_token(tokenizer: Tokenizer) -> int:
    """No token stands for more characters than this: the longest one's bytes. 50 000 tokens take 0.1 s."""
    return max((len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)), default=1) or 1


def most_tokens(ready: Ready) -> tuple[int, str]:
    """How many tokens prompt and answer may have together, and what holds no more."""
    if ready.pool_tokens < ready.context_length:
        return ready.pool_tokens, "the KV pool"
    return ready.context_length, "the context"


def check_characters(ready: Ready, characters: int, longest: int, *, param: str) -> None:
    """Raises ApiError 400: so many characters cannot fit, in tokens of at most ``longest`` characters."""
    limit, what = most_tokens(ready)
    if characters > limit * longest:
        text = (f"the prompt has {characters} characters; {what} holds {limit} tokens of at most {longest} characters each, "
                f"{limit * longest} together")  # fmt: skip
        raise bad(text, param=param, code="context_length_exceeded")


def check_tokens(ready: Ready, tokens: int) -> None:
    """Raises ApiError 400: a prompt of so many ids leaves no room for an answer."""
    limit, what = most_tokens(ready)
    if tokens >= limit:
        text = f"the prompt has {tokens} tokens; {what} holds {limit}, prompt and answer together"
        raise bad(text, code="context_length_exceeded")


def check_messages(ready: Ready, count: int) -> None:
    """Raises ApiError 400: a message takes at least one token, and there are more messages than tokens."""
    limit, what = most_tokens(ready)
    if count > limit:
        raise bad(f"messages: {count} of them; {what} holds {limit} tokens", param="messages", code="context_length_exceeded")


def characters_of(value: Any) -> int:
    """The characters of all texts in nested lists and objects, without the objects' own keys; other values count as one."""
    count = 0
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                count += len(text)
            case list() | tuple() as items:
                left.extend(items)
            case dict() as items:
                left.extend(items.values())
            case None:
                pass
            case _:
                count += 1
    return count
