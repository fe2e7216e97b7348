"""Requests with adapters get the answers of models into which these are merged, whatever else runs, bit for bit."""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine.core.errors import InvalidParameterError
from engine.core.messages import RequestUpdate
from engine.engine import Engine
from engine.runner.loaded_model import LoadedModel
from engine.scheduling.speculation.prompt_lookup import PromptLookup
from tests.crossed import slow_but
from tests.engine.fakes import add, run_to_end, tokens_of
from tests.engine.golden_tokens import MAX_TOKENS, generated, prompts
from tests.engine.scheduling.speculation.prophets import OracleDrafter
from tests.engine.tiny_adapters import linear_layers, make_adapter, merge
from tests.engine.tiny_models import VOCAB_SIZE, WIDE, load_reference, load_tiny, make_checkpoint, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN = (
    "llama",
    "qwen2",
    "qwen3",
    "mixtral",
    "gemma3",
    "gemma4_e",
    "gpt2",
    "gpt_neox",
    "phi3",
    "starcoder2",
    "deepseek_v3",
    "deepseek_v4",
    "qwen3_5",
    "lfm2",
    "nemotron_h",
    "falcon_h1",
    "inkling",
    "inkling2",
    "qwen4",
    "zaya",
    WIDE,
)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rank": 4},
    "rank-stabilized": {"rank": 3, "use_rslora": True, "lora_alpha": 2},
    "patterns": {"rank": 4, "rank_pattern": {"v_proj": 7, "down_proj": 1}, "alpha_pattern": {"q_proj": 5}},
    "some modules": {"rank": 5, "target_modules": ["q_proj", "v_proj", "up_proj"]},
    "some layers": {"rank": 4, "layers_to_transform": [0, 2]},
}


def names_of_layers(path: Path) -> list[str]:
    """Returns the last names of the checkpoint's linear layers, without those that can have no adapter."""
    names = {name.rpartition(".")[2] for name in linear_layers(load_reference(path))}
    return sorted(names - {"lm_head", "gate", "router", "o_a_proj"})  # the last in groups


def assert_golden(path: Path, adapters: dict[str, Path], model: LoadedModel) -> None:
    """Asks for each adapter, and for none, in one batch."""
    engine = tiny_engine(model, has_adapters=True)
    digests = {name: engine.load_adapter(str(adapter)).digest for name, adapter in adapters.items()}
    for index, prompt in enumerate(prompts()):
        for name in ("", *adapters):
            digest = digests.get(name, "")
            add(engine, f"{name}-{index}", prompt, max_tokens=MAX_TOKENS, temperature=0.0, adapter=digest)
    updates = run_to_end(engine)
    answers = {}
    for name in ("", *adapters):
        merged = load_reference(path) if name == "" else merge(load_reference(path), adapters[name])
        expected = [generated(merged, prompt) for prompt in prompts()]
        answers[name] = [tokens_of(updates[f"{name}-{index}"]) for index in range(len(expected))]
        assert answers[name] == expected, name
    assert len({str(tokens) for tokens in answers.values()}) == len(answers), "an adapter changes nothing"


@pytest.mark.parametrize("architecture", slow_but(GOLDEN, "llama", "gpt2", "mixtral", "qwen3_5"))
def test_answers_are_those_of_merged_weights(architecture: str, tmp_path: Path) -> None:
    path = make_checkpoint(architecture, tmp_path)
    targets = names_of_layers(path)
    sizes = {"a": 4, "b": 9}
    adapters = {
        name: make_adapter(tmp_path / name, load_reference(path), rank, 0.1, rank=rank, target_modules=targets)
        for name, rank in sizes.items()
    }
    assert_golden(path, adapters, load_tiny(path, adapters=adapters))


def test_answers_follow_the_settings_of_each_adapter(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path)
    adapters = {
        name: make_adapter(tmp_path / name, load_reference(path), seed, **changes)
        for seed, (name, changes) in enumerate(KINDS.items())
    }
    assert_golden(path, adapters, load_tiny(path))


# The same answer, bit for bit.

MINE, OTHER = "mine", "other"


