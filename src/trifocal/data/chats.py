"""Chats: messages as the text of a template, and the parts of it that the assistant wrote.

Templates are those of transformers, in Jinja.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trifocal.data.messages import one_line
from trifocal.errors import UserError

Chat = Sequence[Mapping[str, Any]]
"""The messages of a chat, each with a `role` and a `content`."""

_ANSWER_ROLE = "assistant"
# The keywords by which a template marks answers itself.
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RenderedChat(NamedTuple):
    """A chat as text.

    Attributes:
        text: Its text.
        answers: First character and end of each answer in it.
    """

    text: str
    answers: list[tuple[int, int]]


def check_chat(messages: Any) -> str:
    """The reason why a value is no chat to learn from; empty if it is one."""
    if not isinstance(messages, list) or not messages:
        return f"expected a list of messages, got {type(messages).__name__ if messages != [] else 'an empty one'}"
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            return f"message {number} is no object with a role and a content"
    if all(message["role"] != _ANSWER_ROLE for message in messages):
        return f"no message has the role {_ANSWER_ROLE}"
    return ""


def render_chat(template: str, messages: Chat, special_tokens: Mapping[str, str], name: str) -> RenderedChat:
    """Write a chat by a template.

    Answers are what the template marks with `{% generation %}`. In one without these marks, an answer is what the chat
    up to it has more than the chat before it with the assistant's prompt.

    Args:
        template: In Jinja.
        messages: The chat.
        special_tokens: Names that the template knows, such as `eos_token`.
        name: Of the template, for messages.

    Raises:
        UserError: If transformers is missing, the template refuses the chat, or it writes earlier messages anew where
            later ones follow.
    """
    try:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        raise UserError("chats need an extra: pip install 'trifocal[hf]'") from None

    def render(chat: Chat, **options: bool) -> tuple[list[str], list[list[tuple[int, int]]]]:
        return render_jinja_template([list(chat)], chat_template=template, **options, **special_tokens)  # type: ignore[arg-type, return-value]

    try:
        if _MARKED.search(template):
            texts, marked = render(messages, return_assistant_tokens_mask=True)
            return RenderedChat(texts[0], [(first, end) for first, end in marked[0]])
        text = render(messages)[0][0]
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != _ANSWER_ROLE:
                continue
            prompt = render(messages[:number], add_generation_prompt=True)[0][0]
            answered = render(messages[: number + 1])[0][0]
            if not text.startswith(answered) or not answered.startswith(prompt):
                raise UserError(
                    f"the chat template of {name} writes message {number} otherwise where other messages follow or "
                    "precede: its answers cannot be found; give it {% generation %} marks around them"
                )
            answers.append((len(prompt), len(answered)))
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template of {name} refuses the chat: {one_line(error)}") from error
    return RenderedChat(text, answers)
