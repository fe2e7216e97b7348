"""An MTP head that a checkpoint brings: it computes what transformers' own does, no answer changes, and what it drafts
depends on the request's own tokens alone."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from engine.attention import select_backend
from engine.attention.kv_cache import KVCache
from engine.core.batch import Batch, Phase, ScheduledRequest
from engine.core.sampling_params import SamplingParams
from engine.engine import Engine
from engine.kernels import load_kernels
from engine.model import forward_choice
from engine.model.drafting.kernel_head import KernelHeadForward
from engine.model.forward_choice import choose_forward
from engine.model.kernel_forward import KernelForward
from engine.runner.forward import TransformersForward, TransformersHeadForward
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_inputs import build_inputs
from tests.crossed import crossed
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.model.always_drafting import answers, let_always_draft
from tests.engine.model.mtp_checkpoints import (
    KINDS,
    always_drafting,
    load_with_head,
    make_checkpoint_with_head,
    make_twin,
)
from tests.engine.model.recorded_head import computed_chain, head_of
from tests.engine.tiny_models import RecordingRunner, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = [(7 * at + 3) % 190 for at in range(41)]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
ModelWithHead = Callable[..., LoadedModel]


@pytest.fixture(scope="module")
def model_with_head(tmp_path_factory: pytest.TempPathFactory) -> ModelWithHead:
    """model_with_head(architecture, dtype="bfloat16", is_twin=False, **settings): loads a checkpoint of it, once."""

    @cache
    def load(architecture: str, dtype: str = "bfloat16", is_twin: bool = False, **settings: Any) -> LoadedModel:
        directory = tmp_path_factory.mktemp("heads")
        edits = [make_twin] if is_twin else []
        return load_with_head(make_checkpoint_with_head(architecture, directory, *edits), dtype, **settings)

    return load


# What it computes.


class Oracle:
    """Transformers' own model and MTP model of a checkpoint, in float32 and without a cache."""

    def __init__(self, path: Path) -> None:
        layers = pytest.importorskip("transformers.modeling_layers")
        if not hasattr(layers, "MtpModel"):
            pytest.skip("this version of transformers has no MTP model")
        settings = {"dtype": torch.float32, "attn_implementation": "eager"}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, **settings).eval()
        ignored = [r"model\.layers\.3\.", r"mtp\."]  # published models have other numbers of layers
        self._model._keys_to_ignore_on_load_unexpected = ignored
        self._head = layers.MtpModel.from_pretrained(self._model)
        self._head.set_attn_implementation("eager")

    @torch.inference_mode()
    def chain(self, text: Sequence[int], num_drafts: int) -> tuple[Tensor, list[int]]:
        """Returns the head's logits at each token of the text, and the greedy draft that follows it."""
        states = self._model.base_model(torch.tensor([text])).last_hidden_state
        hidden, ids = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1), [*text]
        logits, draft = None, []
        while len(draft) < num_drafts:
            positions = torch.arange(len(ids))[None]
            output = self._head.forward_layer(0, hidden, positions, None, input_ids=torch.tensor([ids]))
            scores = self._head._project_to_logits(output)[0]
            logits = scores if logits is None else logits
            draft.append(int(scores[-1].argmax()))
            ids, hidden = [*ids, draft[-1]], torch.cat([hidden, output[:, -1:]], dim=1)
        assert logits is not None
        return logits, draft


def share(tokens: Sequence[int], start: int, output: Sequence[int] = (), **fields: Any) -> ScheduledRequest:
    return ScheduledRequest("", tokens, start, (4, 1, 3, 0, 2), GREEDY, TEXT, list(output), True, **fields)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm4_moe", "mellum", "qwen3_5", "qwen3_next"])
