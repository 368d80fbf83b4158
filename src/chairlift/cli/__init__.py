"""The command line: ``chairlift serve | chat | generate | pull | explain | doctor | bench``."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. An error that a person can act on is one line on stderr and exit code 1."""
    import typer

    from chairlift.cli import bench, chat, doctor, explain, generate, pull, serve
    from chairlift.cli.options import refuse_foreign
    from chairlift.errors import ChairliftError

    app = typer.Typer(
        help="An LLM serving engine built on continuous batching.", no_args_is_help=True, pretty_exceptions_enable=False
    )
    app.callback(invoke_without_command=True)(_options)
    app.command()(serve.serve)
    app.command()(chat.chat)
    app.command()(generate.generate)
    app.command()(pull.pull)
    app.command()(explain.explain)
    app.command()(doctor.doctor)
    app.add_typer(bench.app, name="bench", help="Measure the engine.")
    try:
        refuse_foreign(sys.argv[1:])
        app()
    except ChairliftError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


def _options(version: bool = False) -> None:
    if version:
        import typer

        from chairlift.versions import installed

        print(installed())
        raise typer.Exit()
