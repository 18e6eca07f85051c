"""The registry: small models of transformers, with random weights, built from a configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers
import zoo_batches as batches
from torch import nn
from zoo_batches import VOCABULARY, Make


@dataclass(frozen=True)
class ZooModel:
    """A model and its batches.

    Attributes:
        name: Its name in the tests.
        make: Makes the network.
        batch: Makes a batch, passed as keyword arguments.
        quick: Whether ``make test`` runs it too.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Make
    quick: bool = False


MODELS: dict[str, ZooModel] = {}
REFUSED: dict[str, ZooModel] = {}  # because of Python branches on values


def add(name: str, model: str, batch: Make, *, quick: bool = False, **settings: Any) -> None:
    """Add a model of transformers.

    Args:
        name: Its name in the tests.
        model: Its class in transformers.
        batch: Makes a batch.
        quick: Whether ``make test`` runs it too.
        settings: Of its configuration.
    """
    assert name not in MODELS
    MODELS[name] = _model(name, model, batch, settings, quick=quick)


def add_refused(name: str, model: str, batch: Make, **settings: Any) -> None:
    """Add a model that cannot be captured, and says so."""
    assert name not in REFUSED
    REFUSED[name] = _model(name, model, batch, settings)


def _model(
    name: str, model: str, batch: Make, settings: dict[str, Any], *, quick: bool = False
) -> ZooModel:
    @functools.cache
    def configuration() -> Any:
        """One for all workers: a graph that read another's would have to be captured again."""
        return getattr(transformers, model).config_class(**settings)

    kept: dict[str, Any] = {}

    def make() -> nn.Module:
        network: Any = getattr(transformers, model)(configuration())
        for module in network.modules():  # T5 copies it: a graph would hold for one network alone
            own = vars(module).get("config")
            if isinstance(own, transformers.PretrainedConfig):
                module.config = kept.setdefault(str(own.to_dict()), own)
        return network

    return ZooModel(name, make, batch, quick)


WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
DECODER = {**WIDTH, **TEXT, **ENDS, "intermediate_size": 48, "num_key_value_heads": 2}
ENCODER = {**WIDTH, **TEXT, "intermediate_size": 48}
IMAGE = {**WIDTH, "intermediate_size": 48, "num_labels": 3}
ENCODER_DECODER = {
    **ENDS,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}

# Decoders.
add(
    "gpt2",
    "GPT2LMHeadModel",
    batches.next_token,
    n_embd=32,
    n_layer=3,
    n_head=4,
    n_positions=32,
    vocab_size=VOCABULARY,
    **ENDS,
)
add("llama", "LlamaForCausalLM", batches.next_token_padded, quick=True, **DECODER)
add("llama, no mask", "LlamaForCausalLM", batches.next_token, **DECODER)
add("llama, mask of ones", "LlamaForCausalLM", batches.next_token_all_ones, **DECODER)
add("llama, no cache", "LlamaForCausalLM", batches.next_token, use_cache=False, **DECODER)
add("mistral", "MistralForCausalLM", batches.next_token_padded, sliding_window=4, **DECODER)
add(
    "mixtral",
    "MixtralForCausalLM",
    batches.next_token,
    quick=True,
    num_local_experts=4,
    output_router_logits=True,
    **DECODER,
)
add("qwen2", "Qwen2ForCausalLM", batches.next_token, tie_word_embeddings=True, **DECODER)
add("qwen3", "Qwen3ForCausalLM", batches.next_token_padded, head_dim=8, **DECODER)
add(
    "qwen3 moe",
    "Qwen3MoeForCausalLM",
    batches.next_token_padded,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    **DECODER,
)
add("gemma", "GemmaForCausalLM", batches.next_token, head_dim=8, **DECODER)
add(
    "gemma2",
    "Gemma2ForCausalLM",
    batches.next_token_padded,
    head_dim=8,
    sliding_window=4,
    **DECODER,
)
add("phi", "PhiForCausalLM", batches.next_token, **DECODER)
add("phi3", "Phi3ForCausalLM", batches.next_token_padded, **DECODER)
add(
    "gpt-neox",
    "GPTNeoXForCausalLM",
    batches.next_token,
    **{k: v for k, v in DECODER.items() if k != "num_key_value_heads"},
)
add(
    "gpt-j",
    "GPTJForCausalLM",
    batches.next_token_padded,
    n_embd=32,
    n_layer=2,
    n_head=4,
    n_positions=32,
    rotary_dim=4,
    vocab_size=VOCABULARY,
    **ENDS,
)
add(
    "opt",
    "OPTForCausalLM",
    batches.next_token_padded,
    ffn_dim=48,
    word_embed_proj_dim=32,
    **WIDTH,
    **TEXT,
    **ENDS,
)
add(
    "bloom",
    "BloomForCausalLM",
    batches.next_token_padded,
    hidden_size=32,
    n_layer=2,
    n_head=4,
    hidden_dropout=0.1,
    vocab_size=VOCABULARY,
    **ENDS,
)
add(
    "falcon",
    "FalconForCausalLM",
    batches.next_token,
    alibi=False,
    **WIDTH,
    **ENDS,
    vocab_size=VOCABULARY,
)
add(
    "deepseek-v3",
    "DeepseekV3ForCausalLM",
    batches.next_token_padded,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    kv_lora_rank=8,
    q_lora_rank=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    **{**DECODER, "num_key_value_heads": 4},
)
add(
    "gpt-oss",
    "GptOssForCausalLM",
    batches.next_token_padded,
    num_local_experts=4,
    num_experts_per_tok=2,
    head_dim=8,
    sliding_window=4,
    **DECODER,
)
add(
    "xlnet",
    "XLNetLMHeadModel",
    batches.next_token_padded,
    vocab_size=VOCABULARY,
    d_model=32,
    n_layer=2,
    n_head=4,
    d_inner=48,
)

