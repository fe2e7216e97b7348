"""Language models of text models that transformers has none of, with the head that the whole model has."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep

from engine.model.known.same_code import class_named

__all__ = ["leave_out_unused", "register_language_model"]


class _TextModel(NamedTuple):
    """A text model, and what its whole model does with it."""

    name: str
    """Family and class."""
    whole: str
    """The whole model's class, of the same family."""
    whole_type: str
    """Its type, whose tensors may have names that transformers changes."""
    multiplier: str | None = None
    """Name of the setting by which its head multiplies logits."""
    cap: str | None = None
    """Name of the setting that bounds them."""
    unused: str | None = None
    """Name of modules in its layers that no token of a text goes through."""


_MUSE = "output_multiplier", "final_logit_softcapping"
_TEXT_MODELS = {
    "deepseek_ocr2_text": _TextModel(
        "deepseek_ocr2.DeepseekOcr2TextModel", "DeepseekOcr2ForConditionalGeneration", "deepseek_ocr2"
    ),
    "ernie4_5_vl_moe_text": _TextModel(
        "ernie4_5_vl_moe.Ernie4_5_VLMoeTextModel",
        "Ernie4_5_VLMoeForConditionalGeneration",
        "ernie4_5_vl_moe",
        unused="vision_moe",
    ),
    "glm5_next_text": _TextModel("glm5_next.Glm5NextTextModel", "Glm5NextForConditionalGeneration", "glm5_next"),
    "mistral_large4_text": _TextModel(
        "mistral_large4.MistralLarge4TextModel",
        "MistralLarge4ForConditionalGeneration",
        "mistral_large4",
        cap="final_logit_softcapping",
    ),
    "molmo2_text": _TextModel("molmo2.Molmo2TextModel", "Molmo2ForConditionalGeneration", "molmo2"),
    "muse_glimmer_text": _TextModel(
        "muse_glimmer.MuseGlimmerTextModel", "MuseGlimmerForConditionalGeneration", "muse_glimmer", *_MUSE
    ),
    "muse_spark_text": _TextModel(
        "muse_spark.MuseSparkTextModel", "MuseSparkForConditionalGeneration", "muse_spark", *_MUSE
    ),
    "step3p5": _TextModel("step3p7.Step3p7TextModel", "Step3p7ForConditionalGeneration", "step3p7"),
}
"""Type of a text model -> the model."""


_NAMED_AS_WHOLE = {"minimax_m3_vl_text": ("MiniMaxM3VLForCausalLM", "minimax_m3_vl")}
"""Type of a text model of which transformers has a language model -> its class, and the type of the whole model, whose
names in layers it is not told to read."""


_READ_AS_WHOLE = {"inkling_text": ("InklingForCausalLM", "inkling_mm_model")}
"""Type of a text model of which transformers has a language model -> its class, and the type of the whole model, all of
whose names it is not told to read."""


class _WithHead(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A text model with a head, of which each text model's own class is derived."""

    _text: _TextModel

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model = class_named(self._text.name)(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: Tensor | None = None, logits_to_keep: int | Tensor = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        output = self.model(input_ids=input_ids, **inputs)
        hidden_states = slice_logits_to_keep(output.last_hidden_state, logits_to_keep)
        logits = self.lm_head(hidden_states)
        if self._text.multiplier is not None:
            logits = logits * getattr(self.config, self._text.multiplier)
        if self._text.cap is not None:
            cap = getattr(self.config, self._text.cap)
            logits = torch.tanh(logits / cap) * cap
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)


def leave_out_unused(module: PreTrainedModel) -> None:
    """Takes modules out of a model of this kind, once it is loaded, that no token of a text goes through."""
    if isinstance(module, _WithHead) and module._text.unused is not None:
        for owner in module.modules():
            owner._modules.pop(module._text.unused, None)


def register_language_model(config: PreTrainedConfig, tensor_names: Mapping[str, str]) -> None:
    """Lets transformers make and read a language model of the text model with `config`, if its type is listed here.
    `tensor_names` say what tensors of a whole model are called in it, as patterns."""
    if config.model_type in _NAMED_AS_WHOLE:
        name, whole_type = _NAMED_AS_WHOLE[config.model_type]
        in_layers = [each for each in _names_of_whole(whole_type) if each.source_patterns[0].startswith(r"\.")]
        register_checkpoint_conversion_mapping(name, in_layers, overwrite=True)
    if config.model_type in _READ_AS_WHOLE:
        name, whole_type = _READ_AS_WHOLE[config.model_type]
        own = WeightRenaming(source_patterns=r"^model\.language_model\.", target_patterns="model.")
        register_checkpoint_conversion_mapping(name, [*_names_of_whole(whole_type), own], overwrite=True)
    text = _TEXT_MODELS.get(config.model_type)
    if text is None:
        return
    kind: type[PreTrainedModel] = _language_model(text, cast(Any, type(config)))
    names = [WeightRenaming(source_patterns=old, target_patterns=new) for old, new in tensor_names.items()]
    of_whole = _names_of_whole(text.whole_type)
    register_checkpoint_conversion_mapping(kind.__name__, [*of_whole, *names], overwrite=True)
    AutoModelForCausalLM.register(type(config), kind, exist_ok=True)


def _names_of_whole(whole_type: str) -> list[Any]:
    """Returns what transformers changes of the names and tensors in checkpoints of a whole model."""
    return get_checkpoint_conversion_mapping(whole_type) or []


@functools.cache
def _language_model(text: _TextModel, config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Returns a class that is named as transformers names such ones, with the settings of the text model's family."""
    text_model = class_named(text.name)
    whole = class_named(f"{text.name.partition('.')[0]}.{text.whole}")
    is_tied = bool(getattr(whole, "_tied_weights_keys", None))
    settings = {
        "__module__": text_model.__module__,  # transformers reads its source to know what can be set
        "_text": text,
        "config_class": config_class,
        "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"} if is_tied else None,
    }
    family = text_model.__mro__[1]
    name = text_model.__name__.removesuffix("Model") + "ForCausalLM"
    return cast(type[PreTrainedModel], type(name, (_WithHead, family), settings))
