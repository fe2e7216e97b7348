"""OpenAI's Python client: completions, chat, tools, structured output, embeddings, responses, errors."""

import json
import os

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{os.environ['TWOSTEP_URL']}/v1", api_key="none")
model = os.environ["TWOSTEP_MODEL"]
messages = [{"role": "user", "content": "Say something about lists."}]


class City(BaseModel):
    name: str
    inhabitants: int


TOOL = {
    "type": "function",
    "function": {
        "name": "find_city",
        "description": "Finds a city.",
        "parameters": {**City.model_json_schema(), "additionalProperties": False},
        "strict": True,
    },
}


def completions() -> None:
    whole = client.completions.create(model=model, prompt="A list is", max_tokens=8, seed=1, logprobs=2)
    stream = client.completions.create(model=model, prompt="A list is", max_tokens=8, seed=1, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert whole.usage is not None and whole.usage.completion_tokens <= 8
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.token_logprobs


def chat() -> None:
    whole = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=12, seed=1)
    with client.chat.completions.stream(
        model=model, messages=messages, max_completion_tokens=12, seed=1, stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage is not None and final.usage.total_tokens == whole.usage.total_tokens
    scored = client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=3, logprobs=True, top_logprobs=2, n=2
    )
    assert len(scored.choices) == 2 and len(scored.choices[0].logprobs.content[0].top_logprobs) == 2


def structured() -> None:
    answer = client.chat.completions.parse(
        model=model, messages=messages, response_format=City, max_completion_tokens=200, seed=1
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(answer.choices[0].message.parsed, City)


def tools() -> None:
    asked = {"model": model, "messages": messages, "tools": [TOOL], "tool_choice": "required", "seed": 1}
    whole = client.chat.completions.create(**asked, max_completion_tokens=200)
    [call, *_] = whole.choices[0].message.tool_calls
    assert call.function.name == "find_city" and whole.choices[0].finish_reason == "tool_calls"
    City.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**asked, max_completion_tokens=200) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert next(each.function.arguments for each in streamed) == call.function.arguments
    reply = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"found": True})}
    history = [*messages, whole.choices[0].message.model_dump(exclude_none=True), reply]
    client.chat.completions.create(model=model, messages=history, tools=[TOOL], max_completion_tokens=4)


def responses() -> None:
    whole = client.responses.create(model=model, input="Say something.", max_output_tokens=12, store=False)
    assert whole.output_text and whole.usage.output_tokens <= 12
    with client.responses.stream(model=model, input="Say something.", max_output_tokens=12) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


def embeddings() -> None:
    answer = client.embeddings.create(model=model, input=["a list", "a dictionary"])
    plain = client.embeddings.create(model=model, input="a list", encoding_format="float")
    assert answer.data[0].embedding == plain.data[0].embedding != answer.data[1].embedding


def errors() -> None:
    for kind, fields in (
        (openai.NotFoundError, {"model": "nobody", "messages": messages}),
        (openai.BadRequestError, {"model": model, "messages": messages, "temperature": -1}),
        (openai.BadRequestError, {"model": model, "messages": [{"role": "nobody", "content": ""}]}),
    ):
        try:
            client.chat.completions.create(**fields)
        except kind as error:
            assert error.code and error.body["message"]
        else:
            raise AssertionError(f"{fields} was not refused")


assert model in [each.id for each in client.models.list()]
for check in (completions, chat, structured, tools, embeddings, responses, errors):
    check()
    print(check.__name__, "works")
