"""The bridge between event loop and engine thread."""

import asyncio
import threading

import pytest

from cluster.loop import EngineThread, Turn


class _Echo:
    """Emits each command once; raises on "boom"."""

    def __init__(self, fail_open=False):
        self._fail_open = fail_open
        self._held = []
        self.threads = set()

    def open(self):
        self.threads.add(threading.get_ident())
        if self._fail_open:
            raise ValueError("cannot load")

    def handle(self, command):
        self.threads.add(threading.get_ident())
        if command == "boom":
            raise ValueError("boom")
        self._held.append(command)

    def step(self, now_s):
        self.threads.add(threading.get_ident())
        events, self._held = self._held, []
        return Turn(events, None)


def _engine(core):
    events: asyncio.Queue = asyncio.Queue()
    failures: asyncio.Queue = asyncio.Queue()

    def deliver(batch):
        for event in batch:
            events.put_nowait(event)

    engine = EngineThread("test", core, deliver=deliver, failed=failures.put_nowait)
    return engine, events, failures


async def test_commands_come_back_as_events_in_order_from_one_thread():
    core = _Echo()
    engine, events, _ = _engine(core)
    await engine.start()
    for number in range(100):
        engine.post(number)
    got = [await asyncio.wait_for(events.get(), 5) for _ in range(100)]
    await engine.stop()
    assert got == list(range(100))
    assert len(core.threads) == 1
    assert threading.get_ident() not in core.threads


async def test_an_idle_engine_sleeps_and_wakes_for_a_command():
    engine, events, _ = _engine(_Echo())
    await engine.start()
    assert engine.step_age_s() == 0.0
    engine.post("late")
    assert await asyncio.wait_for(events.get(), 5) == "late"
    await engine.stop()


async def test_a_failed_open_is_raised_by_start():
    engine, _, _ = _engine(_Echo(fail_open=True))
    with pytest.raises(ValueError, match="cannot load"):
        await engine.start()


async def test_a_core_that_raises_reports_it_once_and_at_once():
    engine, _, failures = _engine(_Echo())
    await engine.start()
    engine.post("boom")
    error = await asyncio.wait_for(failures.get(), 5)
    assert isinstance(error, ValueError)
    assert engine.error is error
    await engine.stop()


async def test_a_receiver_that_raises_is_a_failure_too():
    failures: asyncio.Queue = asyncio.Queue()
    delivered = []

    def deliver(events):
        delivered.extend(events)
        raise ValueError("lost track")

    engine = EngineThread("test", _Echo(), deliver=deliver, failed=failures.put_nowait)
    await engine.start()
    engine.post("first")
    error = await asyncio.wait_for(failures.get(), 5)
    assert str(error) == "lost track"
    engine.post("second")
    await engine.stop()
    assert engine.error is error
    assert delivered == ["first"]
    assert failures.empty()
