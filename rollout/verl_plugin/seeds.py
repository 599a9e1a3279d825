"""A sampling seed for each request of a step, the same in every run: request ids are drawn anew in each."""

import zlib
from array import array
from collections import Counter
from collections.abc import Sequence


class Seeds:
    """Numbers the samples of each prompt within a step. base: of the run. replica: its rank, since the samples of one
    prompt are spread over the replicas, and each numbers those that come to it."""

    def __init__(self, base: int, replica: int):
        self._base, self._step = base, -1
        self._first = replica << 32  # replica 0 draws what it would draw alone
        self._asked: Counter[int] = Counter()

    def draw(self, prompt_ids: Sequence[int], step: int) -> int:
        """The seed of the next sample of this prompt in this step, 0 ≤ seed < 2**32."""
        if step != self._step:
            self._step = step
            self._asked.clear()
        prompt = zlib.crc32(array("q", prompt_ids).tobytes())
        sample = self._asked[prompt]
        self._asked[prompt] += 1
        return zlib.crc32(array("q", [self._base, step, prompt, self._first + sample]).tobytes())
