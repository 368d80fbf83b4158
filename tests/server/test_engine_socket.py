"""The engine process's end of the socket: how long it waits, and what it makes of the messages."""

from __future__ import annotations

import time

import zmq

from chairlift.core import ports
from chairlift.core.ports import Report
from chairlift.engine_main import IDLE_SECONDS, SocketSink, SocketSource
from chairlift.server import ipc


class FakeSocket:
    """Gives out the frames it is made with; remembers for how long it was asked to wait, in ms."""

    def __init__(self, *messages):
        self.frames = [ipc.encode(message) for message in messages]
        self.waits = []
        self.sent = []

    def poll(self, milliseconds):
        self.waits.append(milliseconds)

    def recv(self, flags):
        if not self.frames:
            raise zmq.Again
        return self.frames.pop(0)

    def send(self, frame):
        self.sent.append(ipc.decode_for_api(frame))


def waits(idle, until=None):
    socket = FakeSocket()
    assert SocketSource(socket, 0).take(idle, until) == []
    return socket.waits


def test_an_idle_engine_waits_but_not_beyond_what_it_must():
    """A boarding delay, or a deadline in the queue, ends the wait."""
    idle = int(IDLE_SECONDS * 1000)
    assert waits(False) == [] and waits(False, until=0.0) == []
    assert waits(True) == [idle]
    assert waits(True, until=time.monotonic() + 1000) == [idle]
    assert waits(True, until=time.monotonic() - 1) == [0]
    (wait,) = waits(True, until=time.monotonic() + IDLE_SECONDS / 2)
    assert 0 <= wait <= idle // 2


def test_messages_in_the_cores_form():
    """Those of another epoch are for another engine; after Stop nothing more is taken."""
    source = SocketSource(
        FakeSocket(
            ipc.Pin(1, (5, 6)),
            ipc.Inspect(0, 1, "old"),
            ipc.Inspect(1, 7, "r-0"),
            ipc.Abort(1, "r-0", 2),
            ipc.Stop(1),
            ipc.Inspect(1, 8),
        ),
        epoch=1,
    )
    assert source.take(False) == [ports.Pin((5, 6)), ports.Inspect(7, "r-0"), ports.Abort("r-0", 2)]
    assert source.stopped


def test_an_answer_comes_as_it_was_given():
    socket = FakeSocket()
    report = Report(3, life=(ports.LifeLine(0.5, 1, 2, 0, "decode", "2 tokens"),))
    SocketSink(socket, 4).answer(report)
    assert socket.sent == [ipc.Answer(4, report)]
