"""The `choices` of a completion: what one output of the engine adds to its choice."""

from collections.abc import Sequence
from typing import Any

from engine.outputs import RequestOutput
from server.completions.logprobs import LogprobsFormatter, join_logprobs, prompt_logprobs
from server.completions.prompts import EncodedPrompt
from server.protocol.completions import CompletionRequest
from server.text import Tokenizer


class ChoiceFormatter:
    """Formats one choice, output by output: a streamed choice token by token, a whole one in one piece."""

    def __init__(self, request: CompletionRequest, prompt: EncodedPrompt, tokenizer: Tokenizer) -> None:
        self._request = request
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._is_first = True
        self._logprobs = (
            None
            if request.logprobs is None
            else LogprobsFormatter(
                tokenizer, request.logprobs, request.return_tokens_as_token_ids, request.skip_special_tokens
            )
        )

    def format(self, index: int, output: RequestOutput) -> dict[str, Any]:
        request = self._request
        choice: dict[str, Any] = {"index": index, "text": output.text, "logprobs": None, "finish_reason": None}
        if self._logprobs is not None:
            choice["logprobs"] = self._logprobs_of(output, self._logprobs)
        if self._is_first:
            self._is_first = False
            self._add_prompt(choice, output)
        if request.return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        if output.finish_reason is not None:
            choice["finish_reason"] = output.finish_reason.value
            choice["stop_reason"] = output.stop_reason
        return choice

    def _add_prompt(self, choice: dict[str, Any], output: RequestOutput) -> None:
        if self._request.echo:
            choice["text"] = self._echo() + output.text
        if self._request.return_token_ids:
            choice["prompt_token_ids"] = self._prompt.token_ids
        if self._request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                output.prompt_logprobs or (), self._request.prompt_logprobs, self._tokenizer
            )

    def _logprobs_of(self, output: RequestOutput, formatter: LogprobsFormatter) -> dict[str, Any]:
        echoed = None
        if self._is_first and self._request.echo:
            echoed = formatter.prompt(self._prompt.token_ids, output.prompt_logprobs or (), self._echo())
        generated = formatter.generated(output.logprobs)
        return generated if echoed is None else join_logprobs(echoed, generated)

    def _echo(self) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        return self._tokenizer.decode(self._prompt.token_ids, self._request.skip_special_tokens)


def join_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """All news of a finished sequence as one."""
    first, last = outputs[0], outputs[-1]
    return RequestOutput(
        request_id=last.request_id,
        text="".join(output.text for output in outputs),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=tuple(score for output in outputs for score in output.logprobs),
        prompt_logprobs=first.prompt_logprobs,
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        num_output_tokens=last.num_output_tokens,
        timings=last.timings,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
