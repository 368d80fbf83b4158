"""The life of `chairlift serve`: start both processes side by side, report, serve, and leave nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from chairlift import log
from chairlift.config import EngineConfig, ServerConfig
from chairlift.core.plan import StepStats
from chairlift.errors import ConfigError, EngineDead
from chairlift.server import ipc, supervisor
from chairlift.server.prefix import fitting_tokens, read_prefix
from chairlift.server.text import Tokenizer

if TYPE_CHECKING:  # imported while the engine loads: see run()
    import uvicorn

    from chairlift.server.service import Service
    from chairlift.server.watchdog import Watchdog

DRAIN_SECONDS = 10.0  # for running requests after SIGTERM
OBITUARY_SECONDS = 2.0  # for clients and probes to hear that the engine is dead, before this process ends too

_BACKGROUND = "tokenizer"  # name of threads

_log = log.get("server")

T = TypeVar("T")


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
        path = engine_config.pin_prefix
        prefix = None if path is None else read_prefix(path)
        engine = supervisor.Supervisor(engine_config, server_config, command)
        try:
            phases = [("interpreter", time.perf_counter() - begin)]
            tokenizer = _in_background(lambda: _load(tokenizer_factory))
            service, server, watchdog = _build(engine, engine_config, server_config, phases)
            asyncio.run(_serve(service, server, listener, tokenizer, prefix, phases, begin, watchdog))
        finally:
            _stop(engine)
    if any(thread.name == _BACKGROUND for thread in threading.enumerate()):
        # It cannot be interrupted, nor survive the end of the interpreter while it is in foreign code.
        logging.shutdown()
        os._exit(0)


def _stop(engine: supervisor.Supervisor) -> None:
    """Another signal ends it at once."""
    try:
        with _ends_on_sigterm():  # the event loop has left the signals at their defaults
            engine.stop()
    except _Ended:
        engine.kill()


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
    seconds: float


def _load(factory: Callable[[], Tokenizer]) -> _Loaded:
    begin = time.perf_counter()
    return _Loaded(factory(), time.perf_counter() - begin)


def _in_background(work: Callable[[], T]) -> Future[T]:
    """Does the work in a thread that the end of this process does not wait for."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=_BACKGROUND, daemon=True).start()
    return future


def _build(
    engine: supervisor.Supervisor,
    engine_config: EngineConfig,
    server_config: ServerConfig,
    phases: list[tuple[str, float]],
) -> tuple[Service, uvicorn.Server, Watchdog]:
    """The HTTP side. Its imports take a good part of a second, so they run while the engine loads."""
    begin = time.perf_counter()
    import uvicorn

    from chairlift.server.app import create_app
    from chairlift.server.client import EngineClient
    from chairlift.server.metrics import Metrics
    from chairlift.server.preemptions import PreemptionLog
    from chairlift.server.service import Service
    from chairlift.server.watchdog import Watchdog

    class Server(uvicorn.Server):
        """Signals are handled in _serve; uvicorn would raise them again at the end, past our own clean-up."""

        def capture_signals(self) -> Any:
            return nullcontext()

    metrics = Metrics()
    preemptions = PreemptionLog(engine_config, _log)

    def on_step(stats: StepStats) -> None:
        metrics.step(stats)
        preemptions.step(stats)

    def on_change() -> None:
        metrics.restarted() if client.restarting else metrics.ready(client.capacity)

    client = EngineClient(engine, on_step, on_change)
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
    return service, Server(config), Watchdog(client, engine, server_config.watchdog_seconds)


def _names(model: str, config: ServerConfig) -> list[str]:
    """The shown name first, then the others by which clients may call the model."""
    own = Path(model).name if os.path.exists(model) else model
    return list(dict.fromkeys([config.served_model_name or own, own, model]))


async def _serve(
    service: Service,
    server: uvicorn.Server,
    listener: socket.socket,
    tokenizer: Future[_Loaded],
    prefix: str | None,
    phases: list[tuple[str, float]],
    begin: float,
    watchdog: Watchdog,
) -> None:
    from chairlift.server.client import ShuttingDown

    client = service.client
    loop = asyncio.get_running_loop()

    def cut() -> None:
        if client.failure is None:
            client.fail(ShuttingDown("the server is shutting down"))
            if client.num_failed:
                _log.warning("open requests that did not finish: %d; they end with an error", client.num_failed)

    def end(at_once: bool) -> None:
        if at_once or server.should_exit:  # Ctrl-C, or a second signal
            cut()
        else:
            _log.info("stopping: running requests have %g s to finish", DRAIN_SECONDS)
            loop.call_later(DRAIN_SECONDS, cut)
        server.should_exit = True

    loop.add_signal_handler(signal.SIGINT, end, True)
    loop.add_signal_handler(signal.SIGTERM, end, False)
    address = "http://{}:{}".format(*_for_url(listener))
    client.start()
    guard = asyncio.create_task(watchdog.run())
    watch = asyncio.create_task(_watch(service, server, tokenizer, prefix, phases, begin, address))
    await server.serve(sockets=[listener])
    guard.cancel()
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch  # raises what ended the server, if it was not a signal
    if client.dead.is_set():  # even if a signal came on top
        raise EngineDead(client.death)


async def _watch(
    service: Service,
    server: uvicorn.Server,
    tokenizer: Future[_Loaded],
    prefix: str | None,
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
            raise EngineDead(client.death)
        ready = client.ready
        _report(ready)
        if prefix is not None:
            text = prefix
            tokens = _in_background(lambda: fitting_tokens(text, loaded.tokenizer, ready.capacity, ready.chunk))
            token_ids = await asyncio.wrap_future(tokens)
            client.pin(token_ids)
        service.tokenizer = loaded.tokenizer  # only now are requests taken: the beginning that stays comes before them
        metrics.ready(ready.capacity)
        _log.info(
            "ready after %.2f s; engine: %s; server: %s",
            time.perf_counter() - begin,
            _times(client.phases),
            _times(phases),
        )
        _log.info("Listening on %s", address)
        await client.dead.wait()
        metrics.engine_gone()
        _log.error("%s; open requests that have failed: %d; the server ends", client.death, client.num_failed)
        await asyncio.sleep(OBITUARY_SECONDS)
        raise EngineDead(client.death)
    finally:
        server.should_exit = True


def _times(phases: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases)


def _report(ready: ipc.Ready) -> None:
    """What was reserved, in bytes, and what that is good for."""
    capacity, details = ready.capacity, dict(ready.capacity.details)
    known = {"weights": "weights", "kv_cache": "KV cache", "workspace": "workspace", "swap_space": "swap space"}
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
    at_once = capacity.num_blocks // ready.held(capacity.max_model_len)
    _log.info(
        "KV cache: %d blocks of %d tokens; %d %s of the full length of %d tokens %s at once",
        capacity.num_blocks,
        capacity.block_size,
        at_once,
        "request" if at_once == 1 else "requests",
        capacity.max_model_len,
        "fits" if at_once == 1 else "fit",
    )
    facts = "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in ready.details.items())
    _log.info("device: %s; %s", capacity.device, facts)


def _for_url(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()[:2]
    return (f"[{host}]" if ":" in host else host), port
