"""Requests between ranks: what another rank gets is what goes on there."""

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from moebius_engine.sglang.requests import pack, unpack


def request(tokens: int, delivered: int, logprobs: bool = True) -> Req:
    params = SamplingParams(max_new_tokens=100)
    params.normalize(None)
    req = Req("one", "", [1, 2, 3], params, return_logprob=logprobs, vocab_size=512, eos_token_ids={0})
    req.output_ids = [5 + token for token in range(tokens)]
    if logprobs:
        req.output_token_logprobs_val = [-0.1 * token for token in range(tokens)]
        req.output_token_logprobs_idx = list(req.output_ids)
    req.send_output_token_logprobs_offset = delivered
    return req


@pytest.mark.parametrize(("tokens", "delivered"), [(0, 0), (7, 0), (7, 5), (7, 7), (0, 1)])
def test_logprobs_that_the_client_has_stay_behind_and_the_others_keep_their_places(tokens, delivered):
    req = request(tokens, delivered)
    (made,) = unpack(pack([req]), None)
    sent = min(tokens, delivered)
    assert made.output_ids == req.output_ids
    assert made.output_token_logprobs_val == [None] * sent + req.output_token_logprobs_val[sent:]
    assert made.output_token_logprobs_idx == req.output_token_logprobs_idx
    assert made.send_output_token_logprobs_offset == delivered


def test_logprobs_of_other_ids_than_the_output_travel_with_them():
    req = request(4, 2)
    req.output_token_logprobs_idx[3] = 99
    (made,) = unpack(pack([req]), None)
    assert made.output_token_logprobs_idx[2:] == [7, 99]


def test_a_request_without_logprobs_stays_without():
    (made,) = unpack(pack([request(4, 0, logprobs=False)]), None)
    assert made.output_token_logprobs_val is None and made.output_token_logprobs_idx is None
