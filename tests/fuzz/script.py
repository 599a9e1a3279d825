"""What may happen to an engine, one event after the other; hypothesis makes scripts of it."""

from typing import NamedTuple

from hypothesis import strategies as st


class Submit(NamedTuple):
    """A request. prompt: an index. tokens: its response's length."""

    prompt: int
    tokens: int
    stream: bool


class Again(NamedTuple):
    """Another request with the id of an earlier one."""

    which: int


class Bad(NamedTuple):
    """A request that is refused at the door."""


class Abort(NamedTuple):
    which: int


class AbortAll(NamedTuple):
    pass


class Switch(NamedTuple):
    """layout: "ep", "tp" or "other". broken: verification finds the KV wrong, so it is rolled back."""

    layout: str
    broken: bool


class Pause(NamedTuple):
    mode: str


class Continue(NamedTuple):
    pass


class Flush(NamedTuple):
    pass


class Update(NamedTuple):
    """A full set of the same weights."""

    flush: bool


class Release(NamedTuple):
    tags: tuple[str, ...]


class Resume(NamedTuple):
    tags: tuple[str, ...]


class Steps(NamedTuple):
    """Forward steps go by, as long as there is something to do."""

    count: int


Event = Submit | Again | Bad | Abort | AbortAll | Switch | Pause | Continue | Flush | Update | Release | Resume | Steps

_TAGS = st.sampled_from([("weights",), ("kv_cache",), ("kv_cache", "weights")])
_WHICH = st.integers(0, 9)


def scripts(prompts: int, tokens: int, steps: int, rounds: int) -> st.SearchStrategy[list[Event]]:
    """Scripts of at most that many rounds: some requests, some steps, and something else. That is mostly a switch,
    since only a switch with requests in flight shows anything.

    prompts: how many there are. tokens, steps: the most of a request, and between two rounds.
    """
    submit = st.builds(Submit, st.integers(0, prompts - 1), st.integers(tokens // 4, tokens), st.booleans())
    layouts, broken = ["other", "other", "other", "ep", "tp"], [False, False, False, True]
    switch = st.builds(Switch, st.sampled_from(layouts), st.sampled_from(broken))
    control = st.one_of(
        st.builds(Abort, _WHICH),
        st.builds(Pause, st.sampled_from(["in_place", "retract"])),
        st.just(Continue()),
        st.sampled_from([AbortAll(), Bad(), Flush()]),
        st.builds(Again, _WHICH),
        st.one_of(st.builds(Update, st.booleans()), st.builds(Release, _TAGS), st.builds(Resume, _TAGS)),
    )
    event = st.sampled_from([True, True, False]).flatmap(lambda is_switch: switch if is_switch else control)
    some_steps = st.builds(Steps, st.integers(1, steps))

    def a_round(least: int) -> st.SearchStrategy[list[Event]]:
        return st.builds(
            lambda burst, *rest: [*burst, *rest], st.lists(submit, min_size=least, max_size=4), some_steps, event
        )

    return st.builds(
        lambda first, rest: [*first, *(event for part in rest for event in part)],
        a_round(3),
        st.lists(a_round(0), min_size=3, max_size=rounds - 1),
    )
