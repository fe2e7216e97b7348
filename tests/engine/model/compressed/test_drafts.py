"""What drafts for models with compressed attention, and what is left out or refused."""

import logging
from pathlib import Path

import pytest
import torch

from engine.core.errors import ConfigError
from tests.engine.model.always_drafting import answers
from tests.engine.model.eagle_checkpoints import head_tensors, load_with_eagle, write_head
from tests.engine.model.mtp_checkpoints import always_drafting, has_head_beside
from tests.engine.tiny_models import load_tiny, make_checkpoint, tiny_engine

pytestmark = pytest.mark.usefixtures("one_thread")


def test_its_own_mtp_layers_are_left_out_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint("deepseek_v4", tmp_path)
    with caplog.at_level(logging.INFO, "engine.model.drafting.mtp_head"):
        assert not has_head_beside(path, "mtp.0.e_proj.weight", torch.ones(32, 32))
    assert "drafts without its MTP layers: their form is not known here" in caplog.text


def test_a_head_that_reads_hidden_states_of_layers_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v4", tmp_path)
    head = write_head(tmp_path / "head", head_tensors())
    with pytest.raises(ConfigError, match=r"those of this model have several streams \(hc_mult\)"):
        load_with_eagle(path, head)


def test_its_own_rounded_weights_change_no_bit(tmp_path: Path) -> None:
    path = make_checkpoint("deepseek_v4", tmp_path)
    plain, drafting = load_tiny(path, "bfloat16"), load_tiny(path, "bfloat16", drafts="int4")
    engine = always_drafting(drafting)
    assert answers(engine) == answers(tiny_engine(plain))
    assert engine._scheduler.stats.num_accepted_drafts > 0
