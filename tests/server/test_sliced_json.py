"""A list is encoded as a whole, while others have their turns."""

import asyncio
import json
from collections.abc import Iterator

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from server.sliced_json import json_list
from tests.server.live_server import LiveServer

VALUES = st.recursive(
    st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists
)


@given(st.lists(VALUES, max_size=20), st.integers(1, 7))
def test_slices_make_the_whole(values: list[object], slice_size: int) -> None:
    encoded = msgspec.json.encode({"list": asyncio.run(json_list(values, slice_size))})
    assert json.loads(encoded) == {"list": values}


def test_others_run_between_two_slices() -> None:
    made = 0
    seen = []

    def items() -> Iterator[int]:
        nonlocal made
        for number in range(1, 11):
            made = number
            yield number

    async def watch() -> None:
        while made < 10:
            seen.append(made)
            await asyncio.sleep(0)

    async def check() -> None:
        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await json_list(items(), 3)
        await watching

    asyncio.run(check())
    assert seen == [0, 3, 6, 9]


def test_long_answers_are_complete(server: LiveServer) -> None:
    text = "ab" * 5000
    body = server.post_json(
        "/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    ).json()
    assert body == {"count": 10_000, "max_model_len": 512, "tokens": [*text.encode()], "token_strs": [*text]}
