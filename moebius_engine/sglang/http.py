"""SGLang's own HTTP server in front of a SwitchingEngine: its routes as they are, and ours under /moebius."""

import asyncio
import contextlib
import copy
import functools
import signal
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.engine import init_tokenizer_manager
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    GenerateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils import add_prometheus_track_response_middleware, set_uvicorn_logging_configs
from sglang.srt.utils.auth import AuthLevel, auth_level

from moebius_engine.engine import SwitchingEngine
from moebius_engine.prometheus import HealthCollector
from moebius_engine.sglang.arguments import SECRETS
from moebius_engine.sglang.door import ARGUMENTS, Call
from moebius_engine.sglang.http_guard import RequestLimits, Secrets, check_samples, guard
from moebius_engine.telemetry import StepTrace, SwitchRecord
from moebius_engine.vitals import EngineDead

DRAIN_S = 10
"""Seconds that responses have to end after SIGINT or SIGTERM."""

# What only a request over HTTP can ask for, and a switch cannot carry. Field → why.
_REFUSED = {
    "input_embeds": "prompts must be token ids or text",
    "positional_embed_overrides": "prompts must be token ids or text",
    "multi_item_delimiter_indices": "scoring has no rule for a switch",
    "return_indexer_topk": "routes are recorded by KV row, which a switch changes",
}


class _CheckedTokenizerManager(TokenizerManager):
    """SGLang's, which every route hands its request to: those of clients pass the door first."""

    engine: "HttpEngine"

    async def generate_request(self, obj, request: Request | None = None):
        # Without `request` it comes from the engine, which has its own door; a health check must look like one.
        if request is not None and isinstance(obj, GenerateReqInput) and not request.url.path.startswith("/health"):
            pass_door(self.engine, obj)
        answers = super().generate_request(obj, request)
        async for answer in answers if request is None else self.engine.watch.each(answers):
            yield answer

    async def release_memory_occupation(self, obj: ReleaseMemoryOccupationReqInput, request: Request | None = None):
        await self.engine.async_release_memory_occupation(obj.tags)  # which asks first; a rank would end here

    async def resume_memory_occupation(self, obj: ResumeMemoryOccupationReqInput, request: Request | None = None):
        await self.engine.async_resume_memory_occupation(obj.tags)


def pass_door(engine: "HttpEngine", obj: GenerateReqInput) -> None:
    """Check a request as engine.generate does, and replace its rows by what the door makes of them.

    Raises ValueError with the message of the first bad row: SGLang's routes answer the whole request with it.
    """
    try:
        for name, why in _REFUSED.items():
            if getattr(obj, name):
                raise ValueError(f"{name} is not supported by a switching engine: {why}")
        if obj.extra_key is not None and not isinstance(obj.extra_key, str):
            raise ValueError(f"extra_key={obj.extra_key!r:.60} must be one string for all rows")
        check_samples(obj, engine.limits)
        call = Call(engine, {name: getattr(obj, _field(name)) for name in ARGUMENTS})
        if message := call.first_refusal():
            raise ValueError(message)
    except ValueError:
        # SGLang aborts the ids of a stream that has ended (create_abort_task). This one has none, and the id that it
        # asked for may be another request's.
        obj.is_single, obj.rid = True, ""
        raise
    for name, value in call.accepted().items():
        setattr(obj, _field(name), value)


def _field(argument: str) -> str:
    """The field of GenerateReqInput for an argument of generate."""
    return "text" if argument == "prompt" else argument