class Case:
    """A model of its own with two adapters."""

    def __init__(self, architecture: str, dtype: str, quantization: str, path: Path) -> None:
        checkpoint = make_checkpoint(architecture, path)
        self._last: Engine | None = None
        self.model = load_tiny(checkpoint, dtype, quantization)
        targets = names_of_layers(checkpoint)
        self.adapters = {
            name: make_adapter(path / name, load_reference(checkpoint), seed, 0.2, rank=rank, target_modules=targets)
            for seed, (name, rank) in enumerate(((MINE, 6), (OTHER, 3)))
        }

    def engine(self, **settings: Any) -> tuple[Engine, dict[str, str]]:
        """Returns an engine with both adapters, and their digests; the one before, over the same layers, loses its."""
        if self._last is not None:
            for path in self.adapters.values():
                self._last.unload_adapter(self._last.load_adapter(str(path)).digest)
            run_to_end(self._last)
        engine = self._last = tiny_engine(self.model, has_adapters=True, **settings)
        return engine, {name: engine.load_adapter(str(path)).digest for name, path in self.adapters.items()} | {"": ""}


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + 7 * index * index + 3 * index) % VOCAB_SIZE for index in range(length)]


TEXT = prompt(1, 37)


def add_mine(engine: Engine, digest: str, **fields: Any) -> None:
    params = {"temperature": 1.3, "seed": 11, "top_p": 0.9, "max_tokens": 12, "logprobs": 5}
    add(engine, "mine", TEXT, adapter=digest, **{**params, **fields})


def answer(updates: list[RequestUpdate]) -> list[Any]:
    return [(item.token_id, item.logprob, item.top) for update in updates for item in update.logprobs]


def alone(case: Case, name: str, **settings: Any) -> list[Any]:
    engine, digests = case.engine(**settings)
    add_mine(engine, digests[name])
    return answer(run_to_end(engine)["mine"])


def among_others(case: Case, name: str) -> list[Any]:
    """Runs the request beside others of the same text, and of other texts, with each adapter and none."""
    engine, digests = case.engine(max_prefill_tokens_per_gap=64)
    for index in range(24):
        if index == 12:
            engine.step()
            add_mine(engine, digests[name])
        adapter = digests[("", MINE, OTHER)[index % 3]]
        text = TEXT if index < 6 else prompt(index, 1 + 3 * index)
        add(engine, str(index), text, max_tokens=15, temperature=1.0, seed=index, adapter=adapter)
    return answer(run_to_end(engine)["mine"])


def after_a_prefix_hit(case: Case, name: str) -> list[Any]:
    engine, digests = case.engine(block_size=4, state_checkpoint_interval=12)
    for each in ({"": OTHER, MINE: "", OTHER: MINE}[name], name):
        add(engine, "before", TEXT, max_tokens=1, adapter=digests[each])
        assert run_to_end(engine)["before"][0].first.num_cached_tokens == 0, "found what another adapter computed"
    add_mine(engine, digests[name])
    updates = run_to_end(engine)["mine"]
    assert updates[0].first is not None and updates[0].first.num_cached_tokens == 36
    return answer(updates)


def from_files(case: Case, name: str) -> list[Any]:
    """Runs the request on an engine that finds its prompt in the files of another one, which had more adapters."""
    with TemporaryDirectory() as directory:
        before, digests = case.engine(block_size=4, kv_store=directory)
        for each in ("", MINE, OTHER):
            add(before, each, TEXT, max_tokens=1, adapter=digests[each])
        run_to_end(before)
        before.close()
        case.adapters = dict(reversed(case.adapters.items()))
        engine, digests = case.engine(block_size=4, kv_store=directory)
        add_mine(engine, digests[name])
        updates = run_to_end(engine)["mine"]
        engine.close()
    assert updates[0].first is not None and updates[0].first.num_cached_tokens == 36
    return answer(updates)


def after_preemption(case: Case, name: str) -> list[Any]:
    settings = {"enable_prefix_caching": False, "free_window_blocks": False}  # with which none would be preempted
    engine, digests = case.engine(num_blocks=22, block_size=4, **settings)
    add_mine(engine, digests[name])
    updates = list(engine.step().updates)
    add(engine, "first", prompt(5, 37), max_tokens=50, priority=-1, adapter=digests[OTHER])
    updates += run_to_end(engine)["mine"]
    assert updates[-1].num_preemptions > 0
    return answer(updates)


def speculating(case: Case, name: str, mine: list[int]) -> list[Any]:
    """Runs the request with drafts of which every third token is wrong, beside one with another adapter."""
    oracle = OracleDrafter(lambda _, output: mine[len(output) % len(mine)], cycle([False, True, False]).__next__)
    drafters = iter([oracle, PromptLookup()])
    settings: dict[str, Any] = {"new_drafter": drafters.__next__, "clock": lambda: 0.0}
    engine, digests = case.engine(num_speculative_tokens=4, **settings)
    add_mine(engine, digests[name])
    updates = list(engine.step().updates)
    add(engine, "other", prompt(3, 9) * 4, max_tokens=30, adapter=digests[OTHER])
    updates += run_to_end(engine)["mine"]
    assert any(len(update.token_ids) > 1 for update in updates)
    return answer(updates)


