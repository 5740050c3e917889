"""Architectures of `transformers`, tiny and random, from their config classes."""

import warnings
from collections.abc import Callable

import torch
import transformers as t
from torch import nn

V = 97
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON = {"vocab_size": V, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **IDS}
LLAMA = {**COMMON, "intermediate_size": 80, "num_key_value_heads": 2, "max_position_embeddings": 128}
GPT = {"vocab_size": V, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, **IDS}
BERT = {**COMMON, "intermediate_size": 80, "max_position_embeddings": 130, "type_vocab_size": 2}
BART = {
    **{"vocab_size": V, "d_model": 48, "max_position_embeddings": 128, "decoder_start_token_id": 2, **IDS},
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4))},
    **{"encoder_ffn_dim": 80, "decoder_ffn_dim": 80, "forced_eos_token_id": None},
}
T5 = {"vocab_size": V, "d_model": 48, "d_kv": 12, "d_ff": 80, "num_layers": 2, "num_heads": 4}
T5_IDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}

DECODERS: dict[str, Callable[[], tuple[type, object]]] = {
    "gpt2": lambda: (t.GPT2LMHeadModel, t.GPT2Config(**GPT)),
    "gpt_neo": lambda: (
        t.GPTNeoForCausalLM,
        t.GPTNeoConfig(
            **{**COMMON, "num_heads": 4, "num_layers": 2, "max_position_embeddings": 128, "window_size": 8},
            attention_types=[[["global", "local"], 1]],
        ),
    ),
    "gpt_neox": lambda: (
        t.GPTNeoXForCausalLM,
        t.GPTNeoXConfig(**COMMON, intermediate_size=80, max_position_embeddings=128),
    ),
    "llama": lambda: (t.LlamaForCausalLM, t.LlamaConfig(**LLAMA)),
    "mistral_window": lambda: (t.MistralForCausalLM, t.MistralConfig(**LLAMA, head_dim=12, sliding_window=8)),
    "qwen2": lambda: (t.Qwen2ForCausalLM, t.Qwen2Config(**LLAMA)),
    "qwen3": lambda: (t.Qwen3ForCausalLM, t.Qwen3Config(**LLAMA, head_dim=16)),
    "gemma": lambda: (t.GemmaForCausalLM, t.GemmaConfig(**LLAMA, head_dim=16)),
    "gemma2_window": lambda: (
        t.Gemma2ForCausalLM,
        t.Gemma2Config(**LLAMA, head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
    ),
    "phi": lambda: (t.PhiForCausalLM, t.PhiConfig(**LLAMA)),
    "phi3": lambda: (t.Phi3ForCausalLM, t.Phi3Config(**LLAMA)),
    "falcon": lambda: (t.FalconForCausalLM, t.FalconConfig(**COMMON, alibi=False, max_position_embeddings=128)),
    "bloom": lambda: (t.BloomForCausalLM, t.BloomConfig(vocab_size=V, hidden_size=48, n_layer=2, n_head=4, **IDS)),
    "mpt": lambda: (
        t.MptForCausalLM,
        t.MptConfig(vocab_size=V, d_model=48, n_heads=4, n_layers=2, max_seq_len=128, expansion_ratio=2, **IDS),
    ),
    "opt": lambda: (
        t.OPTForCausalLM,
        t.OPTConfig(**COMMON, ffn_dim=80, max_position_embeddings=128, word_embed_proj_dim=48),
    ),
    "gptj": lambda: (t.GPTJForCausalLM, t.GPTJConfig(**GPT, rotary_dim=6)),
    "gpt_bigcode": lambda: (t.GPTBigCodeForCausalLM, t.GPTBigCodeConfig(**GPT)),
    "stablelm": lambda: (t.StableLmForCausalLM, t.StableLmConfig(**{**LLAMA, "hidden_size": 64})),
    "olmo": lambda: (t.OlmoForCausalLM, t.OlmoConfig(**LLAMA)),
    "olmo2": lambda: (t.Olmo2ForCausalLM, t.Olmo2Config(**LLAMA)),
    "cohere": lambda: (t.CohereForCausalLM, t.CohereConfig(**LLAMA)),
    "mixtral": lambda: (
        t.MixtralForCausalLM,
        t.MixtralConfig(**LLAMA, head_dim=12, num_local_experts=4, num_experts_per_tok=2),
    ),
    "granite": lambda: (t.GraniteForCausalLM, t.GraniteConfig(**LLAMA, attention_multiplier=0.25)),
    "starcoder2": lambda: (t.Starcoder2ForCausalLM, t.Starcoder2Config(**LLAMA)),
    "persimmon": lambda: (
        t.PersimmonForCausalLM,
        t.PersimmonConfig(**COMMON, intermediate_size=80, max_position_embeddings=128),
    ),
    "smollm3_some_nope": lambda: (t.SmolLM3ForCausalLM, t.SmolLM3Config(**LLAMA, no_rope_layers=[1, 0])),
    "roberta_decoder": lambda: (t.RobertaForCausalLM, t.RobertaConfig(**BERT, is_decoder=True)),
    "xglm": lambda: (
        t.XGLMForCausalLM,
        t.XGLMConfig(
            vocab_size=V, d_model=48, ffn_dim=80, num_layers=2, attention_heads=4, max_position_embeddings=128, **IDS
        ),
    ),
}
ENCODERS: dict[str, Callable[[], tuple[type, object]]] = {
    "bert": lambda: (t.BertForMaskedLM, t.BertConfig(**BERT)),
    "roberta": lambda: (t.RobertaForMaskedLM, t.RobertaConfig(**BERT)),
    "distilbert": lambda: (
        t.DistilBertForMaskedLM,
        t.DistilBertConfig(
            vocab_size=V, dim=48, n_layers=2, n_heads=4, hidden_dim=80, max_position_embeddings=128, pad_token_id=0
        ),
    ),
    "electra": lambda: (t.ElectraForMaskedLM, t.ElectraConfig(**BERT, embedding_size=24)),
    "albert": lambda: (t.AlbertForMaskedLM, t.AlbertConfig(**BERT, embedding_size=24)),
    "mpnet": lambda: (
        t.MPNetForMaskedLM,
        t.MPNetConfig(**COMMON, intermediate_size=80, max_position_embeddings=130),
    ),
    "modernbert": lambda: (
        t.ModernBertForMaskedLM,
        t.ModernBertConfig(
            **COMMON,
            intermediate_size=80,
            max_position_embeddings=128,
            cls_token_id=1,
            sep_token_id=2,
            local_attention=8,
        ),
    ),
}
SEQ2SEQ: dict[str, Callable[[], tuple[type, object]]] = {
    "t5": lambda: (t.T5ForConditionalGeneration, t.T5Config(**T5, **T5_IDS)),
    "t5_gated": lambda: (
        t.T5ForConditionalGeneration,
        t.T5Config(**T5, **T5_IDS, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "bart": lambda: (t.BartForConditionalGeneration, t.BartConfig(**BART)),
    "mbart": lambda: (t.MBartForConditionalGeneration, t.MBartConfig(**BART)),
    "marian": lambda: (t.MarianMTModel, t.MarianConfig(**BART)),
    "pegasus": lambda: (t.PegasusForConditionalGeneration, t.PegasusConfig(**BART)),
}
KINDS = {"decoder": DECODERS, "encoder": ENCODERS, "seq2seq": SEQ2SEQ}
LEFT_PADDING_MOVES_POSITIONS = frozenset(
    {
        *("gpt2", "gpt_neo", "gpt_bigcode", "xglm"),
        *("bert", "distilbert", "electra", "albert", "mpnet"),
        *("bart", "mbart", "marian", "pegasus"),
    }
)
"""Absolute positions that count left padding (of the source) by default; measured by test_healthy.py."""


def build(make: Callable[[], tuple[type, object]]) -> nn.Module:
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # some of its modules use torch.jit when imported
        torch.manual_seed(0)
        cls, config = make()
        return cls(config).eval()
