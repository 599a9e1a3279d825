"""Writes the requests of each rollout step to a file of its own."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moebius_engine.telemetry import to_json_line
from rollout.line_file import LineFile
from rollout.replay.request import VERSION, RecordedRequest, distribution

log = logging.getLogger(__name__)


class RequestDump:
    """`step_<number>.jsonl` in a folder, one RecordedRequest a line, in the order in which they ended.

    A line is in the file when `write` returns, unless the disk is full. A step that is begun again, as after a restart,
    is written anew. A step whose file cannot be opened is left out, and the log says so: a rollout must not be lost for
    its record.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._step = 0
        self._file: LineFile | None = None

    def begin(self, step: int) -> None:
        self.end()
        self._step = step
        path = self._folder / f"step_{step}.jsonl"
        try:
            self._file = LineFile(path, append=False)
        except OSError as error:
            log.error("the requests of step %s are not written down: %s", step, error)

    def write(
        self,
        number: int,
        request_id: str,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        sampling: Mapping[str, Any],
        finish_reason: Mapping[str, Any],
    ) -> None:
        """Records a response; the arguments are RecordedRequest's, in SGLang's form.

        Left out: what ends between two steps, and a bad row (status 400), which was never work.
        """
        if self._file is None or finish_reason.get("status_code") == 400:
            return
        request = RecordedRequest(
            version=VERSION,
            step=self._step,
            number=number,
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            output_ids=tuple(output_ids),
            sampling=distribution(sampling),
            finish_reason=finish_reason["type"],
        )
        self._file.write(to_json_line(request))

    def end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
