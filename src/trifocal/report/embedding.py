"""Data inside the page."""

import json

# What ends or changes how a browser reads a script element, `</script>` and `<!-- <script>`, as JSON may spell it too;
# and the two line ends that JSON takes in a string and older JavaScript does not.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def json_in_page(value: object) -> str:
    """JSON that can stand in any element of an HTML page, whatever text it holds."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).translate(_ESCAPES)
