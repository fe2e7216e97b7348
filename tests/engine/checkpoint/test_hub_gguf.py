"""GGUF files of the hub, named by the type of their weights."""

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoint.hub_gguf import gguf_of, split_tag
from engine.checkpoint.local import check_checkpoint
from engine.checkpoint.pinning import pinned
from engine.core.config import EngineConfig
from engine.core.errors import ModelError
from twostep.commands import pull

COMMIT = "1" * 40
Downloaded = Callable[..., Path]


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Downloaded:
    """downloaded(*names): the folder of org/model's files, which are all that there is; the hub is not asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--model"

    def make(*names: str) -> Path:
        folder = repository / "snapshots" / COMMIT
        for name in ("README.md", *names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        return folder

    return make


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("org/model", ("org/model", None)),
        ("org/model:Q4_K_M", ("org/model", "Q4_K_M")),
        ("./a:b", ("./a:b", None)),
        ("/a/b:c.gguf", ("/a/b:c.gguf", None)),
    ],
)
def test_the_type_stands_behind_a_colon(model: str, parts: tuple[str, str | None]) -> None:
    assert split_tag(model) == parts
    if parts[1]:
        check_checkpoint(model)


@pytest.mark.parametrize("model", ["org/model:", "org/model:a b", "org/model:Q4:Q5", "a:b/c"])
def test_other_colons_are_refused(model: str) -> None:
    with pytest.raises(ModelError, match="nor a hub id, which looks like owner/name, or owner/name:Q4_K_M"):
        check_checkpoint(model)


@pytest.mark.parametrize("tag", ["Q4_K_M", "q4_k_m"])
@pytest.mark.parametrize("name", ["model-Q4_K_M.gguf", "model.q4_k_m.gguf", "Q4_K_M/model-Q4_K_M.gguf"])
def test_the_file_of_the_type_is_found(tag: str, name: str, downloaded: Downloaded) -> None:
    folder = downloaded(name, "model-Q4_K_S.gguf", "mmproj-model-Q4_K_M.gguf", "model-IQ4_K_M.gguf", "model-Q8_0.gguf")
    assert gguf_of("org/model", tag, None) == folder / name


def test_of_several_parts_the_first_is_named(downloaded: Downloaded) -> None:
    names = [f"model-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    folder = downloaded(*names, "model-Q4_0.gguf")
    assert gguf_of("org/model", "Q8_0", None) == folder / names[0]


def test_two_files_of_a_type_are_not_chosen_from(downloaded: Downloaded) -> None:
    downloaded("a-Q8_0.gguf", "b-Q8_0.gguf")
    with pytest.raises(ModelError, match=r"several files for Q8_0: a-Q8_0\.gguf, b-Q8_0\.gguf\. Download one"):
        gguf_of("org/model", "Q8_0", None)


def test_a_type_that_is_not_there_is_answered_with_those_that_are(downloaded: Downloaded) -> None:
    downloaded("model-Q8_0.gguf", "model-Q4_0.gguf", "mmproj-F16.gguf")
    with pytest.raises(ModelError, match="has no GGUF file for Q5_K_M; there are Q4_0, Q8_0"):
        gguf_of("org/model", "Q5_K_M", None)


def test_a_repository_of_gguf_files_asks_for_one(downloaded: Downloaded) -> None:
    downloaded("model-Q8_0.gguf", "model-Q4_0.gguf")
    with pytest.raises(ModelError, match="name the one to serve, as in org/model:Q4_0; there are Q4_0, Q8_0"):
        pinned(EngineConfig(model="org/model"))


def test_what_is_served_is_the_file(downloaded: Downloaded) -> None:
    folder = downloaded("model-Q8_0.gguf")
    config = pinned(EngineConfig(model="org/model:Q8_0", revision=COMMIT, draft_model="org/model:Q8_0"))
    path = str(folder / "model-Q8_0.gguf")
    assert (config.model, config.revision, config.draft_model) == (path, None, path)


def test_pull_prints_where_the_file_is(downloaded: Downloaded, capsys: pytest.CaptureFixture[str]) -> None:
    folder = downloaded("model-Q8_0.gguf")
    assert pull.main(["org/model:Q8_0"]) == 0
    assert capsys.readouterr().out == f"{folder / 'model-Q8_0.gguf'}\n"