class HttpEngine(SwitchingEngine):
    """A SwitchingEngine that is served over HTTP; host, port, api_key and the like are SGLang's server arguments.

    limits: what one request may ask for. Raises ValueError as SwitchingEngine does.
    """

    init_tokenizer_manager_func = staticmethod(
        functools.partial(init_tokenizer_manager, TokenizerManagerClass=_CheckedTokenizerManager)
    )

    def __init__(self, *args: Any, limits: RequestLimits | None = None, **kwargs: Any):
        self.limits = limits or RequestLimits()
        self._secrets = Secrets(**{name: kwargs.pop(name) for name in SECRETS if name in kwargs})
        super().__init__(*args, **kwargs)
        self.tokenizer_manager.engine = self

    async def async_take_trace(self) -> StepTrace:
        """What happened since the last call, or the start."""
        return StepTrace(**(await self._command("take_trace"))[0]["trace"])

    def serve(self, ready: Callable[[], None]) -> None:
        """Calibrate if the configuration says so, then serve until SIGINT or SIGTERM. Raises EngineDead if the engine
        dies; requests that are open then get status 503, streams break off.

        ready: called once SGLang's warm-up request has been answered. After the signal no connection is accepted and
        responses have DRAIN_S seconds to end. Call it in the main thread, and shutdown() afterwards.
        """
        with contextlib.suppress(KeyboardInterrupt):  # raised again by uvicorn when it has ended
            self._run(self._serve(ready))

    async def _serve(self, ready: Callable[[], None]) -> None:
        self.tokenizer_manager.auto_create_handle_loop()
        # SGLang's handler waits for all requests without a deadline, then kills its own process.
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        await self._calibrated()
        server = uvicorn.Server(self._configure(ready))

        async def end_with_the_engine() -> None:
            await self.async_wait_dead()
            server.should_exit = True

        follower = asyncio.create_task(end_with_the_engine())
        await server.serve()
        follower.cancel()
        self.watch.check()

    def _configure(self, ready: Callable[[], None]) -> uvicorn.Config:
        """What SGLang's launch_server does between starting its engine and its server."""
        app, arguments = http_server.app, self.server_args
        http_server.set_global_state(
            http_server._GlobalState(
                tokenizer_manager=self.tokenizer_manager,
                template_manager=self.template_manager,
                scheduler_info=self._scheduler_init_result.scheduler_infos[0],
            )
        )
        app.is_single_tokenizer_mode = True
        app.server_args = arguments
        warm_up = copy.copy(arguments)  # whose requests carry the key
        warm_up.api_key = self._secrets.api_key
        app.warmup_thread_kwargs = {"server_args": warm_up, "launch_callback": ready}
        app.state.moebius_engine = self
        app.include_router(router)
        app.add_exception_handler(EngineDead, _unavailable)
        if arguments.enable_metrics:
            add_prometheus_track_response_middleware(app)
        guard(app, self._secrets, self.limits)
        set_uvicorn_logging_configs(arguments)
        return uvicorn.Config(
            app,
            host=arguments.host,
            port=arguments.port,
            root_path=arguments.fastapi_root_path,
            log_level=arguments.log_level_http or arguments.log_level,
            timeout_keep_alive=envs.SGLANG_TIMEOUT_KEEP_ALIVE.get(),
            timeout_graceful_shutdown=DRAIN_S,
            ssl_keyfile=arguments.ssl_keyfile,
            ssl_certfile=arguments.ssl_certfile,
            ssl_ca_certs=arguments.ssl_ca_certs,
            ssl_keyfile_password=self._secrets.ssl_keyfile_password,
        )


router = APIRouter(prefix="/moebius")


async def _unavailable(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error)}}, status_code=503)


class SwitchTo(BaseModel):
    layout: str


@router.get("/state")
async def state(request: Request) -> dict[str, Any]:
    """SwitchingEngine.health(), and the policy that holds."""
    engine = request.app.state.moebius_engine
    config = engine.config
    policy = {"policy": config.policy, "threshold": config.high, "low_threshold": config.low}
    return {**await engine.async_health(), **policy}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """State of the engine and signs of life of its ranks, in the text format of Prometheus."""
    engine, registry = request.app.state.moebius_engine, CollectorRegistry()
    registry.register(HealthCollector(engine.state, lambda: engine.vitals))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@router.post("/switch")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def switch(to: SwitchTo, request: Request) -> SwitchRecord | None:
    """SwitchingEngine.switch(layout): the record, or null if that layout is live already."""
    try:
        return await request.app.state.moebius_engine.async_switch(to.layout)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error


@router.post("/trace")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def trace(request: Request) -> StepTrace:
    """In-flight counts and switches since the last call, or the start."""
    return await request.app.state.moebius_engine.async_take_trace()
