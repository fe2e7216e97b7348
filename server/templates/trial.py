"""Tries a chat template in a process of its own with hard limits on time and memory, before the server runs it itself.

Whoever writes `{{ 'a' * 10 ** 10 }}` into a checkpoint would keep a start busy for minutes, deaf to signals. So
`python -m server.templates.trial` first does with a template, given on standard input, all that a start does with it:
what went well there takes the server as little.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from engine.core.errors import InvalidParameterError
from engine.host.bounded_process import limit_this_process, run_bounded
from engine.host.python_module import module_command
from engine.text.chat_template import ChatTemplate, Conversation
from server.templates.message_shaping import TemplateCapabilities
from server.tools.model_format import DialectSettings

__all__ = ["render_probe", "try_template"]

COMMAND = module_command("server.templates.trial")
MAX_CPU_S = 2
"""All probes of a template take 0.1 s together."""
_MAX_BYTES = 1 << 29
_TIMEOUT_S = 30.0
"""CPU time is the limit that counts: a busy machine is no fault of the template."""
MAX_SOURCE_CHARS = 1 << 20
MAX_PROBE_CHARS = 1 << 18
"""Templates write a few thousand characters around the probes."""


class _Job(msgspec.Struct, frozen=True):
    source: str
    named_tokens: dict[str, str]
    dialects: DialectSettings


async def try_template(source: str, named_tokens: Mapping[str, str], dialects: DialectSettings) -> None:
    """Raises InvalidParameterError, naming `chat_template`, for a template that is not valid or takes too much. It
    takes about half a second, and ends with this call, cancelled or not."""
    if len(source) > MAX_SOURCE_CHARS:
        raise _refusal(f"it has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
    job = await asyncio.to_thread(msgspec.json.encode, _Job(source, dict(named_tokens), dialects))
    try:
        fault = await run_bounded(COMMAND, job, _TIMEOUT_S)
    except TimeoutError:
        raise _refusal(f"trying it takes more than {_TIMEOUT_S:g} seconds") from None
    if fault is None:
        raise _refusal(f"trying it takes more than {MAX_CPU_S} seconds or {_MAX_BYTES >> 20} MiB, or fails")
    if fault:
        raise InvalidParameterError("chat_template", fault.decode(errors="replace"))


def render_probe(
    template: ChatTemplate,
    named_tokens: Mapping[str, str],
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
) -> str | None:
    """Returns the rendered messages; None if the template refuses them, or writes more than is searched for calls."""
    try:
        text = template.render(Conversation(messages=list(messages), tools=list(tools)), named_tokens)
    except InvalidParameterError:
        return None
    return text if len(text) <= MAX_PROBE_CHARS else None


def _refusal(reason: str) -> InvalidParameterError:
    return InvalidParameterError("chat_template", f"The chat template cannot be used: {reason}.")


def main() -> None:
    """Writes the fault of the job's template, nothing if it has none."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=_Job)
    limit_this_process(_MAX_BYTES, MAX_CPU_S)
    try:
        template = _TriedTemplate(job.source)
        TemplateCapabilities.from_probes(template, job.named_tokens)
        job.dialects.dialect_of(job.source, partial(render_probe, template, job.named_tokens))
    except InvalidParameterError as error:
        sys.stdout.buffer.write(str(error).encode(errors="backslashreplace"))
    except RecursionError:
        sys.stdout.write("The chat template cannot be used: what it writes is nested too deeply.")


class _TriedTemplate(ChatTemplate):
    """A template for which a lack of memory is no refusal of messages, but the end."""

    def render(self, conversation: Conversation, named_tokens: Mapping[str, str]) -> str:
        try:
            return super().render(conversation, named_tokens)
        except InvalidParameterError as error:
            if isinstance(error.__cause__, MemoryError):
                raise error.__cause__ from None
            raise


if __name__ == "__main__":
    main()
