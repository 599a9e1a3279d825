"""What the HTTP server keeps from its clients: secrets, routes that run what a client sends, requests without bound."""

from dataclasses import dataclass, field, fields
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware, auth_level
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# They unpickle what the caller sends, or connect to the address that the caller names.
ADMIN_ONLY = (
    http_server.update_weights_from_tensor,
    http_server.load_lora_adapter_from_tensors,
    http_server.update_weights_from_ipc,
    http_server.init_weights_update_group,
    http_server.init_weights_send_group_for_remote_instance,
    http_server.send_weights_to_remote_instance,
)


@dataclass(frozen=True)
class Secrets:
    """SGLang's arguments of these names (moebius_engine.sglang.arguments.SECRETS). Raises ValueError for a key that no
    client could send."""

    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    ssl_keyfile_password: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None:
                continue
            if not isinstance(value, str) or not value:
                raise ValueError(f"{one.name} must be text of at least one character")
            if one.name != "ssl_keyfile_password" and not (
                value.isascii() and value.isprintable() and " " not in value
            ):
                raise ValueError(f"{one.name} must be of printable ASCII characters without spaces, as a header is")


@dataclass(frozen=True)
class RequestLimits:
    """What one request may ask for. body_bytes: of its body. samples: prompts times n. Raises ValueError below 1."""

    body_bytes: int = 64 << 20
    samples: int = 16384

    def __post_init__(self) -> None:
        for one in fields(self):
            if getattr(self, one.name) < 1:
                raise ValueError(f"{one.name}={getattr(self, one.name)}: at least 1")


def guard(app: FastAPI, secrets: Secrets, limits: RequestLimits) -> None:
    """Puts the keys and the limit of a body before all routes. Those of ADMIN_ONLY need the admin key, always."""
    for endpoint in ADMIN_ONLY:
        auth_level(AuthLevel.ADMIN_FORCE)(endpoint)
    app.add_middleware(BodyLimit, most=limits.body_bytes)
    # Added last, so it comes first: a body is read for those only who have the key.
    add_api_key_middleware(app, api_key=secrets.api_key, admin_api_key=secrets.admin_api_key)


class BodyLimit:
    """Answers 413 where a body is longer than `most` bytes, whether or not its length is told in advance."""

    def __init__(self, app: ASGIApp, most: int):
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"0")
        if int(told) > self._most:
            answer = ORJSONResponse({"error": {"message": self._too_long(f"{int(told)} bytes"), "code": 413}}, 413)
            await answer(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise HTTPException(413, self._too_long("so far"))
            return message

        await self._app(scope, counted, send)

    def _too_long(self, length: str) -> str:
        return (
            f"the body is too long ({length}): at most {self._most} bytes; send the prompts in several requests, or "
            "serve with a larger --max-body-mb"
        )


def check_samples(obj: GenerateReqInput, limits: RequestLimits) -> None:
    """Raises ValueError for a request of too many samples, before any is made; what is malformed is the door's."""
    prompts: Any = obj.input_ids if obj.text is None else obj.text
    rows = len(prompts) if isinstance(prompts, list) and not (prompts and isinstance(prompts[0], int)) else 1
    params = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params] * rows
    samples = sum(_n(one) for one in params[:rows])
    if samples > limits.samples:
        raise ValueError(
            f"{rows} prompts with n samples each are {samples} samples: one request may ask for {limits.samples}; send "
            "several requests, or serve with a larger --max-samples"
        )


def _n(params: Any) -> int:
    n = params.get("n") if isinstance(params, dict) else None
    return n if isinstance(n, int) and n > 1 else 1
