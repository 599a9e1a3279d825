"""SwitchingEngine: sglang.Engine with two layouts."""

import atexit
import functools
from collections.abc import Callable
from typing import Any

import psutil

from moebius_engine.checkpoint import read_hf_config
from moebius_engine.config import SwitchConfig
from moebius_engine.layout import Layout
from moebius_engine.layout.shape import ModelShape, check_ranks
from moebius_engine.sglang import arguments as server_arguments
from moebius_engine.sglang.cpu import environment
from moebius_engine.vitals import make_vitals

if environment.is_needed():
    environment.prepare()  # SGLang reads its platform when it is imported

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import kill_process_tree

from moebius_engine.blocking import BlockingCalls
from moebius_engine.sglang import door
from moebius_engine.sglang.delivery import AsyncOrderedSocket, run_detokenizer
from moebius_engine.sglang.ports import PortBlock
from moebius_engine.sglang.process import controller_with_plugins, run_scheduler, run_static_scheduler, show_warnings
from moebius_engine.sglang.watch import OutliveSigquit, Watch, let_go, outlive_sigquit


class SwitchingEngine(BlockingCalls, Engine):
    """An SGLang engine that can switch between EP and TP while requests are decoded.

    model_path: a Hugging Face Qwen3-MoE checkpoint. ranks: P, the processes that share it (GPUs; on a CPU, processes
    that share the cores). switch: policy and limits. server_args: SGLang's own (sglang.srt.server_args.ServerArgs),
    except those that follow from ranks.

    generate and async_generate are SGLang's, with each row checked first: a bad row comes back with finish_reason
    {"type": "abort", "message": ...} and no tokens, and the others run. The other methods exist twice: plain ones for
    scripts (blocking.py), `async_` ones for use inside an event loop.

    With SwitchConfig(calibrate=...) the first request or step waits for the calibration.

    If a process of the engine ends, or a rank does not answer (SwitchConfig.silent_s, stuck_s), all its processes are
    ended, and every call that waits or comes later raises EngineDead, which names the process. This process lives on.

    Raises ValueError before any process starts if the model, ranks or an argument does not fit.
    """

    init_tokenizer_manager_func: Callable[..., Any]

    def __init__(self, model_path: str, ranks: int = 2, switch: SwitchConfig | None = None, **server_args: Any):
        self.config = switch or SwitchConfig()
        self.ranks = ranks
        self.calibration = self._calibration = None
        hf_config = read_hf_config(model_path, server_args)
        self.shape = ModelShape.from_hf_config(hf_config)
        check_ranks(self.shape, ranks)
        server_arguments.check(ranks, server_args)
        server_arguments.check_machine(ranks, self.config.share_gpu)
        if environment.is_needed():
            environment.prepare(ranks)
        others = {child.pid for child in psutil.Process().children()}
        managers: list[Any] = []
        make_manager = self.init_tokenizer_manager_func

        def init_tokenizer_manager(*arguments: Any) -> Any:
            made = make_manager(*arguments)
            managers.append(made[0])
            return made

        self.init_tokenizer_manager_func = init_tokenizer_manager
        self._ports = PortBlock(server_args.pop("port", None))
        try:
            super().__init__(server_args=self._first_layout(model_path, server_args))
        except BaseException:
            # Upstream leaves the processes that did start, and Python would wait for them at exit.
            for child in psutil.Process().children():
                if child.pid not in others:
                    kill_process_tree(child.pid)
            for manager in managers:
                let_go(manager)
            self._ports.close()
            atexit.unregister(self.shutdown)
            raise
        show_warnings(self.server_args.log_level)
        manager = self.tokenizer_manager
        manager.signal_handler_class, manager.score_request = OutliveSigquit, door.refuse_score
        if self.config.policy != "off":
            manager.recv_from_detokenizer = AsyncOrderedSocket(manager.recv_from_detokenizer, ranks)
        manager._subprocess_watchdog.stop()
        self.watch = Watch(
            manager._subprocess_watchdog,
            self.vitals,
            self.get_all_child_pids(),
            manager,
            self.config.silent_s,
            self.config.stuck_s,
        )
        manager._subprocess_watchdog = self.watch
        self.watch.start()

    def _first_layout(self, model_path: str, server_args: dict[str, Any]) -> ServerArgs:
        """Server arguments to start with. Sets how a rank is started, too: it is told of the second layout."""
        own = {"model_path": model_path, "port": self._ports.base}
        ep, tp = server_arguments.both_layouts(
            self.ranks, {"nccl_port": self._ports.rendezvous, **server_args, **own}, self.config.timeout_s
        )
        self.vitals = make_vitals(self.ranks)
        if self.config.policy == "off":
            self.run_scheduler_process_func = functools.partial(run_static_scheduler, self.config, vitals=self.vitals)
            return ServerArgs(**{Layout.EP: ep, Layout.TP: tp}[Layout(self.config.static_layout)])
        self.run_detokenizer_process_func = run_detokenizer
        self.run_scheduler_process_func = functools.partial(
            run_scheduler, ServerArgs(**tp), self.config, vitals=self.vitals
        )
        return ServerArgs(**ep)

    @classmethod
    def _launch_scheduler_processes(cls, server_args: ServerArgs, port_args: Any, run_scheduler_process_func: Any):
        """Upstream's extension point for how its processes are started; its own SIGQUIT handler has just been set."""
        outlive_sigquit()
        with controller_with_plugins(run_scheduler_process_func.keywords["vitals"]):
            return super()._launch_scheduler_processes(server_args, port_args, run_scheduler_process_func)

    @property
    def context_len(self) -> int:
        """Tokens that a request may have, prompt and response together."""
        return self.tokenizer_manager.context_len

    # ---- generation

    def generate(self, *args: Any, **kwargs: Any):
        """sglang.Engine.generate with every row checked at the door."""
        if self.config.calibrate != "off":
            self._run(self._calibrated())
        return door.generate(self, self._blocking_answer, args, kwargs)

    async def async_generate(self, *args: Any, **kwargs: Any):
        """sglang.Engine.async_generate with every row checked at the door."""
        await self._calibrated()
        return await self.async_generate_now(*args, **kwargs)

    async def async_generate_now(self, *args: Any, **kwargs: Any):
        """async_generate that does not wait for the calibration: for the calibration itself."""
        return await door.async_generate(self, self._answer, args, kwargs)

    async def _answer(self, **arguments: Any):
        """sglang.Engine.async_generate while the engine lives."""
        answer = await self.watch.until_dead(super().async_generate(**arguments))
        return self.watch.each(answer) if arguments["stream"] else answer

    def _blocking_answer(self, **arguments: Any):
        """The same as sglang.Engine.generate."""
        answer = self._run(self._answer(**arguments))
        return self._each(answer) if arguments["stream"] else answer

    def shutdown(self) -> None:
        """Stop this engine's processes. Raises nothing if it never started."""
        manager = self.__dict__.get("tokenizer_manager")
        if manager is None:
            return
        self.watch.close()  # upstream ends every child of this process, another engine's too
        let_go(manager)
        self.send_to_rpc.close(linger=0)
        self._ports.close()
        self.tokenizer_manager = None
        atexit.unregister(self.shutdown)
