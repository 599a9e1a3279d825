"""What settling leaves of SGLang's batches."""

from types import SimpleNamespace

from moebius_engine.sglang.settle import settle


class Batch:
    """A full batch of which all requests have ended but `left`."""

    def __init__(self, left: int):
        self.reqs, self.left, self.batch_is_full = [0] * 4, left, True

    def is_empty(self) -> bool:
        return not self.reqs

    def filter_batch(self) -> None:
        self.reqs = self.reqs[: self.left]


def test_a_rank_admits_requests_after_those_that_have_ended():
    """An empty batch that is taken for full is never looked at again: the rank would admit none any more."""
    for left in (0, 3):
        batch = Batch(left)
        scheduler = SimpleNamespace(
            chunked_req=None, enable_overlap=False, last_batch=None, cur_batch=None, running_batch=batch
        )
        settle(scheduler)
        assert len(batch.reqs) == left and not batch.batch_is_full
