"""Who wakes whom: the buffer's waits, their deadlines and the hard check on the lag."""

import asyncio

import pytest

from sidestep.buffer.buffer import GroupBuffer
from sidestep.buffer.ledger import Ledger
from sidestep.errors import LagError, StalledError
from sidestep.types import Completion, Example, Group, Prompt


def group_of(index: int, *versions: int) -> Group:
    completion = Completion((1,) * len(versions), (-0.5,) * len(versions), versions, "stop")
    return Group(index, Prompt(index, Example("q"), (1,)), (completion,))


def buffer_of(*, max_lag=1, steps=4, timeout_s=5.0) -> GroupBuffer:
    ledger = Ledger(groups_per_step=2, max_lag=max_lag, total_steps=steps)
    return GroupBuffer(ledger, timeout_s=timeout_s)


def test_take_is_woken_by_the_last_missing_group_even_if_later_ones_came_first():
    async def scenario():
        buffer = buffer_of()
        assert await buffer.admit(10) == (0, 1, 2, 3)
        taking = asyncio.create_task(buffer.take(0))
        for index in (3, 2, 1):
            buffer.put(group_of(index, 0))
            await asyncio.sleep(0)
            assert not taking.done()
        buffer.put(group_of(0, 0))
        groups = await taking
        assert groups is not None
        assert [group.index for group in groups] == [0, 1]

    asyncio.run(scenario())


def test_admit_is_woken_by_the_end_of_a_step_and_by_a_drop():
    async def scenario():
        buffer = buffer_of(max_lag=0)
        for index in await buffer.admit(10):
            buffer.put(group_of(index, 0))
        await buffer.take(0)
        admitting = asyncio.create_task(buffer.admit(10))
        await asyncio.sleep(0)
        assert not admitting.done()
        buffer.step_over()
        assert await admitting == (2, 3)
        admitting = asyncio.create_task(buffer.admit(10))
        await asyncio.sleep(0)
        buffer.drop(3)
        assert await admitting == (4,)

    asyncio.run(scenario())


def test_b55_lag_is_counted_from_the_oldest_token_and_checked():
    async def scenario():
        buffer = buffer_of(max_lag=3)
        for index in await buffer.admit(2):
            buffer.put(group_of(index, 0, 1, 2))
        with pytest.raises(LagError, match=r"group 0 has lag 4 \(version 4, sampled by 0\)"):
            await buffer.take(4)

    asyncio.run(scenario())


def test_a_token_from_the_future_breaks_the_bound_too():
    async def scenario():
        buffer = buffer_of()
        for index in await buffer.admit(2):
            buffer.put(group_of(index, 5))
        with pytest.raises(LagError, match="lag -1"):
            await buffer.take(4)

    asyncio.run(scenario())


def test_waits_end_with_who_and_for_whom():
    async def scenario():
        buffer = buffer_of(timeout_s=0.05)
        await buffer.admit(10)
        with pytest.raises(StalledError, match=r"train waited for groups: 2 in flight .* first 0"):
            await buffer.take(0)

    asyncio.run(scenario())


def test_b52_once_everything_is_admitted_the_rollout_side_waits_without_a_deadline():
    async def scenario():
        buffer = buffer_of(steps=1, timeout_s=0.02)
        assert await buffer.admit(10) == (0, 1)
        with pytest.raises(TimeoutError):  # ours, not the buffer's StalledError
            async with asyncio.timeout(0.1):
                await buffer.admit(10)

    asyncio.run(scenario())


def test_close_wakes_the_trainer_with_nothing():
    async def scenario():
        buffer = buffer_of()
        taking = asyncio.create_task(buffer.take(0))
        await asyncio.sleep(0)
        buffer.close()
        assert await taking is None

    asyncio.run(scenario())
