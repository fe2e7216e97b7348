"""The self-speculative draft model: what it shares with the target model, what it drafts, that no answer changes."""

from collections.abc import Callable
from pathlib import Path

import pytest

import engine
from engine.assembly import load_engine
from engine.attention import select_backend
from engine.attention.kv_cache import KVCache
from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine
from engine.kernels import load_kernels
from engine.model.kernel_forward import KernelForward
from engine.runner.forward import Forward, TransformersForward
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_runner import ModelRunner
from engine.runner.proposer import ModelProposer
from engine.runner.sampler import Sampler
from engine.weights.linear import PackedLinear
from tests.crossed import slow_but
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.model.always_drafting import answers, let_always_draft
from tests.engine.tiny_models import ARCHITECTURES, WITH_STATES, RecordingRunner, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, seed=5, repetition_penalty=1.2)


def always_drafting(model: LoadedModel) -> Engine:
    return let_always_draft(tiny_engine(model, num_speculative_tokens=8), 3)


@pytest.mark.parametrize("architecture", slow_but(ARCHITECTURES.keys() - WITH_STATES, "llama", "gpt2", "gpt_oss"))
def test_answers_of_every_architecture_stay_the_same_bit_for_bit(
    architecture: str, tiny_model: Callable[..., LoadedModel]
) -> None:
    model = tiny_model(architecture, "bfloat16", "none", "int4")
    drafting = always_drafting(model)
    mine = answers(drafting)
    assert mine == answers(tiny_engine(tiny_model(architecture, "bfloat16"), num_speculative_tokens=0))
    assert isinstance(drafting._runner, RecordingRunner)
    assert sum(batch.num_drafts for batch in drafting._runner.batches) > 60


def test_int8_answers_stay_the_same_too(tiny_model: Callable[..., LoadedModel]) -> None:
    plain = answers(tiny_engine(tiny_model("llama", "bfloat16", "int8"), num_speculative_tokens=0))
    assert answers(always_drafting(tiny_model("llama", "bfloat16", "int8", "int4"))) == plain


def drafting_runner(model: LoadedModel, cache: KVCache, forward: Forward, draft_forward: Forward) -> ModelRunner:
    sampler = Sampler(model.device, model.has_kernels, model.eos_token_ids)
    return ModelRunner(model, cache, forward, ModelProposer(draft_forward, sampler, cache.block_size, model.device))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "mixtral"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_what_the_quantized_model_samples_after_the_target_models_keys_and_values(
    architecture: str, params: SamplingParams, tiny_model: Callable[..., LoadedModel]
) -> None:
    """The reference is a model that is loaded with quantized weights, and decodes one token at a time."""
    model, quantized = (
        tiny_model(architecture, "bfloat16", "none", "int4"),
        tiny_model(architecture, "bfloat16", "int4"),
    )
    cache = KVCache(model.layers, 2, 16, model.dtype, model.device)
    backend = select_backend(model.device, load_kernels())
    assert model.draft is not None
    forwards = [TransformersForward(each.module, cache, backend) for each in (model, model.draft, quantized)]
    runner, reference = drafting_runner(model, cache, *forwards[:2]), ModelRunner(quantized, cache, forwards[2])

    def scheduled(output: list[int], num_wanted: int = 0) -> ScheduledRequest:
        tokens = [*PROMPT, *output]
        new, start = (PROMPT, 0) if not output else (tokens[-1:], len(tokens) - 1)
        return ScheduledRequest("", new, start, (0, 1), params, PROMPT, output, True, num_wanted=num_wanted)

    def wanting(num_wanted: int, output: list[int]) -> Batch:
        return Batch(Phase.DECODE, (scheduled(output, num_wanted),))

    [first] = runner.prefill(Batch(Phase.PREFILL, (scheduled([]),))).requests
    output, draft = [*first.token_ids], list(runner.draft(wanting(4, [*first.token_ids])).requests[0].draft)
    for _ in range(4):
        [answer] = reference.decode(wanting(0, list(output))).requests
        output += answer.token_ids
    assert draft == output[1:]
    assert len(draft) == 4