def test_it_computes_what_transformers_does(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint_with_head(architecture, tmp_path)
    expected, draft = Oracle(path).chain(TEXT, 4)
    computed, drafted = computed_chain(load_with_head(path, "float32"), TEXT, 4)
    assert torch.allclose(computed, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert drafted == draft


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("glm4_moe", {}),
        ("llama", {"dtype": "float32"}),
        ("llama", {"quantization": "int8"}),
    ],
)
def test_in_one_call_it_computes_the_same_bits(
    architecture: str, settings: dict[str, Any], model_with_head: ModelWithHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    if load_kernels() is None:
        pytest.skip("no kernels here")
    model = model_with_head(architecture, **settings)
    assert isinstance(head_of(model)[1]._head.forward, KernelHeadForward)
    logits, draft = computed_chain(model, TEXT, 4)
    monkeypatch.setattr(forward_choice, "is_known", lambda module: False)
    assert isinstance(head_of(model)[1]._head.forward, TransformersHeadForward)
    plain_logits, plain_draft = computed_chain(model, TEXT, 4)
    assert torch.equal(logits, plain_logits) and draft == plain_draft


def test_it_reads_longer_chunks_than_any_before(model_with_head: ModelWithHead) -> None:
    model, text = model_with_head("llama"), [(7 * at + 3) % 190 for at in range(75)]
    (together, draft), (apart, same) = (computed_chain(model, text, 3, cuts) for cuts in ((), (19, 20, 30)))
    assert torch.equal(together, apart) and draft == same


def test_each_request_gets_the_draft_that_it_would_alone(model_with_head: ModelWithHead) -> None:
    wanted = [2, 0, 5, 1, 4]
    runner, _ = head_of(model_with_head("glm4_moe"))

    def of(index: int, tokens: Sequence[int], start: int, **fields: Any) -> ScheduledRequest:
        span = (start, start + len(tokens))
        return ScheduledRequest(
            str(index), tokens, start, (index,), GREEDY, TEXT[index:], [], True, draft_span=span, **fields
        )

    runner.prefill(Batch(Phase.PREFILL, tuple(of(index, TEXT[index : index + 7], 0) for index in range(5))))

    def drafts(*indices: int) -> list[Sequence[int]]:
        shares = [of(each, TEXT[each + 7 : each + 8], 7, num_wanted=wanted[each]) for each in indices]
        return [each.draft for each in runner.draft(Batch(Phase.DECODE, tuple(shares))).requests]

    together = drafts(0, 1, 2, 3, 4)
    assert [len(each) for each in together] == wanted
    assert together == [drafts(index)[0] for index in range(5)]


# Answers.


@pytest.mark.parametrize(("architecture", "head", "dtype"), crossed(KINDS, ("random", "twin"), ("float32", "bfloat16")))
def test_answers_stay_the_same_bit_for_bit(
    architecture: str, head: str, dtype: str, model_with_head: ModelWithHead
) -> None:
    model = model_with_head(architecture, dtype, is_twin=head == "twin")
    plain = answers(tiny_engine(model, num_speculative_tokens=0))
    assert answers(always_drafting(model)) == plain
    assert answers(always_drafting(model, num_blocks=24, block_size=4)) == plain


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}])
def test_so_they_do_in_fewer_bits(settings: dict[str, Any], model_with_head: ModelWithHead) -> None:
    model = model_with_head("glm4_moe", is_twin=True, **settings)
    assert answers(always_drafting(model)) == answers(tiny_engine(model, num_speculative_tokens=0))


@pytest.mark.parametrize(
    "architecture", sorted(KINDS.keys() - {"mellum"})
)  # whose head has another window than its twin
def test_what_a_good_head_drafts_is_mostly_accepted(architecture: str, model_with_head: ModelWithHead) -> None:
    runs = always_drafting(model_with_head(architecture, is_twin=True), 2)
    add(runs, "greedy", TEXT, max_tokens=40, temperature=0.0)
    add(runs, "sampled", TEXT[::-1], max_tokens=40, temperature=0.9, seed=3)
    run_to_end(runs)
    stats = runs._scheduler.stats
    assert stats.num_accepted_drafts > 0.6 * stats.num_drafts > 20


# Its keys and values.


def kept_of(runs: Engine, name: str, num_tokens: int) -> list[Tensor]:
    """Returns what the cache has of the request's first tokens: the head's keys and values, and hidden states."""
    assert isinstance(runs._runner, RecordingRunner)
    shares = (each for batch in runs._runner.batches for each in batch.requests if each.request_id == name)
    table = [*shares][-1].block_table
    cache = runs._runner._runner._cache
    assert cache.hidden is not None
    layer = cache.layers[-1]
    places = [divmod(at, cache.block_size) for at in range(num_tokens)]
    rows = [(table[index], offset) for index, offset in places]
    return [
        torch.stack([tensor[block, :, offset] for block, offset in rows]) for tensor in (layer.keys, layer.values)
    ] + [torch.stack([cache.hidden[block, offset] for block, offset in rows])]


def alone(runs: Engine) -> None:
    add(runs, "a", TEXT, max_tokens=60, temperature=0.0)


def after_its_prefix(runs: Engine) -> None:
    add(runs, "first", TEXT, max_tokens=20, temperature=0.0)
    run_to_end(runs)
    alone(runs)


