"""One choice of a chat completion: its text goes through a parser, and what comes out is a delta or a message."""

from collections.abc import Sequence
from typing import Any

from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason
from server.chat.logprobs import ChatLogprobsFormatter
from server.chat.message import delta_of, message_of
from server.chat.output_reader import OutputReader
from server.core.tokenizer_protocol import Tokenizer
from server.generation.outputs import join_outputs
from server.protocol.chat import ChatRequest
from server.templates.message_shaping import text_of
from server.tools.message_parts import Content, Part


class ChatChoice:
    """Formats the outputs of one generation in their order: each with `chunks`, or all at once with `whole`."""

    def __init__(self, index: int, request: ChatRequest, reader: OutputReader, tokenizer: Tokenizer) -> None:
        self._index = index
        self._request = request
        self._reader = reader
        self._is_first = True
        self._unsent: list[RequestOutput] = []
        """Outputs since the last chunk: their tokens are in the next one."""
        self._logprobs = (
            None
            if request.num_logprobs is None
            else ChatLogprobsFormatter(tokenizer, request.num_logprobs, request.return_tokens_as_token_ids)
        )

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Returns nothing while text is held back, except the role in the choice's first chunk. Behind the chunk of the
        last text comes one of an empty delta with the finish reason; only that when the last token adds nothing, as EOS
        does."""
        role = {"role": "assistant"} if self._is_first else {}
        parts = self._parts(output)
        self._unsent.append(output)
        chunks = [self._chunk({**role, **delta_of(parts)})] if role or parts else []
        if output.finish_reason is None:
            return chunks
        last = {"index": self._index, "delta": {}, "logprobs": None} if chunks else self._chunk({})
        return [*chunks, last | self._ending(output, output.finish_reason)]

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the choice with its whole message."""
        message = message_of([part for output in outputs for part in self._parts(output)])
        joined = join_outputs(outputs)
        assert joined.finish_reason is not None
        choice = {"index": self._index, "message": message, **self._tokens([joined])}
        return choice | self._ending(joined, joined.finish_reason)

    def _parts(self, output: RequestOutput) -> list[Part]:
        parts: list[Part] = []
        if self._is_first and self._request.echo:
            parts.append(Content(text_of(self._request.messages[-1])))
        self._is_first = False
        return parts + self._reader.read(output)

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        outputs, self._unsent = self._unsent, []
        return {"index": self._index, "delta": delta, **self._tokens(outputs)}

    def _tokens(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if self._logprobs is not None:
            fields["logprobs"] = self._logprobs.format([score for output in outputs for score in output.logprobs])
        if self._request.return_token_ids:
            fields["token_ids"] = [token_id for output in outputs for token_id in output.token_ids]
        return fields

    def _ending(self, output: RequestOutput, reason: FinishReason) -> dict[str, Any]:
        is_call = self._reader.has_called and not self._reader.is_cut and reason is FinishReason.STOP
        return {"finish_reason": "tool_calls" if is_call else reason.value, "stop_reason": output.stop_reason}
