"""An EAGLE-3 head: it computes what its definition says, no answer changes, and what does not fit is refused."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.attention import select_backend
from engine.attention.kv_cache import KVCache
from engine.core.batch import ScheduledRequest
from engine.core.errors import ConfigError, ModelError, TwostepError
from engine.core.sampling_params import SamplingParams
from engine.kernels import load_kernels
from engine.model.forward_choice import choose_forward
from engine.runner.forward import TransformersForward
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_inputs import build_inputs
from tests.crossed import crossed
from tests.engine.fakes import add, run_to_end
from tests.engine.model.always_drafting import answers
from tests.engine.model.eagle_checkpoints import (
    DRAFTED,
    HEAD_SIZE,
    HIDDEN_SIZE,
    LAYER,
    head_tensors,
    load_with_eagle,
    make_target,
    write_head,
)
from tests.engine.model.mtp_checkpoints import always_drafting
from tests.engine.model.recorded_head import computed_chain
from tests.engine.tiny_models import VOCAB_SIZE, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = [(7 * at + 3) % VOCAB_SIZE for at in range(41)]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.fixture(scope="module")
def model_with_eagle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedModel]:
    def load(architecture: str, dtype: str = "bfloat16", **settings: Any) -> LoadedModel:
        directory = tmp_path_factory.mktemp("eagle")
        return load_with_eagle(make_target(architecture, directory), write_head(directory), dtype, **settings)

    return load


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + LAYER["rms_norm_eps"]).sqrt()


class Definition:
    """The head of a checkpoint in float32, as its paper and its package define it, without a cache."""

    def __init__(self, target: Path, head: Path, is_normed_residual: bool) -> None:
        settings = {"dtype": torch.float32, "attn_implementation": "eager"}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(target, **settings).eval()
        self._tensors = load_file(head / "model.safetensors")
        self._is_normed_residual = is_normed_residual

    def _layer(self, embeddings: Tensor, hidden: Tensor) -> Tensor:  # [T, H] each -> [T, H]
        own = {name.removeprefix("layers.0."): tensor for name, tensor in self._tensors.items()}
        normed = rms_norm(hidden, own["hidden_norm.weight"])
        both = torch.cat([rms_norm(embeddings, own["input_layernorm.weight"]), normed], -1)
        query, key, value = (
            linear(both, own[f"self_attn.{name}_proj.weight"]).view(1, len(both), -1, HEAD_SIZE).transpose(1, 2)
            for name in "qkv"
        )
        rotary = LlamaRotaryEmbedding(LlamaConfig.from_dict(dict(LAYER)))
        query, key = apply_rotary_pos_emb(query, key, *rotary(both, torch.arange(len(both))[None]))
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        added = linear(attended[0].transpose(0, 1).flatten(1), own["self_attn.o_proj.weight"])
        residual = (normed if self._is_normed_residual else hidden) + added
        inner = rms_norm(residual, own["post_attention_layernorm.weight"])
        gated = silu(linear(inner, own["mlp.gate_proj.weight"])) * linear(inner, own["mlp.up_proj.weight"])
        return residual + linear(gated, own["mlp.down_proj.weight"])

    @torch.inference_mode()
    def chain(self, text: Sequence[int], num_drafts: int) -> tuple[Tensor, list[int]]:
        """Returns the logits of the drafted tokens at each token of the text, and the greedy draft that follows it."""
        states = self._model(torch.tensor([text]), output_hidden_states=True).hidden_states
        hidden = linear(torch.cat([state[0] for state in states[:3]], -1), self._tensors["fc.weight"])
        hidden = torch.cat([torch.zeros(1, HIDDEN_SIZE), hidden[:-1]])
        ids, draft, logits = [*text], [], None
        while len(draft) < num_drafts:
            output = self._layer(self._model.get_input_embeddings()(torch.tensor(ids)), hidden)
            scores = linear(rms_norm(output, self._tensors["norm.weight"]), self._tensors["lm_head.weight"])
            logits = scores if logits is None else logits
            draft.append(DRAFTED[int(scores[-1].argmax())])
            ids, hidden = [*ids, draft[-1]], torch.cat([hidden, output[-1:]])
        assert logits is not None
        return logits, draft


def share(tokens: Sequence[int], start: int, **fields: Any) -> ScheduledRequest:
    return ScheduledRequest("", tokens, start, (4, 1, 3, 0, 2), GREEDY, TEXT, [], True, **fields)


@pytest.mark.parametrize("is_normed_residual", [False, True])
def test_it_computes_what_its_definition_says(is_normed_residual: bool, tmp_path: Path) -> None:
    target = make_target("llama", tmp_path)
    head = write_head(tmp_path, config={"norm_before_residual": is_normed_residual})
    expected, draft = Definition(target, head, is_normed_residual).chain(TEXT, 4)
    computed, drafted = computed_chain(load_with_eagle(target, head, "float32"), TEXT, 4)
    others = [token_id for token_id in range(VOCAB_SIZE) if token_id not in DRAFTED]
    assert torch.allclose(computed[:, DRAFTED], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert (computed[:, others] == -torch.inf).all()
    assert drafted == draft


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gemma3", "deepseek_v3"])
def test_inputs_of_layers_are_those_that_transformers_has(
    architecture: str, tiny_model: Callable[..., LoadedModel], reference_model: Callable[..., Any]
) -> None:
    model = tiny_model(architecture, "float32")
    cache = KVCache(model.layers, 5, 16, model.kv_dtype, model.device)
    backend = select_backend(model.device, load_kernels())
    inputs = build_inputs([share(TEXT, 0)], 16, model.device)
    plain = TransformersForward(model.module, cache, backend)
    expected = torch.cat([plain(inputs, None, (layer,)).all_hidden for layer in (0, 1, 2)], -1)  # type: ignore[misc]
    for forward in (choose_forward(model.module, cache, backend), plain):
        for kept in (None, [3, 40], [*range(len(TEXT))]):
            all_hidden = forward(inputs, kept, (0, 1, 2)).all_hidden
            assert all_hidden is not None and torch.equal(all_hidden, expected)
    with torch.inference_mode():
        states = reference_model(architecture).model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    own = torch.cat([state[0] for state in states[:3]], -1)
    assert torch.allclose(expected, own, rtol=1e-3, atol=1e-4 * float(own.abs().max()))


@pytest.mark.parametrize(
    ("architecture", "dtype"), crossed(("llama", "qwen3", "gemma3", "mixtral", "qwen3_5"), ("bfloat16", "float32"))
)
def test_answers_stay_the_same_bit_for_bit(
    architecture: str, dtype: str, model_with_eagle: Callable[..., LoadedModel]
) -> None:
    model = model_with_eagle(architecture, dtype)
    plain = answers(tiny_engine(model, num_speculative_tokens=0))
    runs = always_drafting(model)
    assert answers(runs) == plain
    assert 0 < runs._scheduler.stats.num_accepted_drafts < runs._scheduler.stats.num_drafts
    assert answers(always_drafting(model, num_blocks=24, block_size=4)) == plain


@pytest.mark.parametrize(
    "settings", [{"quantization": "int8"}, {"draft_quantization": "int4"}, {"kv_cache_dtype": "int8"}]
)
def test_so_they_do_in_fewer_bits(settings: dict[str, Any], model_with_eagle: Callable[..., LoadedModel]) -> None:
    model = model_with_eagle("qwen3", **settings)
    assert answers(always_drafting(model)) == answers(tiny_engine(model, num_speculative_tokens=0))


Drafts = dict[int, Sequence[int]]
"""Position of the newest token -> the draft that follows it."""


def drafts_of(model: LoadedModel, prompts: Sequence[Sequence[int]], **settings: Any) -> list[Drafts]:
    """Returns the drafts of each request."""
    runs = always_drafting(model, **settings)
    for index, prompt in enumerate(prompts):
        add(runs, str(index), prompt, max_tokens=12, temperature=0.0)
    run_to_end(runs)
    shares = [each for batch in runs._runner.batches for each in batch.requests if each.draft]  # type: ignore[attr-defined]
    return [
        {each.start: each.draft for each in shares if each.request_id == str(index)} for index in range(len(prompts))
    ]


def num_compared(one: Drafts, other: Drafts) -> int:
    """Returns how many drafts of the same places are equal, as far as both go; asserts that all of them are."""
    places = one.keys() & other.keys()
    for place in places:
        pairs = [*zip(one[place], other[place], strict=False)]
        assert all(token == its for token, its in pairs), place
    return len(places)


def test_drafts_depend_on_the_requests_own_tokens_alone(model_with_eagle: Callable[..., LoadedModel]) -> None:
    model, prompts = model_with_eagle("llama"), [TEXT, TEXT[::-1], TEXT[5:9], TEXT[7:30]]
    alone = [drafts_of(model, [prompt])[0] for prompt in prompts]
    assert all(len(each) > 2 for each in alone)
    for settings in ({}, {"max_num_batched_tokens": 24}, {"num_blocks": 48, "block_size": 4}):
        together = drafts_of(model, prompts, **settings)
        assert sum(map(num_compared, alone, together)) > 8, settings


def test_heads_of_eagles_own_training_are_read(tmp_path: Path) -> None:
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head_tensors().items()}
    target = make_target("llama", tmp_path)
    own = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(DRAFTED)}
    own |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    nothing = dict.fromkeys(("speculators_model_type", "eagle_aux_hidden_state_layer_ids"))
    plain = load_with_eagle(target, write_head(tmp_path / "plain"))
    other = load_with_eagle(target, write_head(tmp_path / "own", tensors, own | nothing))
    assert drafts_of(other, [TEXT]) == drafts_of(plain, [TEXT])


def test_embeddings_of_its_own_are_used_and_equal_ones_are_not_kept(tmp_path: Path) -> None:
    target = make_target("llama", tmp_path)
    embeddings = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    plain, same, others = (
        load_with_eagle(target, write_head(tmp_path / name, head_tensors() | own))
        for name, own in {
            "plain": {},
            "same": {"embed_tokens.weight": embeddings.clone()},
            "others": {"embed_tokens.weight": embeddings.flip(0).contiguous()},
        }.items()
    )
    assert plain.draft is not None and same.draft is not None
    assert same.draft.module.get_input_embeddings() is same.module.get_input_embeddings()
    assert drafts_of(same, [TEXT]) == drafts_of(plain, [TEXT]) != drafts_of(others, [TEXT])


def _without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in head_tensors().items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "config", "error", "message"),
    [
        ({}, {"speculators_model_type": "medusa"}, ConfigError, "is a head of the kind 'medusa'"),
        ({}, {"transformer_layer_config": LAYER | {"hidden_size": 24}}, ConfigError, "hidden states of 24 numbers"),
        ({}, {"transformer_layer_config": LAYER | {"vocab_size": 7}}, ConfigError, "a vocabulary of 7 tokens, not"),
        ({}, {"transformer_layer_config": LAYER | {"num_hidden_layers": 2}}, ConfigError, "has 2 layers"),
        ({}, {"transformer_layer_config": LAYER | {"model_type": "mamba"}}, ConfigError, "has a layer of 'mamba'"),
        ({}, {"norm_before_fc": True}, ConfigError, "norm_before_fc"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, ConfigError, r"reads the layers \[0, 1, 3\]"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [0, 2, 1]}, ConfigError, r"reads the layers \[0, 2, 1\]"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [0, 1]}, ModelError, "projection.weight has the shape"),
        (_without("d2t"), {}, ConfigError, "does not tell which of the model's they are"),
        ({"d2t": torch.tensor([0, 0, 0, 0, VOCAB_SIZE])}, {}, ConfigError, "that the model's .* do not have"),
        ({"d2t": torch.tensor([1, 0, 0, 0, 0])}, {}, ConfigError, "or some twice"),
        (_without("lm_head.weight"), {}, ModelError, "no safetensors file has its lm_head.weight"),
        (_without("layers.0.hidden_norm.weight"), {}, ModelError, "hidden_norm.weight lacks"),
        ({"layers.0.extra.weight": torch.ones(3)}, {}, ModelError, "extra.weight lacks, or is none that is known"),
        ({"embed_tokens.weight": torch.ones(9, HIDDEN_SIZE)}, {}, ConfigError, r"embeddings of the shape \[9, "),
    ],
)
def test_what_does_not_fit_is_refused(
    tensors: dict[str, Tensor], config: dict[str, Any], error: type[TwostepError], message: str, tmp_path: Path
) -> None:
    whole = tensors if "fc.weight" in tensors else head_tensors() | tensors
    head = write_head(tmp_path, whole, config)
    with pytest.raises(error, match=message):
        load_with_eagle(make_target("llama", tmp_path), head)
