"""Build every text model class of `transformers`, tiny and random, from its own default config.

Fields of a config are shrunk by their names: hidden size 64, 4 heads, vocabulary 97, windows of 16, two layers or one
of each type. `CHANGES` lists what a class needs beyond that. Classes that need an image or sound are left out.
"""

import inspect
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

ENDINGS = {
    "decoder": ("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "GenerationDecoder"),
    "encoder": ("ForMaskedLM",),
    "seq2seq": ("ForConditionalGeneration", "MarianMTModel", "ForTextToText"),
}
BOTH_WAYS = ("XLMWithLMHeadModel", "FlaubertWithLMHeadModel", "XLNetLMHeadModel")
"""Named like decoders; with their default configs they read both ways."""
DECODERS = ("HiggsAudioV2ForConditionalGeneration",)
"""Named like encoder-decoders; they take one sequence of tokens."""
OTHER_INPUT = re.compile(
    r"vision|audio|speech|image|video|codec|vq|vlm|thinker|patcher|flow|diffusion|token2wav|tokenizer|projector"
)
"""Parts of a config that belong to another kind of input."""

KEEP = -1
RULES: tuple[tuple[str, int], ...] = tuple(
    (rf"(?:{pattern})$", value)
    for pattern, value in (
        (r"type_vocab_size|task_type_vocab_size|max_.*|.*position_embeddings|.*_positions|num_nextn_.*", KEEP),
        (r"pad_token_id|pad_index", 0),
        (r"(decoder_|encoder_)?(bos_token_id|cls_token_id)", 1),
        (r"(forced_)?eos_token_id|sep_token_id|decoder_start_token_id", 2),
        (r".*_token_(id|index)", 3),
        (r".*vocab_size.*|n_vocab|.*_vocab", 97),
        (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts|.*num_routed_experts", 4),
        (r".*(experts_per_tok|experts_per_token|moe_topk|moe_top_k|moe_k|num_selected_experts|expert_top_k)", 2),
        (r"n_group|topk_group|num_expert_group|zero_expert_num", 1),
        (r".*expert.*(intermediate|hidden).*|moe_intermediate_size|moe_latent_size", 32),
        (r".*(n|num)_shared_experts", 1),
        (r"q_lora_rank", 32),
        (r"(kv|o)_lora_rank", 16),
        (r"qk_rope_head_dim", 8),
        (r"qk_head_dim", 24),
        (r"index_(n|num)_heads|indexer_num_heads", 2),
        (r"index_topk.*|indexer_topk", 8),
        (r".*(sliding_window|window_size|attention_window|local_attention|sliding_window_size)", 16),
        (r".*(head_dim|headdim|d_kv|head_size|kv_channels|dim_head|d_head|attention_head_size)", 16),
        (r".*(num_key_value_heads|num_kv_heads|n_kv_heads|kv_n_heads|num_query_groups|linear_num_key_heads)", 2),
        (r".*(num_attention_heads|attention_heads|n_heads?|num_heads|num_value_heads)", 4),
        (r".*(intermediate_size|ffn_dim|d_ff|dff|d_inner|n_inner|ffn_hidden_size|dim_ff|feed_forward_size)", 128),
        (r"hidden_dim", 128),
        (r".*(hidden_size|d_model|n_embd|emb_dim|embed_dim|embedding_size|embedding_dim|proj_dim|lru_width|dim)", 64),
        (r".*(num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|num_blocks)", 2),
        (r".*(d_state|state_size|dt_rank|time_step_rank)", 16),
        (r".*chunk_size", KEEP),
    )
)
"""Pattern of a field's name -> its value in a tiny model; KEEP leaves the field alone. The first match holds."""

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
TYPES = ["sliding_attention", "full_attention"]
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": {"num_key_value_heads": 4},
    "AXK2ForCausalLM": {"num_key_value_heads": 4},
    "BambaForCausalLM": {**MAMBA, "attn_layer_indices": [1]},
    "CodeGenForCausalLM": {"rotary_dim": 8},
    "CohereCompassForCausalLM": {
        "rope_parameters": {k: {"rope_type": "default", "rope_theta": 1e4} for k in TYPES},
        "layer_types": TYPES,
    },
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV2ForCausalLM": EXPERTS,
    "Dots1ForCausalLM": EXPERTS,
    "EsmForMaskedLM": {"vocab_size": 97, "mask_token_id": 3, "pad_token_id": 0},
    "EsmcForMaskedLM": {"num_key_value_heads": 4},
    "FalconH1ForCausalLM": {**MAMBA, "mamba_d_ssm": 128},
    "FunnelForMaskedLM": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "GPTJForCausalLM": {"rotary_dim": 8},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "Gemma3nForCausalLM": {
        **{"num_hidden_layers": 3, "layer_types": ["sliding_attention", *TYPES], "intermediate_size": [128] * 3},
        **{"activation_sparsity_pattern": [0.0, 0.5, 0.0], "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8},
        "laurel_rank": 8,
    },
    "Gemma4ForCausalLM": {"per_layer_config": {1: {"head_dim": 32}}, "hidden_size_per_layer_input": 8},
    "Gemma4UnifiedForCausalLM": {"per_layer_config": {1: {"head_dim": 32}}},
    "GraniteMoeHybridForCausalLM": {**MAMBA, "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 16},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Llama4ForCausalLM": {"intermediate_size_mlp": 128, "attention_chunk_size": 16, "num_experts_per_tok": 1},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "MiMoV2FlashForCausalLM": {"head_dim": 24},  # a third of it is rotated, an even number
    "MinistralForCausalLM": {"head_dim": 16},
    "MobileBertForMaskedLM": {"hidden_size": 64, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "NemotronHForCausalLM": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "use_mamba_kernels": False},
    "NeoMMEForMaskedLM": {"per_layer_config": {1: {"sliding_window": None}}, "embedding_rank": 16},
    "Qwen4ExpForCausalLM": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
        **{"indexer_compress_ratio": 2, "hc_lowrank": 16, "ngram_vocab_size_base": 97, "split_ngram_parts": 1},
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": {
        **{"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
        **{"attention_hidden_size": 128, "attention_head_dim": 32, "use_mamba_kernels": False},
    },
    "Zamba2ForCausalLM": {
        **{"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"]},
        **{"attention_hidden_size": 128, "attention_head_dim": 32, "use_mamba_kernels": False, "mamba_headdim": 16},
        **{"n_mamba_heads": 8, "num_key_value_heads": 4, "hybrid_layer_ids": [2], "adapter_rank": 8},
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "xLSTMForCausalLM": {"num_heads": 4, "qk_dim_factor": 1.0},
}
REFORMER: dict[str, Any] = {
    **{"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 16], "attn_layers": ["local", "lsh"]},
    "max_position_embeddings": 256,
}
CHANGES |= {"ReformerForMaskedLM": REFORMER, "ReformerModelWithLMHead": {**REFORMER, "is_decoder": True}}
"""Class -> fields that it needs beyond the rules."""


def kind_of(name: str) -> str | None:
    """Return decoder, encoder or seq2seq for a class that models text by its name, else None."""
    if name in BOTH_WAYS:
        return "encoder"
    if name in DECODERS:
        return "decoder"
    return next((kind for kind, ends in ENDINGS.items() if name.endswith(ends)), None)


def class_names() -> list[str]:
    """Return the classes that read token ids alone, in alphabetical order."""
    import transformers

    found = []
    for name in sorted(dir(transformers)):
        if kind_of(name) is None or name.startswith("Auto"):
            continue
        cls: Any = getattr(transformers, name)
        first = next(iter(list(inspect.signature(cls.forward).parameters)[1:]), "")
        parts = getattr(cls.config_class, "sub_configs", {})
        if first in ("input_ids", "inputs") and not any(OTHER_INPUT.search(part) for part in parts):
            found.append(name)
    return found


def shrunk(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that a tiny model changes."""
    layers = next((n for k, n in fields.items() if k in ("num_hidden_layers", "n_layer") and isinstance(n, int)), 0)
    by_layer = {k: v for k, v in fields.items() if isinstance(v, list) and len(v) == layers > 0}
    kept = _one_of_each(by_layer, layers)
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in changes:
            found[name] = changes[name]
        elif name in by_layer and kept and value != list(range(layers)):
            values = [value[i] for i in kept]
            found[name] = [_size(name, v) for v in values]
        elif isinstance(value, dict) and ("model_type" in value or name.endswith("_config")):
            found[name] = {**value, **shrunk(value, {})}
        elif isinstance(value, int) and not isinstance(value, bool):
            small = len(kept) if kept and name in ("num_hidden_layers", "n_layer") else _size(name, value)
            if small != value:
                found[name] = small
        elif name == "eos_token_id" and isinstance(value, list):
            found[name] = [2, 3]
    if "qk_rope_head_dim" in fields:  # latent attention: one key per head, of which a part is rotated
        heads = next((n for n in ("head_dim",) if n in fields), None)
        found |= {"num_key_value_heads": 4, **({heads: 8} if heads else {})}
    return {**found, **changes}


def _size(name: str, value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    rule = next((size for pattern, size in RULES if re.match(pattern, name)), KEEP)
    return value if rule == KEEP else rule


def _one_of_each(by_layer: dict[str, list[Any]], layers: int) -> list[int]:
    """The first layer of each type, and at least two layers."""
    types = {k: v for k, v in by_layer.items() if all(isinstance(x, str | bool | int) for x in v) and len(set(v)) < 5}
    if not types:
        return []
    seen: dict[Any, int] = {}
    for i in range(layers):
        seen.setdefault(tuple(v[i] for v in types.values()), i)
    kept = sorted(seen.values())
    return kept if len(kept) > 1 else [0, 1]


def build(name: str, seed: int = 0) -> "nn.Module":
    """Build a class, tiny and random, in eval mode."""
    import torch
    import transformers

    cls: Any = getattr(transformers, name)
    config_class = cls.config_class
    fields = config_class().to_dict()
    config = config_class(**shrunk(fields, CHANGES.get(name, {})))
    if kind_of(name) == "decoder" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(seed)
    model: nn.Module = cls(config).eval()
    return model
