"""Ollama's Python client: models, chats, streams, tools, schemas, thinking refused, errors."""

import json
import os

import ollama

client = ollama.Client(host=os.environ["TWOSTEP_URL"])
model = os.environ["TWOSTEP_MODEL"]
asked = {"model": model, "messages": [{"role": "user", "content": "Say something about lists."}]}
greedy = {"temperature": 0, "num_predict": 12, "num_ctx": 4096}


def models() -> None:
    [listed] = [each for each in client.list().models if each.model == model]
    assert listed.size > 0 and listed.details.family
    shown = client.show(f"{model}:latest")
    assert "tools" in shown.capabilities
    family = shown.modelinfo["general.architecture"]
    [loaded] = [each for each in client.ps().models if each.model == model]
    assert loaded.context_length == shown.modelinfo[f"{family}.context_length"] > 0


def whole_and_streamed() -> None:
    whole = client.chat(**asked, options=greedy, keep_alive="5m")
    parts = list(client.chat(**asked, options=greedy, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content != ""
    last = parts[-1]
    assert last.done and not any(part.done for part in parts[:-1])
    assert (last.done_reason, last.eval_count) == (whole.done_reason, whole.eval_count)
    assert last.prompt_eval_count == whole.prompt_eval_count > 0
    assert last.total_duration > last.eval_duration > 0


def generated() -> None:
    whole = client.generate(model, "Say something about lists.", options=greedy)
    assert whole.response == client.chat(**asked, options=greedy).message.content
    raw = client.generate(model, "A list is", raw=True, options=greedy)
    assert raw.response and raw.prompt_eval_count < whole.prompt_eval_count
    assert client.generate(model).done_reason == "load"


def find_city(name: str) -> str:
    """Finds a city.

    Args:
        name: The city's name.
    """
    return f"found {name}"


def tools() -> None:
    call = {"function": {"name": "find_city", "arguments": {"name": "Oslo"}}}
    history = [
        *asked["messages"],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "find_city", "content": "found Oslo"},
    ]
    assert client.chat(model, history, tools=[find_city], options=greedy).done


def schemas() -> None:
    schema = {
        "type": "object",
        "properties": {"cups": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["cups"],
    }
    answered = client.chat(**asked, format=schema, options={"temperature": 0, "num_predict": 60})
    assert isinstance(json.loads(answered.message.content)["cups"], int)
    as_json = client.generate(model, "An object", format="json", options={"temperature": 0, "num_predict": 200})
    if as_json.done_reason == "stop":
        assert isinstance(json.loads(as_json.response), dict)


def errors() -> None:
    for fields, status, words in (
        ({"model": "nobody"}, 404, "not served"),
        ({"options": {"mirostat": 1}}, 400, "mirostat"),
        ({"think": True}, 400, "does not think"),
    ):
        try:
            client.chat(**{**asked, **fields})
        except ollama.ResponseError as error:
            assert error.status_code == status and words in error.error, error
        else:
            raise AssertionError(f"{fields} was not refused")
    try:
        client.pull("another")
    except ollama.ResponseError as error:
        assert "not supported" in error.error
    else:
        raise AssertionError("a model was pulled")


for check in (models, whole_and_streamed, generated, tools, schemas, errors):
    check()
    print(check.__name__, "works")
