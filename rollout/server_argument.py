"""An argument of SGLang's server on a command line."""

import json
from typing import Any

from moebius_engine.sglang.arguments import text_arguments


def server_argument(change: str) -> tuple[str, Any]:
    """max_running_requests=64 as ("max_running_requests", 64).

    The value of an argument that is text is taken as it stands: an api_key=123 is no number. Of the others a value that
    is not JSON is text. Raises ValueError without a name or a value.
    """
    name, equals, value = change.partition("=")
    if not (name and equals):
        raise ValueError(f"--set {change!r}: give argument=value")
    if name in text_arguments():
        return name, value
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
