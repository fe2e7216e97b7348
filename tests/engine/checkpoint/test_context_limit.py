"""The longest context that the model's own configuration allows."""

from pathlib import Path

from tests.engine.tiny_models import load_tiny, make_checkpoint, make_config


def test_contexts_stay_where_frequencies_of_no_kind_of_layers_depend_on_the_batch(tmp_path: Path) -> None:
    gemma = make_checkpoint("gemma3", tmp_path)
    config = make_config("gemma3")
    config.rope_parameters = {
        "full_attention": {
            "rope_type": "dynamic",
            "factor": 4.0,
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    config.save_pretrained(gemma)
    assert load_tiny(gemma).max_model_len == 64
