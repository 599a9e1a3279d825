"""Every attribute of SGLang's Req has one rule for a switch."""

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from moebius_engine.sglang.request_fields import CARRIED, KNOWN, LAZY, REBUILT, UNUSED


def test_each_attribute_has_exactly_one_rule():
    assert not CARRIED & REBUILT and not CARRIED & UNUSED and not REBUILT & UNUSED
    assert KNOWN == CARRIED | REBUILT | UNUSED


def test_the_rules_cover_a_real_request_and_nothing_else():
    assert {"surr_and_decode_ids", "cur_decode_ids_len", "penalty_token"} == LAZY
    assert vars(Req("rid", "text", [1, 2], SamplingParams())).keys() | LAZY == KNOWN