def test_each_request_gets_as_many_draft_tokens_as_it_wants(tiny_model: Callable[..., LoadedModel]) -> None:
    model = tiny_model("llama", "bfloat16", "none", "int4")
    assert model.draft is not None
    cache = KVCache(model.layers, 8, 16, model.dtype, model.device)
    backend = select_backend(model.device, load_kernels())
    forwards = [TransformersForward(each.module, cache, backend) for each in (model, model.draft)]
    runner, wanted = drafting_runner(model, cache, *forwards), [2, 0, 5, 1]

    def batch_of(*indices: int) -> Batch:
        return Batch(
            Phase.DECODE,
            tuple(
                ScheduledRequest(str(i), [7 + i], 0, (i,), GREEDY, [7 + i], [], True, num_wanted=wanted[i])
                for i in indices
            ),
        )

    together = runner.draft(batch_of(0, 1, 2, 3)).requests
    assert [request.num_drafts for request in together] == wanted
    alone = [runner.draft(batch_of(index)).requests[0] for index in range(4)]
    assert [request.token_ids for request in together] == [request.token_ids for request in alone]


def test_all_but_the_quantized_weights_is_shared(tiny_model: Callable[..., LoadedModel]) -> None:
    model = tiny_model("llama", "bfloat16", "none", "int4")
    assert model.draft is not None
    modules = (model.module, model.draft.module)
    for own, shared in (
        [dict(each.named_parameters()) for each in modules],
        [dict(each.named_buffers()) for each in modules],
    ):
        assert own and own.keys() == shared.keys()
        assert all(own[name] is shared[name] for name in own)
    linears = [each for each in model.draft.module.modules() if isinstance(each, PackedLinear)]
    assert model.draft.size.weight_bytes == sum(linear.packed.nbytes for linear in linears)
    assert model.draft.size.layer_bytes < 0.7 * model.size.layer_bytes  # the head has 8 bits


def test_target_and_draft_model_run_in_one_call_where_one_does(tiny_model: Callable[..., LoadedModel]) -> None:
    if load_kernels() is None:
        pytest.skip("no kernels here")
    model = tiny_model("llama", "bfloat16", "none", "int4")
    recording = tiny_engine(model)._runner
    assert isinstance(recording, RecordingRunner)
    runner = recording._runner
    proposer = runner._proposer
    assert isinstance(proposer, ModelProposer)
    assert isinstance(runner._run_model, KernelForward) and isinstance(proposer._forward, KernelForward)


def test_without_a_draft_quantization_no_draft_model_is_loaded(tiny_model: Callable[..., LoadedModel]) -> None:
    assert tiny_model("llama").draft is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"draft_quantization": "int3"}, "must be one of none, int8, int4"),
        (
            {"draft_quantization": "int4", "quantization": "int4"},
            "^--draft-.* or --quantization int4",
        ),
        ({"draft_quantization": "int4", "num_speculative_tokens": 0}, "^--draft-.* needs --num-speculative-tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(model="m", **settings)


def test_drafts_of_the_embedded_model_are_mostly_accepted() -> None:
    """Covers the whole way from the configuration to accepted draft tokens."""
    directory = str(Path(engine.__file__).parent / "embedded_model")
    config = EngineConfig(model=directory, draft_quantization="int4", num_blocks=64, max_model_len=512)
    model = let_always_draft(load_engine(config), 4)
    assert model.info.draft_size is not None
    add(model, "a", list(range(40, 70)), max_tokens=60, temperature=0.0)
    assert len(tokens_of(run_to_end(model)["a"])) == 60
    stats = model._scheduler.stats
    assert stats.num_accepted_drafts > 0.6 * stats.num_drafts
