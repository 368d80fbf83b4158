"""The API process: OpenAI's HTTP API in front, the engine process behind.

| module      | what it holds                                              |
|-------------|------------------------------------------------------------|
| main        | `run`: start, signals, end                                 |
| supervisor  | the engine process: spawned, watched, ended, followed      |
| ipc         | the messages between the two processes                     |
| client      | requests to the engine, and what comes back for each       |
| journal     | what a live request has been given: it can be sent again   |
| watchdog    | an engine that is stuck is ended                           |
| recovery    | who is sent to the next engine, and who is to blame        |
| service     | tokenising, limits, and the life of one generation         |
| text        | from tokens to text: incremental decoding and stop strings |
| choices     | which of a prompt's samples are returned                   |
| prefix      | --pin-prefix, as tokens                                    |
| tenants     | on whose behalf a request comes, and how urgently          |
| inspection  | live requests, and the life of one, for a person           |
| bodies      | JSON bodies: parsed, or told what is wrong                 |
| schemas     | what clients may send                                      |
| responses   | what they get                                              |
| streaming   | how they get it: whole or as events; disconnects           |
| routes      | the endpoints                                              |
| errors      | exceptions in OpenAI's shape                               |
| metrics     | Prometheus                                                 |
| goodput     | which samples were in time                                 |
| preemptions | the warning about them                                     |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chairlift.config import EngineConfig, ServerConfig
    from chairlift.server.text import Tokenizer


def run(engine_config: EngineConfig, server_config: ServerConfig, tokenizer_factory: Callable[[], Tokenizer]) -> None:
    """Serves until SIGINT or SIGTERM.

    ``tokenizer_factory`` is called in this process while the engine loads in its own. Raises ConfigError if the
    address cannot be listened on, EngineDead if the engine cannot start or dies.
    """
    from chairlift.server import main  # not above: the engine process imports this package for ipc alone

    main.run(engine_config, server_config, tokenizer_factory)
