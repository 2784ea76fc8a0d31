"""Masks keys, tokens and passwords in the environment and the command line that a run writes down."""

import re
from collections.abc import Iterable, Mapping

MASK = "***"
# Parts of names, as in NVIDIA_API_KEY, TORCH_HUB_TOKEN or ?X-Amz-Signature=.
_SECRET = r"(?:KEY|TOKEN|SECRET|PASSW|CREDENTIAL|SIGNATURE)"
_SECRET_NAME = re.compile(_SECRET, re.IGNORECASE)
_SECRET_FLAG = re.compile(rf"--?(?!.*(?:TOKENIZER|TOKENS$)).*{_SECRET}.*", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^\s/\"']+@")
_SECRET_IN_QUERY = re.compile(rf"([?&][^=&#\s]*{_SECRET}[^=&#\s]*=)[^&#\s\"']+", re.IGNORECASE)


def _mask_urls(text: str) -> str:
    """A text, with users, passwords and secret query parameters of its URLs masked."""
    return _SECRET_IN_QUERY.sub(rf"\1{MASK}", _USER_IN_URL.sub(f"{MASK}@", text))


def mask_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables; values are masked if the name has KEY, TOKEN, SECRET, PASSWORD or the like in it."""
    return {
        name: MASK if value and _SECRET_NAME.search(name) else _mask_urls(value) for name, value in variables.items()
    }


def mask_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line; values of flags with such names, `--flag=value` or `--flag value`, are masked."""
    shown, secret = [], False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if equals and _SECRET_FLAG.fullmatch(flag):
            argument = f"{flag}={MASK}"
        shown.append(MASK if secret and not argument.startswith("-") else _mask_urls(argument))
        secret = not equals and _SECRET_FLAG.fullmatch(flag) is not None
    return shown
