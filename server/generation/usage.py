"""Token counts and timings over all generations of one request, while they run."""

from typing import Any

from engine.core.outputs import RequestOutput
from engine.core.predicted_text import PredictedText
from engine.core.stats import RequestTimings
from server.core.request_record import RequestRecord
from server.core.timings import PhaseReport, TokenCounts
from server.generation.plan import GenerationPlan
from server.protocol.generation import GenerationParams


class UsageCounter:
    """Counts tokens and collects timings from every output. The request's record reports the result."""

    def __init__(self, plan: GenerationPlan[GenerationParams], record: RequestRecord) -> None:
        self._plan = plan
        self._record = record
        record.params = plan.generations[0].params
        self._num_output_tokens = [0] * len(plan.generations)
        self._num_cached_tokens = [0] * len(plan.generations)
        self._predicted = [
            PredictedText(each.params.predicted_token_ids) for each in plan.generations if plan.request.prediction
        ]
        self._timings: dict[int, RequestTimings] = {}

    @property
    def num_generations(self) -> int:
        return len(self._plan.generations)

    def add(self, generation: int, output: RequestOutput) -> None:
        self._num_output_tokens[generation] = output.num_output_tokens
        self._num_cached_tokens[generation] = output.num_cached_tokens
        if self._predicted:
            self._predicted[generation].follow(output.token_ids)
        if output.timings is not None:
            self._timings[generation] = output.timings
            self._record.report = self._report
        self._record.note_end(generation, output)

    def usage(self) -> dict[str, Any]:
        counts, details = self._counts(), self._completion_details()
        return {
            "prompt_tokens": counts.prompt,
            "completion_tokens": counts.output,
            "total_tokens": counts.prompt + counts.output,
            "prompt_tokens_details": {"cached_tokens": counts.cached},
            **({"completion_tokens_details": details} if details else {}),
        }

    @property
    def num_cache_write_tokens(self) -> int:
        """Prompt tokens that were computed, in full blocks, which later prompts find."""
        size = self._plan.block_size
        cached = self._num_cached_tokens[:: self._plan.request.num_candidates]
        pairs = zip(self._plan.prompts, cached, strict=True) if size else ()
        return sum(max(len(prompt.token_ids) // size * size - found, 0) for prompt, found in pairs if size)

    def prompt_details(self) -> dict[str, int]:
        """Returns how many of the prompt's tokens were cached, and how many were computed for later prompts."""
        return {"cached_tokens": self._counts().cached, "cache_write_tokens": self.num_cache_write_tokens}

    def _completion_details(self) -> dict[str, int]:
        """Returns the kinds of completion tokens that are told apart. How much of a prediction appeared in the answer
        depends on the two texts alone, not on which of its tokens were tried as drafts."""
        if not self._predicted:
            return {}
        return {
            "accepted_prediction_tokens": sum(each.num_appeared for each in self._predicted),
            "rejected_prediction_tokens": sum(each.num_others for each in self._predicted),
        }

    def timings(self) -> dict[str, float | int | None]:
        """Returns the `timings` object of the whole request."""
        return self._report().body()

    def timings_of(self, generation: int) -> dict[str, float | int | None]:
        """Returns the `timings` object of one generation."""
        counts = TokenCounts(
            prompt=len(self._plan.prompt_of(generation).token_ids),
            cached=self._num_cached_tokens[generation],
            output=self._num_output_tokens[generation],
        )
        return PhaseReport.of([self._timings[generation]], counts).body()

    def _report(self) -> PhaseReport:
        return PhaseReport.of(list(self._timings.values()), self._counts())

    def _counts(self) -> TokenCounts:
        """Returns the request's counts. A prompt's cached tokens are those that its first candidate found: the others
        find the first one's blocks."""
        return TokenCounts(
            prompt=self._plan.num_prompt_tokens,
            cached=sum(self._num_cached_tokens[:: self._plan.request.num_candidates]),
            output=sum(self._num_output_tokens),
        )
