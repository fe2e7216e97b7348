"""Errors of models' code are refusals that say what to do."""

import re
from pathlib import Path

import pytest

from engine.core.errors import ModelError, UnsupportedModelError
from engine.model import refusals
from engine.model.refusals import KNOWN_TRANSFORMERS, refused_if_it_fails

ADVICE = f"(transformers 9.1.0 may have changed it: pip install 'transformers=={KNOWN_TRANSFORMERS}.*')"
CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints.txt"


def refusal_of(error: Exception) -> str:
    with pytest.raises(UnsupportedModelError) as raised, refused_if_it_fails("It cannot run"):
        raise error
    return str(raised.value)


def test_the_known_version_is_the_one_that_is_tested() -> None:
    pinned = re.search(r"^transformers==(\d+\.\d+)", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pinned and pinned[1] == KNOWN_TRANSFORMERS


def test_another_version_of_transformers_is_named_where_it_may_be_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = AttributeError("'Attention' object has no attribute 'r_proj'")
    monkeypatch.setattr(refusals, "version", lambda _: "9.1.0")
    assert refusal_of(missing) == f"It cannot run: AttributeError: {missing} {ADVICE}"
    assert refusal_of(ValueError("too large")) == "It cannot run: ValueError: too large"
    monkeypatch.setattr(refusals, "version", lambda _: f"{KNOWN_TRANSFORMERS}.7")
    assert refusal_of(missing) == f"It cannot run: AttributeError: {missing}"


def test_so_it_is_where_a_checkpoint_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.core.config import EngineConfig
    from engine.model import loader
    from tests.engine.model.small_models import EMBEDDED

    def fail(*_: object) -> None:
        raise AttributeError("no attribute 'r_proj'")

    monkeypatch.setattr(refusals, "version", lambda _: "9.1.0")
    monkeypatch.setattr(loader, "_load", fail)
    with pytest.raises(ModelError, match=re.escape(ADVICE)):
        loader.load_model(EngineConfig(model=str(EMBEDDED)))
