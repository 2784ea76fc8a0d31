"""JSON inside an HTML page."""

import json

# Escapes for `</script>` and `<!-- <script>`, which would end or change a script element; and for the two line ends
# that JSON allows in a string and older JavaScript does not.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def json_in_page(value: object) -> str:
    """JSON that is safe in any element of an HTML page, with any text in it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).translate(_ESCAPES)