def beside_others(runs: Engine) -> None:
    alone(runs)
    for _ in range(4):
        runs.step()
    add(runs, "b", TEXT[3:], max_tokens=9, temperature=0.8, seed=1, priority=-1)
    add(runs, "c", TEXT[5:], max_tokens=9, temperature=0.8, seed=2, priority=-1)


def after_one_that_does_not_draft(runs: Engine) -> None:
    """Of the cached prefix the head has computed nothing; the hidden states are there."""
    add(runs, "first", TEXT, max_tokens=10, temperature=0.0, output_token_ids=[1])
    run_to_end(runs)
    alone(runs)


def drafting_late(runs: Engine) -> None:
    let_always_draft(runs, 0)
    alone(runs)
    for _ in range(30):
        runs.step()
    let_always_draft(runs, 2)


SCENES: dict[str, tuple[Callable[[Engine], None], dict[str, int]]] = {
    "one draft token": (alone, {"length": 1}),
    "other blocks": (alone, {"block_size": 5}),
    "chunks": (alone, {"max_num_batched_tokens": 7}),
    "after its prefix": (after_its_prefix, {"block_size": 4}),
    "beside others": (beside_others, {"max_num_batched_tokens": 16, "max_prefill_tokens_per_gap": 4}),
    "preempted": (beside_others, {"num_blocks": 28, "block_size": 4}),
    "after one that does not draft": (after_one_that_does_not_draft, {"block_size": 4}),
    "drafting late": (drafting_late, {}),
}


@pytest.mark.parametrize(("scene", "architecture"), crossed(SCENES, ("llama", "glm4_moe")))
def test_what_it_keeps_depends_on_the_requests_own_tokens_alone(
    scene: str, architecture: str, model_with_head: ModelWithHead
) -> None:
    run, settings = SCENES[scene]
    model = model_with_head(architecture, is_twin=True)
    plain, runs = always_drafting(model), always_drafting(model, **settings)
    alone(plain)
    run(runs)
    answer = tokens_of(run_to_end(plain)["a"])
    assert tokens_of(run_to_end(runs)["a"])[-9:] == answer[-9:]
    num_tokens = len(TEXT) + len(answer) - 6
    pairs = zip(kept_of(plain, "a", num_tokens), kept_of(runs, "a", num_tokens), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert runs._scheduler.stats.num_accepted_drafts > 0


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_the_kv_store_keeps_what_it_reads(architecture: str, model_with_head: ModelWithHead, tmp_path: Path) -> None:
    model = model_with_head(architecture, is_twin=True)
    settings = {"block_size": 4, "kv_store": str(tmp_path), "state_checkpoint_interval": 12}
    writes = always_drafting(model, **settings)
    alone(writes)
    run_to_end(writes)
    while writes.has_work:
        writes.step()
    writes.close()
    reads = always_drafting(model, **settings)
    alone(reads)
    run_to_end(reads)
    assert reads._scheduler.stats.prefix_disk_hits >= 36
    pairs = zip(kept_of(writes, "a", 90), kept_of(reads, "a", 90), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "deepseek_v3", "qwen3_moe"])
def test_hidden_states_at_all_positions_are_those_at_the_kept_ones(
    architecture: str, tiny_model: Callable[..., LoadedModel]
) -> None:
    model = tiny_model(architecture, "bfloat16")
    cache = KVCache(model.layers, 5, 16, model.kv_dtype, model.device)
    backend = select_backend(model.device, load_kernels())
    inputs = build_inputs([share(TEXT, 0)], 16, model.device)
    for forward in (choose_forward(model.module, cache, backend), TransformersForward(model.module, cache, backend)):
        logits, hidden, none = (each if each is None else each.clone() for each in forward(inputs, None))
        assert logits is not None and hidden is not None and none is None
        kept_logits, kept_hidden, all_hidden = forward(inputs, [3, 40], hidden_of=())
        assert all_hidden is not None and torch.equal(all_hidden, hidden)
        assert torch.equal(kept_hidden, hidden[[3, 40]]) and torch.equal(kept_logits, logits[[3, 40]])


def test_the_model_still_runs_in_one_call(model_with_head: ModelWithHead) -> None:
    if load_kernels() is None:
        pytest.skip("no kernels here")
    recording = tiny_engine(model_with_head("llama"))._runner
    assert isinstance(recording, RecordingRunner)
    assert isinstance(recording._runner._run_model, KernelForward)


def test_its_embeddings_and_language_model_head_are_the_models(model_with_head: ModelWithHead) -> None:
    model = model_with_head("llama")
    assert model.draft is not None
    for part in ("get_input_embeddings", "get_output_embeddings"):
        assert getattr(model.draft.module, part)() is getattr(model.module, part)()
