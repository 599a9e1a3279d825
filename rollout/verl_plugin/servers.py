"""The servers that this process, the trainer's, has started."""

from typing import Any

servers: list[Any] = []
"""Their Ray handles, one a replica, in the order of their start."""
