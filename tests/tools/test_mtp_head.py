"""The MTP head that is trained is the one that is served: in each pass of a chain, at each position."""

from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.model.mtp_checkpoints import load_with_head, randomize
from tests.engine.model.recorded_head import computed_chain
from tools.embedded_model.mtp_head import MtpHead

TEXT = [(7 * at + 3) % 60 for at in range(23)]
NUM_DRAFTS = 4


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None, dtype="float32"))
    randomize(model)
    return model.eval()


@torch.inference_mode()
def trained_logits(model: LlamaForCausalLM, head: MtpHead, text: list[int]) -> list[Tensor]:
    """Logits [T, vocab] of each pass over the text."""
    ids = torch.tensor([text])
    hidden = model.model(ids, use_cache=False)[0]
    rotary = model.model.rotary_emb(hidden, torch.arange(len(text))[None])
    passes = head(model.model.embed_tokens(ids), hidden, rotary, NUM_DRAFTS)
    return [model.lm_head(each)[0] for each in passes]


def test_what_is_trained_is_what_is_served(model: LlamaForCausalLM, tmp_path: Path) -> None:
    head = MtpHead(model)
    randomize(head)
    model.save_pretrained(tmp_path)
    own = {f"mtp.{name}": each.detach() for name, each in head.named_parameters()}
    save_file(
        load_file(tmp_path / "model.safetensors") | own, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    logits, draft = computed_chain(load_with_head(tmp_path, "float32"), TEXT, NUM_DRAFTS)
    trained = trained_logits(model, head, TEXT + draft)
    torch.testing.assert_close(logits, trained[0][: len(TEXT)], rtol=1e-3, atol=1e-3)
    behind = zip(trained, count(len(TEXT) - 1), strict=False)
    assert [int(each[position].argmax()) for each, position in behind] == draft


def test_a_position_learns_nothing_from_later_ones(model: LlamaForCausalLM) -> None:
    head = MtpHead(model)
    randomize(head)
    whole, part = trained_logits(model, head, TEXT), trained_logits(model, head, TEXT[:15])
    for n, (one, other) in enumerate(zip(whole, part, strict=True)):
        torch.testing.assert_close(one[n:15], other[n:], rtol=1e-4, atol=1e-4)