# Encoders.
add("bert", "BertForMaskedLM", batches.masked_tokens, quick=True, **ENCODER)
add(
    "bert, classes",
    "BertForSequenceClassification",
    batches.classified_tokens,
    num_labels=3,
    **ENCODER,
)
add("bert, mask of ones", "BertForMaskedLM", batches.masked_tokens_of_one_length, **ENCODER)
add("roberta", "RobertaForMaskedLM", batches.masked_tokens, **ENCODER)
add(
    "distilbert",
    "DistilBertForSequenceClassification",
    batches.classified_tokens,
    dim=32,
    n_layers=2,
    n_heads=4,
    hidden_dim=48,
    num_labels=3,
    **TEXT,
)
add(
    "albert",
    "AlbertForMaskedLM",
    batches.masked_tokens,
    quick=True,
    embedding_size=16,
    **{**ENCODER, "num_hidden_layers": 3},
)
add("electra", "ElectraForMaskedLM", batches.masked_tokens, embedding_size=16, **ENCODER)
add(
    "deberta-v2",
    "DebertaV2ForMaskedLM",
    batches.masked_tokens,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    position_buckets=4,
    share_att_key=True,
    **ENCODER,
)
add(
    "modernbert",
    "ModernBertForMaskedLM",
    batches.masked_tokens,
    local_attention=4,
    cls_token_id=1,
    sep_token_id=2,
    **ENDS,
    **ENCODER,
)
add(
    "longformer, mask of ones",
    "LongformerForMaskedLM",
    batches.masked_tokens_of_one_length,
    attention_window=4,
    **ENCODER,
)
# Asks whether any token is masked in each of its layers: refused for texts of several lengths.
add_refused(
    "longformer",
    "LongformerForMaskedLM",
    batches.masked_tokens,
    attention_window=4,
    **ENCODER,
)

