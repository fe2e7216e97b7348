"""Contexts are limited by what a configuration says; where it says nothing, a model with attention is refused."""

import pytest
import torch
from transformers import LlamaConfig, MambaConfig, WhisperConfig

from engine.core.errors import UnsupportedModelError
from engine.mixers.state import StateShape
from engine.model.context_limit import context_limit


def test_the_configuration_says_how_long_contexts_may_be() -> None:
    assert context_limit(LlamaConfig(max_position_embeddings=96), ()) == 96


def test_rotary_frequencies_that_depend_on_the_batch_limit_contexts_to_where_they_do_not() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    assert context_limit(LlamaConfig(max_position_embeddings=96, rope_parameters=rope), ()) == 64


def test_positions_of_an_unknown_number_are_refused_unless_states_stand_for_them() -> None:
    with pytest.raises(UnsupportedModelError, match="whisper has no max_position_embeddings"):
        context_limit(WhisperConfig(), ())
    assert context_limit(MambaConfig(), (StateShape((4, 4), torch.float32),)) == 1 << 17
