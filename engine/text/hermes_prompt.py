"""Tools for a chat template that has no place for them: written into the conversation in Hermes's form.

Signatures go to the end of the system message, earlier calls into the assistant's text, and what a tool answered into a
user's turn, several answers into one (some templates want user and assistant in turns). The parser ``hermes`` of
``toolcalls`` reads what the model makes of it. Pure: messages in OpenAI's form in, the same out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_OPENING = "You may call functions. Their signatures are within <tools></tools>:\n<tools>\n"
_CLOSING = """
</tools>
To call one, answer with a JSON object within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

Message = Mapping[str, Any]


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """The conversation without tools, calls and tools' answers of their own. A system message is made where there is none.

    ``content`` of the messages that are changed is a text or missing.
    """
    turns: list[Message] = []
    for message in messages:
        match message["role"]:
            case "assistant" if message.get("tool_calls"):
                calls = "\n".join(_call(call["function"]) for call in message["tool_calls"])
                kept = {key: value for key, value in message.items() if key != "tool_calls"}
                turns.append({**kept, "content": _joined(message.get("content"), calls)})
            case "tool":
                answer = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
                if turns and turns[-1].get("answers"):
                    answer = _joined(turns.pop()["content"], answer)
                turns.append({"role": "user", "content": answer, "answers": True})
            case _:
                turns.append(message)
    turns = [{key: value for key, value in turn.items() if key != "answers"} for turn in turns]
    if not tools:
        return turns
    text = _OPENING + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _CLOSING
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": _joined(turns[0].get("content"), text, blank=True)}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _call(function: Mapping[str, Any]) -> str:
    """Arguments stand as the client sent them back: a JSON object, or whatever else the model wrote."""
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}\n</tool_call>'


def _joined(before: str | None, after: str, *, blank: bool = False) -> str:
    return f"{before}{chr(10) * (2 if blank else 1)}{after}" if before else after