# Encoder and decoder.
add(
    "t5",
    "T5ForConditionalGeneration",
    batches.translated,
    quick=True,
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
add("bart", "BartForConditionalGeneration", batches.translated, **ENCODER_DECODER)

# Images.
add(
    "vit",
    "ViTForImageClassification",
    batches.classified_images(16),
    image_size=16,
    patch_size=4,
    **IMAGE,
)
add(
    "swin",
    "SwinForImageClassification",
    batches.classified_images(32),
    image_size=32,
    patch_size=2,
    embed_dim=16,
    depths=[1, 2],
    num_heads=[2, 4],
    window_size=4,
    num_labels=3,
)
add(
    "resnet",
    "ResNetForImageClassification",
    batches.classified_images(32),
    quick=True,
    embedding_size=8,
    hidden_sizes=[8, 16],
    depths=[1, 2],
    num_labels=3,
)
add(
    "convnext",
    "ConvNextForImageClassification",
    batches.classified_images(32),
    hidden_sizes=[8, 16],
    depths=[1, 2],
    num_stages=2,
    drop_path_rate=0.2,
    num_labels=3,
)
add(
    "segformer",
    "SegformerForSemanticSegmentation",
    batches.segmented_images,
    num_encoder_blocks=2,
    depths=[1, 1],
    sr_ratios=[2, 1],
    hidden_sizes=[8, 16],
    patch_sizes=[7, 3],
    strides=[4, 2],
    num_attention_heads=[1, 2],
    mlp_ratios=[2, 2],
    decoder_hidden_size=16,
    num_labels=3,
)
add(
    "mobilenet-v2",
    "MobileNetV2ForImageClassification",
    batches.classified_images(32),
    image_size=32,
    depth_multiplier=0.25,
    num_labels=3,
)
add(
    "beit",
    "BeitForImageClassification",
    batches.classified_images(16),
    image_size=16,
    patch_size=4,
    use_relative_position_bias=True,
    drop_path_rate=0.1,
    **IMAGE,
)

# State spaces and other recurrences.
add(
    "mamba",
    "MambaForCausalLM",
    batches.next_token,
    hidden_size=16,
    num_hidden_layers=2,
    state_size=4,
    vocab_size=VOCABULARY,
)
add(
    "mamba2",
    "Mamba2ForCausalLM",
    batches.next_token,
    hidden_size=16,
    num_hidden_layers=2,
    state_size=4,
    head_dim=8,
    num_heads=4,
    n_groups=1,
    chunk_size=4,
    vocab_size=VOCABULARY,
    **ENDS,
)
add(
    "jamba",
    "JambaForCausalLM",
    batches.next_token,
    mamba_d_state=4,
    mamba_dt_rank=4,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=4,
    **DECODER,
)

# Rescales its weights in place in eval mode, and back in train mode, as an attribute tells.
add(
    "rwkv",
    "RwkvForCausalLM",
    batches.next_token,
    hidden_size=16,
    num_hidden_layers=2,
    context_length=32,
    rescale_every=1,
    vocab_size=VOCABULARY,
    **ENDS,
)

# Speech.
add(
    "whisper",
    "WhisperForConditionalGeneration",
    batches.spectrograms,
    num_mel_bins=8,
    max_source_positions=10,
    max_target_positions=16,
    dropout=0.1,
    **ENCODER_DECODER,
)
SOUND = {
    **WIDTH,
    "intermediate_size": 48,
    "conv_dim": [8, 8],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}
add(
    "wav2vec2",
    "Wav2Vec2ForSequenceClassification",
    batches.classified_waves,
    num_labels=3,
    classifier_proj_size=16,
    **SOUND,
)
# Asks whether a label is too large before it does anything: refused.
add_refused(
    "wav2vec2, text",
    "Wav2Vec2ForCTC",
    batches.waves,
    vocab_size=24,
    ctc_loss_reduction="mean",
    **SOUND,
)

# Two towers.
add(
    "clip",
    "CLIPModel",
    batches.images_and_texts,
    text_config={**ENCODER, "eos_token_id": 2, "bos_token_id": 1},
    vision_config={**WIDTH, "intermediate_size": 48, "image_size": 16, "patch_size": 4},
    projection_dim=16,
)
add(
    "siglip",
    "SiglipModel",
    batches.images_and_texts_unmasked,
    text_config=ENCODER,
    vision_config={**WIDTH, "intermediate_size": 48, "image_size": 16, "patch_size": 4},
)

# Time series.
add(
    "patchtst",
    "PatchTSTForPrediction",
    batches.time_series,
    num_input_channels=3,
    context_length=16,
    patch_length=4,
    patch_stride=4,
    prediction_length=4,
    d_model=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=32,
)
