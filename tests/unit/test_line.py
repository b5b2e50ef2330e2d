"""The waiting line: fair, bounded, woken by news."""

import asyncio

import pytest

from cluster.errors import CapacityError
from router.line import WaitingLine


async def test_turns_come_in_arrival_order():
    line = WaitingLine(max_waiting=10, timeout_s=10)
    order: list[int] = []
    gate = asyncio.Event()

    async def member(number: int) -> None:
        async with line.turn():
            if number == 0:
                await gate.wait()
            order.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(member(number))
            await asyncio.sleep(0)
        gate.set()
    assert order == [0, 1, 2, 3, 4]
    assert len(line) == 0


async def test_a_full_line_refuses_at_once():
    line = WaitingLine(max_waiting=1, timeout_s=10)
    gate = asyncio.Event()

    async def member() -> None:
        async with line.turn():
            await gate.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(member())
        group.create_task(member())
        await asyncio.sleep(0)
        with pytest.raises(CapacityError):
            async with line.turn():
                pass
        gate.set()


async def test_a_stay_is_bounded_in_time_and_the_next_one_moves_up():
    line = WaitingLine(max_waiting=10, timeout_s=0.05)
    with pytest.raises(CapacityError):
        async with line.turn():
            await line.changed(60)
    async with line.turn():
        pass


async def test_cancelled_members_leave_the_line():
    line = WaitingLine(max_waiting=10, timeout_s=10)

    async def member() -> None:
        async with line.turn():
            await line.changed(60)

    tasks = [asyncio.create_task(member()) for _ in range(3)]
    await asyncio.sleep(0)
    assert len(line) == 3
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(line) == 0


async def test_news_wakes_the_head():
    line = WaitingLine(max_waiting=10, timeout_s=10)
    waiter = asyncio.create_task(line.changed(60))
    await asyncio.sleep(0)
    line.notify()
    await asyncio.wait_for(waiter, 5)
