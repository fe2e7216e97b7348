"""The MTP head of the embedded model: most of what it drafts is accepted, and no answer changes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import engine
from benchmarks.padded_model import MTP_HEAD, save_padded_model
from engine.engine import Engine
from engine.runner.loaded_model import LoadedModel
from engine.text.tokenizer import Tokenizer
from tests.engine.fakes import add, run_to_end
from tests.engine.model.mtp_checkpoints import always_drafting, load_with_head
from tests.engine.model.recorded_head import computed_chain
from tests.engine.tiny_models import tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = Path(engine.__file__).parent / "embedded_model"
FILES = ("model.safetensors", "mtp.safetensors")
TEXTS = ("Return the", "def open(file, mode='r')\n\n", "<|im_start|>user\nWhat is os.path?<|im_end|>\n", "A socket")
ANSWERS = dict[str, list[tuple[int, float]]]


def with_head(directory: Path) -> Path:
    """Makes a checkpoint of the model and its head, with an index of both files."""
    names = {}
    for name in FILES:
        with safe_open(FOLDER / name, framework="pt") as file:
            names |= dict.fromkeys(file.keys(), name)
    for path in FOLDER.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_with_head(with_head(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_pretrained(str(FOLDER))
    return [tokenizer.encode(text) for text in TEXTS]


def answers(runs: Engine, prompts: list[list[int]]) -> ANSWERS:
    for index, prompt in enumerate(prompts):
        for temperature in (0.0, 0.7, 1.5):
            name = f"{index} at {temperature}"
            add(runs, name, prompt, max_tokens=40, temperature=temperature, seed=index, logprobs=0)
    return {
        name: [(score.token_id, score.logprob) for update in own for score in update.logprobs]
        for name, own in run_to_end(runs).items()
    }


@pytest.mark.parametrize("num_blocks", [256, 30])
def test_answers_stay_the_same_bit_for_bit_also_where_requests_are_preempted(
    num_blocks: int, model: LoadedModel, prompts: list[list[int]]
) -> None:
    plain = answers(tiny_engine(model, num_speculative_tokens=0), prompts)
    assert answers(always_drafting(model, num_blocks=num_blocks, block_size=8), prompts) == plain


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.5), (0.7, 0.25)])
def test_much_of_what_it_drafts_is_accepted(
    temperature: float, least: float, model: LoadedModel, prompts: list[list[int]]
) -> None:
    runs = always_drafting(model, 2)
    for index, prompt in enumerate(prompts):
        add(runs, str(index), prompt, max_tokens=60, temperature=temperature, seed=index)
    run_to_end(runs)
    stats = runs._scheduler.stats
    assert stats.num_accepted_drafts > least * stats.num_drafts > 20


@pytest.mark.slow
def test_a_padded_head_has_its_logits(prompts: list[list[int]], tmp_path: Path) -> None:
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    save_padded_model(FOLDER, tmp_path / "large", num_layers=5, head=MTP_HEAD)
    small, large = (load_with_head(path, "float32") for path in (with_head(tmp_path / "small"), tmp_path / "large"))
    expected, logits = (computed_chain(each, prompts[1] * 3, 2)[0] for each in (small, large))
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-2)


def test_it_is_small() -> None:
    assert (FOLDER / "mtp.safetensors").stat().st_size < 4_000_000
