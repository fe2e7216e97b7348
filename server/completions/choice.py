"""The `choices` of a completion: what one output of the engine adds to its choice."""

from collections.abc import Iterable
from typing import Any

from engine.core.batch import TokenLogprobs
from engine.core.outputs import RequestOutput
from server.completions.logprobs import LogprobsFormatter, join_logprobs
from server.core.prompts import EncodedPrompt
from server.core.tokenizer_protocol import Tokenizer
from server.generation.logprobs import prompt_logprobs
from server.generation.outputs import join_outputs
from server.protocol.completions import CompletionRequest


class ChoiceFormatter:
    """Formats one choice, output by output: a streamed choice step by step, a whole one in one piece."""

    def __init__(self, index: int, request: CompletionRequest, prompt: EncodedPrompt, tokenizer: Tokenizer) -> None:
        self._index = index
        self._request = request
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._is_first = True
        self._unsent: list[RequestOutput] = []
        """Outputs since the last chunk: their tokens are in the next one."""
        self._logprobs = (
            None
            if request.logprobs is None
            else LogprobsFormatter(
                tokenizer, request.logprobs, request.return_tokens_as_token_ids, request.skip_special_tokens
            )
        )

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Returns nothing while text is held back: the next chunk has the tokens since the last one."""
        self._unsent.append(output)
        has_prompt = self._is_first and (self._request.echo or output.prompt_logprobs is not None)
        if not (output.text or output.is_finished or has_prompt):
            return []
        outputs, self._unsent = self._unsent, []
        return [self.format(join_outputs(outputs))]

    def format(self, output: RequestOutput) -> dict[str, Any]:
        """Returns the choice's entry for this output. Logprobs are iterators: they are made when they are encoded."""
        request = self._request
        choice: dict[str, Any] = {"index": self._index, "text": output.text, "logprobs": None, "finish_reason": None}
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
            scores = self._prompt_scores(output)
            choice["prompt_logprobs"] = prompt_logprobs(scores, self._request.prompt_logprobs, self._tokenizer)

    def _logprobs_of(self, output: RequestOutput, formatter: LogprobsFormatter) -> dict[str, Any]:
        echoed = None
        if self._is_first and self._request.echo:
            echoed = formatter.prompt(self._prompt.token_ids, self._prompt_scores(output), self._echo())
        generated = formatter.generated(output.logprobs)
        return generated if echoed is None else join_logprobs(echoed, generated)

    def _prompt_scores(self, output: RequestOutput) -> Iterable[TokenLogprobs | None]:
        """Returns one entry per prompt token: None for all if the deadline passed before the prompt was computed."""
        return output.prompt_logprobs or [None] * len(self._prompt.token_ids)

    def _echo(self) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        return self._tokenizer.decode(self._prompt.token_ids, self._request.skip_special_tokens)