def resumed(case: Case, name: str, tokens: list[int]) -> list[Any]:
    engine, digests = case.engine()
    add_mine(engine, digests[name], output_token_ids=tokens)
    return answer(run_to_end(engine)["mine"])


CASES = (("llama", "bfloat16", "int4"), ("qwen3_5", "bfloat16", "none"))
SLOW_CASES = (
    *(("llama", "float32", "none"), (WIDE, "float32", "int8")),
    *(("llama", "bfloat16", bits) for bits in ("none", "int8")),
    *((name, "bfloat16", "none") for name in ("mixtral", "gemma3", "gpt2", WIDE)),
)


@pytest.mark.parametrize(
    ("architecture", "dtype", "quantization"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_a_request_gets_the_same_answer_alone_and_among_other_adapters(
    architecture: str, dtype: str, quantization: str, tmp_path: Path
) -> None:
    case = Case(architecture, dtype, quantization, tmp_path)
    plain = tiny_engine(load_tiny(tmp_path / architecture, dtype, quantization))
    add_mine(plain, "")
    without = answer(run_to_end(plain)["mine"])
    answers = {name: alone(case, name) for name in ("", MINE, OTHER)}
    assert answers[""] == without, "a request without an adapter gets another answer"
    assert len({str(each) for each in answers.values()}) == 3
    for name, mine in answers.items():
        token_ids = [token_id for token_id, _, _ in mine]
        assert among_others(case, name) == mine
        assert alone(case, name, max_num_batched_tokens=5) == mine
        assert after_a_prefix_hit(case, name) == mine
        assert case.model.states or from_files(case, name) == mine
        assert after_preemption(case, name) == mine
        assert speculating(case, name, token_ids) == mine
        assert resumed(case, name, token_ids[:7]) == mine[7:]


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    yield Case("llama", "float32", "none", tmp_path)


def test_a_self_draft_without_the_adapter_changes_no_answer(tmp_path: Path) -> None:
    case = Case("llama", "bfloat16", "none", tmp_path)
    mine = alone(case, MINE)
    case.model = load_tiny(tmp_path / "llama", "bfloat16", "none", "int4")
    assert alone(case, MINE, num_speculative_tokens=4, clock=lambda: 0.0) == mine


def test_an_unloaded_adapter_serves_its_requests_to_their_end_and_is_freed_then(case: Case) -> None:
    mine = alone(case, MINE)
    engine, digests = case.engine()
    add_mine(engine, digests[MINE])
    engine.step()
    engine.unload_adapter(digests[MINE])
    with pytest.raises(InvalidParameterError, match="no longer loaded"):
        add(engine, "late", TEXT, adapter=digests[MINE])
    engine.step()
    assert engine._adapters.unloaded, "freed while a request runs with it"
    updates = run_to_end(engine)["mine"]
    assert answer(updates) == mine[-len(answer(updates)) :]
    assert not engine._adapters.unloaded and not engine.has_work
    again = engine.load_adapter(str(case.adapters[MINE]))
    assert again.digest == digests[MINE]
    add_mine(engine, again.digest)
    assert answer(run_to_end(engine)["mine"]) == mine


def test_an_adapter_that_is_loaded_again_while_it_ends_stays(case: Case) -> None:
    engine, digests = case.engine()
    add_mine(engine, digests[MINE])
    engine.unload_adapter(digests[MINE])
    assert engine.load_adapter(str(case.adapters[MINE])).digest == digests[MINE]
    run_to_end(engine)
    add_mine(engine, digests[MINE])
    assert len(answer(run_to_end(engine)["mine"])) == 12


def test_numbers_of_adapters_are_not_mixed_up_when_they_come_and_go(case: Case) -> None:
    mine = {name: alone(case, name) for name in (MINE, OTHER)}
    engine, digests = case.engine()
    for name in (MINE, OTHER, MINE, OTHER):
        engine.unload_adapter(digests[name])
        engine.step()
        assert engine.load_adapter(str(case.adapters[name])).digest == digests[name]
        for each in (MINE, OTHER):
            add_mine(engine, digests[each])
            assert answer(run_to_end(engine)["mine"]) == mine[each]
