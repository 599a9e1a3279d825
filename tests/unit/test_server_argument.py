"""`--set argument=value`: what SGLang takes as text stays text."""

import typing

import pytest
from sglang.srt.server_args import ServerArgs

from moebius_engine.sglang.arguments import SECRETS, check, text_arguments
from rollout.server_argument import server_argument


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("api_key=123", "123"),
        ("api_key=1e5", "1e5"),
        ("api_key=null", "null"),
        ("api_key=a=b", "a=b"),
        ('json_model_override_args={"a": 1}', '{"a": 1}'),
        ("served_model_name=true", "true"),
        ("max_running_requests=64", 64),
        ("mem_fraction_static=0.8", 0.8),
        ("enable_metrics=true", True),
        ("cuda_graph_bs=[1, 2]", [1, 2]),
        ("device=cpu", "cpu"),
        ("no_such_argument=x", "x"),
    ],
)
def test_values(change, value):
    (_, found) = server_argument(change)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("change", ["api_key", "=x", ""])
def test_an_argument_without_name_or_value(change):
    with pytest.raises(ValueError, match="give argument=value"):
        server_argument(change)


def test_the_text_arguments_are_those_that_sglang_types_so():
    hints = typing.get_type_hints(ServerArgs)
    assert text_arguments() == {name for name, hint in hints.items() if hint in (str, str | None)}
    assert set(SECRETS) <= text_arguments()


@pytest.mark.parametrize("name", SECRETS)
def test_an_engine_without_a_server_takes_no_secret_and_does_not_repeat_it(name):
    with pytest.raises(ValueError, match=f"^{name} belongs to an HTTP server") as refused:
        check(2, {name: "hush"})
    assert "hush" not in str(refused.value)
