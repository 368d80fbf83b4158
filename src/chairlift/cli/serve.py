"""``chairlift serve``: the OpenAI-compatible server."""

from __future__ import annotations

from chairlift.cli.options import ModelArgument, config_options
from chairlift.config import DEFAULT_MODEL, EngineConfig, ServerConfig


@config_options
def serve(*, model: ModelArgument = DEFAULT_MODEL, engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Serve a model over HTTP, with continuous batching. Ctrl-C ends it."""
    from chairlift import models, server
    from chairlift.cli.session import fetch

    fetch(model)
    server.run(engine_config, server_config, lambda: models.load_tokenizer(model))
