"""Anthropic's Python client: messages, streams, tools, token counts, errors."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["TWOSTEP_URL"], api_key="none")
model = os.environ["TWOSTEP_MODEL"]
asked = {
    "model": model,
    "messages": [{"role": "user", "content": "Say something about lists."}],
    "extra_body": {"temperature": 0},
}
TOOL = {
    "name": "find_city",
    "description": "Finds a city.",
    "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}


def whole_and_streamed() -> None:
    whole = client.messages.create(**asked, max_tokens=12, system="Be brief.")
    with client.messages.stream(**asked, max_tokens=12, system="Be brief.") as stream:
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens <= 12
    assert whole.stop_reason in ("end_turn", "max_tokens") and whole.role == "assistant"


def tools() -> None:
    asked_tools = {**asked, "tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 200}
    whole = client.messages.create(**asked_tools)
    [use] = [block for block in whole.content if block.type == "tool_use"][:1]
    assert use.name == "find_city" and isinstance(use.input["name"], str) and whole.stop_reason == "tool_use"
    with client.messages.stream(**asked_tools) as stream:
        streamed = stream.get_final_message()
    assert next(block.input for block in streamed.content if block.type == "tool_use") == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "found"}
    history = [*asked["messages"], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    client.messages.create(model=model, messages=history, tools=[TOOL], max_tokens=4)


def counts() -> None:
    counted = client.messages.count_tokens(model=model, messages=asked["messages"])
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def errors() -> None:
    try:
        client.messages.create(**{**asked, "model": "nobody"}, max_tokens=4)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("an unknown model was not refused")


for check in (whole_and_streamed, tools, counts, errors):
    check()
    print(check.__name__, "works")
