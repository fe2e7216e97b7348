"""Every item reaches the one reader, once and in order."""

import asyncio

import pytest

from engine.client.mailbox import Mailbox


def test_items_come_in_their_order_whether_waited_for_or_not() -> None:
    async def check() -> None:
        box: Mailbox[int] = Mailbox()
        reading = asyncio.create_task(take(box, 5))
        await asyncio.sleep(0)
        for number in range(3):
            box.put(number)
        await asyncio.sleep(0)
        for number in range(3, 6):
            box.put(number)
        assert await reading == [0, 1, 2, 3, 4]
        assert await box.get() == 5

    asyncio.run(check())


def test_a_reader_that_has_fallen_behind_leaves_others_their_turns() -> None:
    async def check() -> None:
        box: Mailbox[int] = Mailbox()
        for number in range(100):
            box.put(number)
        reading, num_turns = asyncio.create_task(take(box, 100)), 0
        while not reading.done():
            await asyncio.sleep(0)
            num_turns += 1
        assert num_turns >= 100

    asyncio.run(check())


def test_an_item_that_a_cancelled_reader_was_woken_for_is_there_for_the_next() -> None:
    async def check() -> None:
        box: Mailbox[int] = Mailbox()
        reading = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        box.put(1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await box.get() == 1

    asyncio.run(check())


def test_a_cancelled_reader_does_not_stop_the_writer() -> None:
    async def check() -> None:
        box: Mailbox[int] = Mailbox()
        reading = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,))
        box.put(1)
        box.put(2)
        assert await take(box, 2) == [1, 2]

    asyncio.run(check())


async def take(box: Mailbox[int], count: int) -> list[int]:
    return [await box.get() for _ in range(count)]
