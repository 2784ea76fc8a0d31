"""Chats: messages as the text of a template, and the parts of it that the assistant wrote.

Templates are those of transformers, in Jinja.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from trifocal.errors import UserError, nearest, one_line

Chat = Sequence[Mapping[str, Any]]
"""The messages of a chat, each with a `role` and a `content`."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages."""

_ANSWER_ROLE = "assistant"
# The keywords by which a template marks answers itself.
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# transformers keeps one compiled template for all threads, and notes in it which chat it renders.
_RENDERING = threading.Lock()


class BadChat(ValueError):
    """A chat that cannot be learned from; the text is the reason."""


def read_chat(messages: Any) -> Chat:
    """A chat to learn from: as `read_messages`, with an answer; BadChat if it has none."""
    chat = read_messages(messages)
    if all(message["role"] != _ANSWER_ROLE for message in chat):
        raise BadChat(f"no message has the role {_ANSWER_ROLE}")
    return chat


def read_messages(messages: Any) -> Chat:
    """A chat from a list of objects with `role` and `content`, without nulls: parquet gives each message all keys."""
    if not isinstance(messages, list) or not messages:
        got = type(messages).__name__ if messages != [] else "an empty one"
        raise BadChat(f"expected a list of messages, got {got}")
    chat = _without_nulls(messages)
    for number, message in enumerate(chat):
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            raise BadChat(f"message {number} is no object with a role and a content")
        if role not in ROLES:
            raise BadChat(
                f"message {number} has the unknown role {role!r}; the nearest of {', '.join(ROLES)} is "
                f"{nearest(role, ROLES)}"
            )
        content = message.get("content")
        # A call of a tool needs no content.
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            got = "none" if content is None else type(content).__name__
            raise BadChat(f"the content of message {number} must be a string, got {got}")
    return chat  # type: ignore[no-any-return]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def render_prompt(template: str, messages: Chat, special_tokens: Mapping[str, str], name: str) -> str:
    """Write a chat by a template, and the beginning of the assistant's answer; arguments as of `render_chat`."""
    return _render(template, messages, special_tokens, name, add_generation_prompt=True)[0]


def _render(
    template: str, messages: Chat, special_tokens: Mapping[str, str], name: str, **options: bool
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a chat, and the parts that the template marks."""
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        raise UserError("chats need an extra: pip install 'trifocal[hf]'") from None
    # Its annotations name one of the two results.
    render_any: Any = render_jinja_template
    try:
        with _RENDERING:
            texts, marked = render_any([list(messages)], chat_template=template, **options, **special_tokens)
    except ImportError as error:
        raise UserError(f"chats need another package: {one_line(error)}") from None
    except Exception as error:  # A template is a program, which may fail in any way.
        raise BadChat(f"the chat template of {name} refuses the chat: {one_line(error)}") from error
    return texts[0], marked[0] if marked else []


def render_chat(
    template: str, messages: Chat, special_tokens: Mapping[str, str], name: str
) -> tuple[str, list[tuple[int, int]]]:
    """The text of a chat by a Jinja template, with the first character and the end of each answer in it. Answers are
    what the template marks with `{% generation %}`, or else what each adds to the chat before it.
    """
    render = functools.partial(_render, template, special_tokens=special_tokens, name=name)
    if _MARKED.search(template):
        return render(messages, return_assistant_tokens_mask=True)
    text = render(messages)[0]
    answers = []
    for number, message in enumerate(messages):
        if message["role"] != _ANSWER_ROLE:
            continue
        prompt = render(messages[:number], add_generation_prompt=True)[0]
        answered = render(messages[: number + 1])[0]
        if not text.startswith(answered) or not answered.startswith(prompt):
            raise BadChat(
                f"the chat template of {name} writes message {number} differently when other messages precede or "
                "follow it, so its answers cannot be found; put {% generation %} marks around them"
            )
        answers.append((len(prompt), len(answered)))
    return text, answers
