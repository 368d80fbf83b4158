"""Notices an engine that has work and does none, has it tell what it is doing, and ends it, so that it is replaced."""

from __future__ import annotations

import asyncio

from chairlift import log
from chairlift.server.client import EngineClient
from chairlift.server.supervisor import Supervisor

TICK_SECONDS = 0.5
STOPPED_SECONDS = 1.5  # an engine held by a signal is given so long to go on
LAST_WORDS_SECONDS = 1.0  # for a stuck engine to tell what it is doing

_log = log.get("watchdog")


class Watchdog:
    """Counts the time in which an engine could have said something and did not.

    It is counted in ticks of the event loop, so that time in which this process itself stood still does not count.
    """

    def __init__(self, client: EngineClient, supervisor: Supervisor, seconds: float) -> None:
        """``seconds``: how long a step may take; 0 for any time."""
        self._client = client
        self._supervisor = supervisor
        self._limit = seconds
        self._silent = 0.0
        self._heard = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        while self._limit:
            await asyncio.sleep(TICK_SECONDS)
            if self._is_stuck():
                await self._end()

    def _is_stuck(self) -> bool:
        client = self._client
        if client.busy and client.num_steps == self._heard:
            self._silent += TICK_SECONDS
        else:
            self._silent, self._heard = 0.0, client.num_steps
        if self._silent >= self._limit:
            return True
        return self._silent >= STOPPED_SECONDS and self._supervisor.is_stopped

    async def _end(self) -> None:
        epoch, silent, self._silent = self._supervisor.epoch, self._silent, 0.0
        stopped = self._supervisor.is_stopped
        if stopped:
            _log.error("the engine is held by a signal, such as SIGSTOP, with %d open requests", self._client.num_open)
        else:
            _log.error(
                "the engine has finished no step for %.1f s, with %d open requests (--watchdog-seconds %g); it is at:",
                silent,
                self._client.num_open,
                self._limit,
            )
            self._supervisor.dump()
            await asyncio.sleep(LAST_WORDS_SECONDS)
        if self._supervisor.epoch == epoch:
            self._supervisor.end(stuck=not stopped)
