"""Renders an untrusted template, sent by a client, in a process of its own with hard limits on time and memory.

`python -m engine.text.template_sandbox` renders one job from standard input. In the server process a template could
do harm without leaving jinja's sandbox: `{{ 9 ** (9 ** 9) }}` blocks the interpreter for ever.
"""

import asyncio
import json
import sys
from collections.abc import Mapping

import msgspec

from engine.core.errors import InvalidParameterError
from engine.host.bounded_process import limit_this_process, run_bounded
from engine.host.python_module import module_command
from engine.text.chat_template import MAX_SECONDS, ChatTemplate, Conversation

COMMAND = module_command("engine.text.template_sandbox")
_MAX_BYTES = 1 << 30
_MAX_CPU_S = 2


class _Job(msgspec.Struct, frozen=True):
    """Arguments of one rendering."""

    source: str
    conversation: Conversation
    named_tokens: dict[str, str]


class _Result(msgspec.Struct, frozen=True):
    """The rendered text, or why there is none."""

    text: str
    refused_param: str | None = None
    """Name of the request parameter at fault, if the job was refused; `text` is then the reason."""


async def render_isolated(source: str, conversation: Conversation, named_tokens: Mapping[str, str]) -> str:
    """Returns the prompt, rendered by a child process, which takes about 0.2 s and is killed if this call is cancelled.

    Raises InvalidParameterError.
    """
    job = await asyncio.to_thread(_encode, _Job(source, conversation, dict(named_tokens)))
    try:
        output = await run_bounded(COMMAND, job, MAX_SECONDS)
    except TimeoutError:
        raise _refusal(f"it takes more than {MAX_SECONDS:g} seconds") from None
    if output is None:
        raise _refusal(f"it needs more than {_MAX_CPU_S} seconds or {_MAX_BYTES >> 20} MiB")
    result = msgspec.json.decode(output, type=_Result)
    if result.refused_param is not None:
        raise InvalidParameterError(result.refused_param, result.text)
    return result.text


def _encode(job: _Job) -> bytes:
    return json.dumps(msgspec.to_builtins(job)).encode()


def _refusal(reason: str) -> InvalidParameterError:
    return InvalidParameterError("chat_template", f"The chat template cannot be rendered: {reason}.")


def main() -> None:
    job = msgspec.convert(json.loads(sys.stdin.buffer.read()), _Job)
    limit_this_process(_MAX_BYTES, _MAX_CPU_S)
    sys.stdout.buffer.write(msgspec.json.encode(_render(job)))


def _render(job: _Job) -> _Result:
    try:
        return _Result(ChatTemplate(job.source).render(job.conversation, job.named_tokens))
    except InvalidParameterError as error:
        if isinstance(error.__cause__, MemoryError):
            raise
        return _Result(str(error).encode(errors="backslashreplace").decode(), error.param)  # no lone surrogates


if __name__ == "__main__":
    main()
