"""A file of lines, each on disk as a whole or not at all."""

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)


class LineFile:
    """append: after what is there, else anew. Raises OSError if the file cannot be opened.

    A line that the disk does not take (it is full, or the file has grown too large) is left out: a rollout must not be
    lost for its record. `missing` counts them, and the log has one line for the first of a row.
    """

    def __init__(self, path: Path, append: bool) -> None:
        self._path = path
        self._file = path.open("ab" if append else "wb", buffering=0)
        self._end = os.fstat(self._file.fileno()).st_size
        self._failing = False
        self.missing = 0

    def write(self, line: str) -> None:
        """line: with its newline. It has been handed to the system when this returns."""
        data = line.encode()
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(f"{written} of {len(data)} bytes were taken")
        except OSError as error:
            self.missing += 1
            if not self._failing:
                log.error("%s: lines are left out from here on, until there is room again: %s", self._path, error)
            self._failing = True
            self._cut()
            return
        self._end += len(data)
        self._failing = False

    def _cut(self) -> None:
        """Half a line would make the file unreadable."""
        try:
            self._file.truncate(self._end)
        except OSError as error:
            log.error("%s: it may end in half a line: %s", self._path, error)

    def close(self) -> None:
        self._file.close()
