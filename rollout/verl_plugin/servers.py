"""The servers that this process, the trainer's, has started."""

from typing import Any

servers: dict[int, Any] = {}
"""Rank of a replica → the Ray handle of its server. They start side by side, so that any may be there first."""
