"""The checksum over an engine's parameters, from the digests of each."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from rollout.checksum import checksum

digest = st.text("0123456789abcdef", min_size=32, max_size=32)
parameters = st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(digest, st.integers(0)))
digests = st.lists(parameters, min_size=1, max_size=4)


@given(digests)
def test_the_order_of_names_does_not_matter(ranks):
    assert checksum([dict(reversed(rank.items())) for rank in ranks]) == checksum(ranks)
    assert len(checksum(ranks)) == 32 and int(checksum(ranks), 16) >= 0


@given(st.data(), digests.filter(any))
def test_every_digest_size_name_and_rank_matters(data, ranks):
    rank = data.draw(st.sampled_from([number for number, parameters in enumerate(ranks) if parameters]))
    name = data.draw(st.sampled_from(sorted(ranks[rank])))
    digest, size = ranks[rank][name]

    def changed(**parameters) -> str:
        other = copy.deepcopy(ranks)
        del other[rank][name]
        other[rank] |= parameters
        return checksum(other)

    flipped = ("1" if digest[0] == "0" else "0") + digest[1:]
    others = [changed(), changed(**{name: (flipped, size)}), changed(**{name: (digest, size + 1)})]
    others.append(changed(**{name + "_": (digest, size)}))
    others.append(checksum([{}, *ranks]))
    assert checksum(ranks) not in others


def test_two_ranks_that_trade_places_differ():
    one, other = {"a": ("00", 1)}, {"a": ("11", 1)}
    assert checksum([one, other]) != checksum([other, one])
