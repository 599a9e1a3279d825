"""What stands before the HTTP server's routes, on an application of two routes and on SGLang's own table of routes."""

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.auth import AuthLevel, auth_level

from moebius_engine.sglang.arguments import SECRETS
from moebius_engine.sglang.http_guard import ADMIN_ONLY, RequestLimits, Secrets, check_samples, guard


def client(**secrets) -> TestClient:
    """A guarded application: a plain route, one of ours, and one that only an admin may use."""
    app = FastAPI()

    @app.post("/plain")
    async def plain(request: Request):
        return len(await request.body())

    @app.post("/switch")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def switch():
        return "switched"

    app.post("/weights")(ADMIN_ONLY[0])
    guard(app, Secrets(**secrets), RequestLimits(body_bytes=1000))
    return TestClient(app)


def status(client: TestClient, path: str, key: str | None = None, **kwargs) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return client.post(path, headers=headers, **kwargs).status_code


# (keys of the server) → {(route, key of the client): status}. Past the guard, /weights misses its body: 422.
RULES = [
    ({}, {("/plain", None): 200, ("/switch", None): 200, ("/weights", None): 403, ("/weights", "any"): 403}),
    (
        {"api_key": "user"},
        {
            ("/plain", None): 401,
            ("/plain", "user"): 200,
            ("/plain", "other"): 401,
            ("/switch", None): 401,
            ("/switch", "user"): 200,
            ("/weights", "user"): 403,
        },
    ),
    (
        {"api_key": "user", "admin_api_key": "admin"},
        {
            ("/plain", "user"): 200,
            ("/switch", "user"): 401,
            ("/switch", "admin"): 200,
            ("/weights", None): 401,
            ("/weights", "user"): 401,
            ("/weights", "admin"): 422,
        },
    ),
]


@pytest.mark.parametrize(("keys", "expected"), RULES, ids=lambda value: "+".join(map(str, value))[:24] or "no key")
def test_who_may_call_what(keys, expected):
    one = client(**keys)
    assert {(path, key): status(one, path, key) for path, key in expected} == expected


def test_sglang_serves_the_routes_that_are_closed():
    endpoints = [getattr(route, "endpoint", None) for route in http_server.app.routes]
    assert all(endpoint in endpoints for endpoint in ADMIN_ONLY)


def test_every_route_that_takes_pickled_tensors_is_closed():
    """Found by the field that carries them: one that SGLang adds must not stay open."""
    takes = {
        route.endpoint
        for route in http_server.app.routes
        for hint in getattr(getattr(route, "endpoint", None), "__annotations__", {}).values()
        if any("serialized" in name or "handles" in name for name in getattr(hint, "__dataclass_fields__", ()))
    }
    assert takes and takes <= set(ADMIN_ONLY)


def test_a_body_is_limited_whether_or_not_its_length_is_told():
    one = client()
    assert one.post("/plain", content=b"x" * 1000).json() == 1000
    assert one.post("/plain", content=iter([b"x" * 500] * 2)).json() == 1000
    for content in (b"x" * 1001, iter([b"x" * 500] * 3)):
        answer = one.post("/plain", content=content)
        assert answer.status_code == 413 and "at most 1000 bytes" in answer.text and "--max-body-mb" in answer.text


def test_a_body_is_not_read_for_a_stranger():
    assert status(client(api_key="user"), "/plain", content=b"x" * 2000) == 401


@pytest.mark.parametrize(
    ("request_", "samples"),
    [
        ({"text": "abc"}, 1),
        ({"text": ["abc", "de"]}, 2),
        ({"input_ids": [1, 2, 3]}, 1),
        ({"input_ids": [[1], [2], [3]]}, 3),
        ({"input_ids": [[1], [2]], "sampling_params": {"n": 4}}, 8),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 4}, {}]}, 5),
        ({"input_ids": [1], "sampling_params": {"n": 1 << 60}}, 1 << 60),
        ({"input_ids": []}, 0),
        ({"input_ids": [[1]], "sampling_params": {"n": "many"}}, 1),  # the door's to refuse
    ],
)
def test_samples_are_counted_before_any_is_made(request_, samples):
    obj = GenerateReqInput(**request_)
    check_samples(obj, RequestLimits(samples=max(1, samples)))
    if samples > 1:
        with pytest.raises(ValueError, match=f"are {samples} samples: one request may ask for {samples - 1}"):
            check_samples(obj, RequestLimits(samples=samples - 1))


@pytest.mark.parametrize("limit", ["body_bytes", "samples"])
def test_a_limit_of_nothing_is_refused(limit):
    with pytest.raises(ValueError, match=f"{limit}=0: at least 1"):
        RequestLimits(**{limit: 0})


@pytest.mark.parametrize("value", ["", 123, "two words", "schlüssel", "line\n"])
def test_a_key_that_no_client_can_send_is_refused_without_showing_it(value):
    with pytest.raises(ValueError, match="api_key must be") as refused:
        Secrets(api_key=value)
    assert not value or str(value) not in str(refused.value)


def test_secrets_do_not_show():
    assert set(Secrets.__dataclass_fields__) == set(SECRETS)
    assert "hush" not in repr(Secrets(**dict.fromkeys(SECRETS, "hush")))
