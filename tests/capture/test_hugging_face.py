"""Hugging Face models, built from tiny configurations, train as in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import commfuse_fx as cf
from tests.capture.equivalence import assert_gradients_as_eager, assert_trains_as_eager

transformers = pytest.importorskip("transformers")

Case = tuple[str, str, dict[str, Any], Callable[[], dict[str, torch.Tensor]]]

_SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
_GQA = {**_SMALL, "num_key_value_heads": 2, "head_dim": 4}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def words() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 40, (2, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def masked() -> dict[str, torch.Tensor]:
    given = words()
    given["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
    given["attention_mask"][1, 6:] = 0
    given["labels"][1, 6:] = -100
    return given


def classes() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 40, (2, 8)), "labels": torch.tensor([0, 1])}


def images(size: int = 16) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}


def pairs() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 40, (2, 8)), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
_SEQ2SEQ = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 16,
    "decoder_start_token_id": 2,
    **_IDS,
}

CASES: dict[str, Case] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, **_IDS},
        masked,
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_SMALL, **_IDS}, words),
    "bert_mlm": ("BertConfig", "BertForMaskedLM", _SMALL, masked),
    "bert_classes": ("BertConfig", "BertForSequenceClassification", _SMALL, classes),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**_SMALL, "max_position_embeddings": 20}, masked),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": 40, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 16},
        masked,
    ),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {**_SMALL, "embedding_size": 16}, words),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**_SMALL, "embedding_size": 16, **_IDS}, words),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 40,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        words,
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", _SEQ2SEQ, words),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_GQA, **_IDS}, masked),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_GQA, "sliding_window": 4, **_IDS}, words),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_GQA, **_IDS}, words),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GQA, **_IDS}, words),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_GQA, **_IDS}, words),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_GQA, **_IDS}, words),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**_SMALL, "num_key_value_heads": 2, **_IDS}, words),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ffn_dim": 24,
            "max_position_embeddings": 16,
            "word_embed_proj_dim": 16,
            **_IDS,
        },
        words,
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 2, **_IDS},
        words,
    ),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, **_IDS},
        words,
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_GQA, "num_local_experts": 2, "num_experts_per_tok": 1, **_IDS},
        words,
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, **_IDS},
        words,
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", _VISION, images),
    "deit": ("DeiTConfig", "DeiTForImageClassification", _VISION, images),
    "beit": ("BeitConfig", "BeitForImageClassification", _VISION, images),
    "clip": (
        "CLIPConfig",
        "CLIPModel",
        {
            "text_config": {**_SMALL, "eos_token_id": 2, "projection_dim": 8},
            "vision_config": {**_VISION, "projection_dim": 8},
            "projection_dim": 8,
        },
        pairs,
    ),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        lambda: images(32),
    ),
    "convnext": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        lambda: images(32),
    ),
    "swin": (
        "SwinConfig",
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4},
        lambda: images(32),
    ),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {
            **{k: v for k, v in _SEQ2SEQ.items() if k != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 10,
            "max_target_positions": 16,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        lambda: {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, 40, (2, 6))},
    ),
    "wav2vec2": (
        "Wav2Vec2Config",
        "Wav2Vec2ForSequenceClassification",
        {
            **{k: v for k, v in _SMALL.items() if k != "max_position_embeddings"},
            "conv_dim": [8, 8],
            "conv_stride": [4, 4],
            "conv_kernel": [6, 4],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "apply_spec_augment": False,
            "layerdrop": 0.0,
            "classifier_proj_size": 8,
        },
        lambda: {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 1])},
    ),
}


def _model(name: str, **options: Any) -> torch.nn.Module:
    config_name, model_name, settings, _ = CASES[name]
    config = getattr(transformers, config_name)(**settings)
    for key, value in options.items():
        setattr(config, key, value)
    model: torch.nn.Module = getattr(transformers, model_name)(config)
    return model.double().train()


def _inputs(name: str) -> dict[str, Any]:
    given = CASES[name][3]()
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given.items()}


def test_mixture_of_experts() -> None:
    """Grouped by sizes that stay on the device; the loop over the experts that were hit is data dependent."""
    for implementation in ("grouped_mm", "batched_mm"):
        model = _model("mixtral", _experts_implementation=implementation).float()
        assert_trains_as_eager(model, [((), _inputs("mixtral"))], tolerance=1e-4)
    step = cf.compile(_model("mixtral", _experts_implementation="eager"), form="step")
    with pytest.raises(
        cf.CaptureError, match=r"cannot trace model\.layers\.0\.mlp\.experts at .*modeling_mixtral\.py:\d+"
    ):
        step(**_inputs("mixtral"))


@pytest.mark.parametrize("name", [name for name in CASES if name != "mixtral"])
def test_model(name: str) -> None:
    assert_trains_as_eager(_model(name), [((), _inputs(name))], whole_step=len(name) % 2 == 0)


def _cast(name: str, dtype: torch.dtype, **options: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    given = _inputs(name)
    inputs = {k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in given.items()}
    return _model(name, **options).to(dtype), inputs


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert_mlm", "t5"])
def test_eager_attention_in_single_precision(name: str) -> None:
    model, inputs = _cast(name, torch.float32, _attn_implementation="eager")
    assert_gradients_as_eager(model, (), inputs)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert_mlm", "vit"])
def test_gradient_checkpointing_in_half_precision(name: str) -> None:
    model, inputs = _cast(name, torch.bfloat16)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    assert_gradients_as_eager(model, (), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["wav2vec2", "gemma2", "vit", "roberta"])
def test_model_in_its_usual_precision(name: str, dtype: torch.dtype) -> None:
    model, inputs = _cast(name, dtype)
    assert_gradients_as_eager(model, (), inputs)
