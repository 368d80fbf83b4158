"""The life of `chairlift serve`: start both processes side by side, report, serve, and leave nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chairlift import log
from chairlift.config import EngineConfig, ServerConfig
from chairlift.core.plan import StepStats
from chairlift.errors import ConfigError, EngineDead
from chairlift.server import ipc, supervisor
from chairlift.server.prefix import check_prefix, prefix_tokens
from chairlift.server.text import Tokenizer

if TYPE_CHECKING:  # imported while the engine loads: see run()
    import uvicorn

    from chairlift.server.service import Service

DRAIN_SECONDS = 10.0  # for running requests after SIGTERM
OBITUARY_SECONDS = 2.0  # for clients and probes to hear that the engine is dead, before this process ends too

_log = log.get("server")


def run(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    tokenizer_factory: Callable[[], Tokenizer],
    *,
    command: Sequence[str] = supervisor.COMMAND,
) -> None:
    """See `chairlift.server.run`. ``command`` starts the engine process."""
    log.setup(server_config.log_level, "server")
    begin = time.perf_counter() - log.process_age()
    with suppress(_Ended), _ends_on_sigterm(), closing(_listen(server_config)) as listener:
        engine = supervisor.EngineProcess(engine_config, log_level=server_config.log_level, command=command)
        try:
            phases = [("interpreter", time.perf_counter() - begin)]
            with ThreadPoolExecutor(1, "tokenizer") as pool:
                tokenizer = pool.submit(_load, tokenizer_factory, engine_config.pin_prefix)
                service, server = _build(engine, engine_config, server_config, phases)
                asyncio.run(_serve(service, server, listener, tokenizer, phases, begin))
        finally:
            engine.stop()


class _Ended(BaseException):
    """SIGINT or SIGTERM before the event loop took them over."""


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    def end(signum: int, frame: object) -> None:
        raise _Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(config: ServerConfig) -> socket.socket:
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((config.host, config.port), family=family, backlog=2048)
        # What is accepted inherits this. asyncio sets it only where the socket's protocol number is TCP's, and here it
        # is 0; without it each answer on a kept-alive connection waits 40 ms for the client's delayed ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error}); choose another --host or --port"
        ) from None


class _Loaded(NamedTuple):
    tokenizer: Tokenizer
    pinned: list[int] | None  # tokens of --pin-prefix
    seconds: float


def _load(factory: Callable[[], Tokenizer], pin_prefix: str | None) -> _Loaded:
    begin = time.perf_counter()
    tokenizer = factory()
    pinned = None if pin_prefix is None else prefix_tokens(pin_prefix, tokenizer)
    return _Loaded(tokenizer, pinned, time.perf_counter() - begin)


def _build(
    engine: supervisor.EngineProcess,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    phases: list[tuple[str, float]],
) -> tuple[Service, uvicorn.Server]:
    """The HTTP side. Its imports take a good part of a second, so they run while the engine loads."""
    begin = time.perf_counter()
    import uvicorn

    from chairlift.server.app import create_app
    from chairlift.server.client import EngineClient
    from chairlift.server.metrics import Metrics
    from chairlift.server.preemptions import PreemptionLog
    from chairlift.server.service import Service

    class Server(uvicorn.Server):
        """Signals are handled in _serve; uvicorn would raise them again at the end, past our own clean-up."""

        def capture_signals(self) -> Any:
            return nullcontext()

    metrics = Metrics()
    preemptions = PreemptionLog(engine_config, _log)

    def on_step(stats: StepStats) -> None:
        metrics.step(stats)
        preemptions.step(stats)

    client = EngineClient(engine, on_step)
    service = Service(client, engine_config, _names(engine_config.model, server_config), metrics)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(DRAIN_SECONDS) + 5,
    )
    phases.append(("HTTP imports", time.perf_counter() - begin))
    return service, Server(config)


def _names(model: str, config: ServerConfig) -> list[str]:
    """The shown name first, then the others by which clients may call the model."""
    own = Path(model).name if os.path.exists(model) else model
    return list(dict.fromkeys([config.served_model_name or own, own, model]))


async def _serve(
    service: Service,
    server: uvicorn.Server,
    listener: socket.socket,
    tokenizer: Future[_Loaded],
    phases: list[tuple[str, float]],
    begin: float,
) -> None:
    client = service.client
    loop = asyncio.get_running_loop()

    def end(at_once: bool) -> None:
        if at_once or server.should_exit:  # Ctrl-C, or a second signal
            client.fail("the server is shutting down")
        else:
            _log.info("stopping: running requests have %g s to finish", DRAIN_SECONDS)
            loop.call_later(DRAIN_SECONDS, client.fail, "the server is shutting down")
        server.should_exit = True

    loop.add_signal_handler(signal.SIGINT, end, True)
    loop.add_signal_handler(signal.SIGTERM, end, False)
    address = "http://{}:{}".format(*_for_url(listener))
    client.start()
    watch = asyncio.create_task(_watch(service, server, tokenizer, phases, begin, address))
    await server.serve(sockets=[listener])
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch  # raises what ended the server, if it was not a signal


async def _watch(
    service: Service,
    server: uvicorn.Server,
    tokenizer: Future[_Loaded],
    phases: list[tuple[str, float]],
    begin: float,
    address: str,
) -> None:
    """From the start to the death of the engine. Ends the server, whatever happens to it."""
    client, metrics = service.client, service.metrics
    try:
        loaded = await asyncio.wrap_future(tokenizer)
        phases.append(("tokenizer", loaded.seconds))
        await client.started.wait()
        if client.ready is None:
            raise EngineDead(client.error or "the engine did not start")
        _report(client.ready)
        if loaded.pinned is not None:
            check_prefix(loaded.pinned, client.ready.capacity)
            client.pin(loaded.pinned)
        service.tokenizer = loaded.tokenizer  # only now are requests taken: the beginning that stays comes before them
        metrics.ready(client.ready.capacity)
        _log.info(
            "ready after %.2f s; engine: %s; server: %s",
            time.perf_counter() - begin,
            _times(client.phases),
            _times(phases),
        )
        _log.info("Listening on %s", address)
        await client.dead.wait()
        metrics.engine_gone()
        _log.error("%s; open requests have failed, and the server ends", client.error)
        await asyncio.sleep(OBITUARY_SECONDS)
        raise EngineDead(client.error or "the engine is dead")
    finally:
        server.should_exit = True


def _times(phases: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases)


def _report(ready: ipc.Ready) -> None:
    """What was reserved, in bytes, and what that is good for."""
    capacity, details = ready.capacity, dict(ready.capacity.details)
    known = {"weights": "weights", "kv_cache": "KV cache", "workspace": "workspace"}
    used = sum(details.get(name, 0) for name in known)
    for name, label in known.items():
        if name in details:
            _log.info("memory: %s %s", label, log.exact_bytes(details[name]))
    if free := details.get("free_at_start"):
        share, budget = used / free, details.get("budget", free)
        _log.info(
            "memory: all of it is %s, %.1f %% of the %s that were free at start; allowed were %s",
            log.exact_bytes(used),
            100 * share,
            log.exact_bytes(free),
            log.exact_bytes(budget),
        )
    per_request = -(-capacity.max_model_len // capacity.block_size)
    _log.info(
        "KV cache: %d blocks of %d tokens; %d requests of the full length of %d tokens fit at once",
        capacity.num_blocks,
        capacity.block_size,
        capacity.num_blocks // per_request,
        capacity.max_model_len,
    )
    facts = "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in ready.details.items())
    _log.info("device: %s; %s", capacity.device, facts)


def _for_url(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()[:2]
    return (f"[{host}]" if ":" in host else host), port
