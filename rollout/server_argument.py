"""An argument of SGLang's server on a command line."""

import json
from typing import Any


def server_argument(change: str) -> tuple[str, Any]:
    """max_running_requests=64 as ("max_running_requests", 64); a value that is not JSON is text."""
    name, equals, value = change.partition("=")
    if not (name and equals):
        raise ValueError(f"--set {change!r}: give argument=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
