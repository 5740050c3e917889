"""Tiny random Hugging Face models with their weights under our names: `Peer(config, params, model)`.

Written for the oracle alone, so that a mistake in `glassformer.weights` cannot hide one here.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers as hf

from glassformer import config as gf

hf.logging.set_verbosity_error()  # tiny vocabularies draw remarks on special ids that are never used


class Peer(NamedTuple):
    config: Any
    params: dict[str, np.ndarray]
    model: Any


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """transformers casts norms, angles and router softmaxes to torch.float32 by name, whatever the model's type. The
    name is pointed at float64 here: then two correct implementations agree to 14 digits instead of 6."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def made(cls: Any, config: Any, seed: int = 0, std: float = 0.3) -> Any:
    """The model in eval mode with every parameter drawn anew: fresh biases are 0 and fresh norms 1, and hide faults."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = cls(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = std * torch.randn_like(parameter)
            is_norm = any(word in name.lower() for word in ("norm", "ln_")) and name.endswith("weight")
            parameter.copy_(1 + noise if is_norm else noise)
    return model


def arrays(model: Any) -> dict[str, np.ndarray]:
    return {name: value.detach().double().numpy() for name, value in model.state_dict().items()}


def renamed(weights: dict[str, np.ndarray], table: dict[str, str]) -> dict[str, np.ndarray]:
    """`table` maps our prefix to theirs; weight and bias go along, where they exist."""
    out = {}
    for ours, theirs in table.items():
        for kind in ("weight", "bias"):
            if f"{theirs}.{kind}" in weights:
                out[f"{ours}.{kind}"] = weights[f"{theirs}.{kind}"]
    return out


def gpt2(seed: int = 0, vocab: int = 23, std: float = 0.3) -> Peer:
    theirs = hf.GPT2Config(
        vocab_size=vocab, n_embd=12, n_layer=2, n_head=3, n_positions=19, bos_token_id=0, eos_token_id=0
    )
    model = made(hf.GPT2LMHeadModel, theirs, seed, std)
    w = arrays(model)
    params = renamed(
        w,
        {"embed.tokens": "transformer.wte", "decoder.position": "transformer.wpe", "decoder.norm": "transformer.ln_f"},
    )
    for i in range(2):
        b, t = f"decoder.blocks.{i}", f"transformer.h.{i}"
        params |= renamed(w, {f"{b}.norm_attention": f"{t}.ln_1", f"{b}.norm_feedforward": f"{t}.ln_2"})
        linears = {"attention.o": "attn.c_proj", "feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"}
        for ours, name in linears.items():  # Conv1D keeps (in, out)
            params[f"{b}.{ours}.weight"] = w[f"{t}.{name}.weight"].T
            params[f"{b}.{ours}.bias"] = w[f"{t}.{name}.bias"]
        for j, name in enumerate("qkv"):
            params[f"{b}.attention.{name}.weight"] = w[f"{t}.attn.c_attn.weight"].T[12 * j : 12 * (j + 1)]
            params[f"{b}.attention.{name}.bias"] = w[f"{t}.attn.c_attn.bias"][12 * j : 12 * (j + 1)]
    config = gf.DecoderConfig(
        vocab_size=vocab,
        d_model=12,
        n_layers=2,
        attention=gf.Attention(3),
        feedforward=gf.Dense(48, "gelu_tanh"),
        position=gf.Learned(),
        max_len=19,
    )
    return Peer(config, params, model)


def _llama_like(w: dict[str, np.ndarray], n_layers: int) -> dict[str, np.ndarray]:
    table = {"embed.tokens": "model.embed_tokens", "decoder.norm": "model.norm", "head": "lm_head"}
    for i in range(n_layers):
        b, t = f"decoder.blocks.{i}", f"model.layers.{i}"
        table |= {f"{b}.norm_attention": f"{t}.input_layernorm"}
        table |= {f"{b}.norm_feedforward": f"{t}.post_attention_layernorm"}
        table |= {f"{b}.attention.{n}": f"{t}.self_attn.{n}_proj" for n in "qkvo"}
        table |= {f"{b}.attention.{n}": f"{t}.self_attn.{n}" for n in ("q_norm", "k_norm")}
        table |= {f"{b}.feedforward.{n}": f"{t}.mlp.{n}_proj" for n in ("up", "gate", "down")}
    return renamed(w, table)


_SMALL = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(rope: dict[str, Any] | None = None, rotary: gf.Rotary = gf.Rotary()) -> Peer:
    theirs = hf.LlamaConfig(
        **_SMALL,
        intermediate_size=14,
        head_dim=6,
        max_position_embeddings=64,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        rms_norm_eps=1e-6,
    )
    model = made(hf.LlamaForCausalLM, theirs)
    config = gf.DecoderConfig(
        vocab_size=23,
        d_model=12,
        n_layers=2,
        attention=gf.Attention(4, n_kv_heads=2, d_head=6, bias=False),
        feedforward=gf.Gated(14),
        norm=gf.RMSNorm(),
        position=rotary,
        head=gf.Head(tied=False),
    )
    return Peer(config, _llama_like(arrays(model), 2), model)


def qwen3() -> Peer:
    """Normed queries and keys, tied head."""
    theirs = hf.Qwen3Config(**_SMALL, intermediate_size=14, head_dim=6, tie_word_embeddings=True)
    model = made(hf.Qwen3ForCausalLM, theirs)
    params = _llama_like(arrays(model), 2)
    del params["head.weight"]
    config = gf.DecoderConfig(
        vocab_size=23,
        d_model=12,
        n_layers=2,
        attention=gf.Attention(4, n_kv_heads=2, d_head=6, bias=False, qk_norm=gf.RMSNorm()),
        feedforward=gf.Gated(14),
        norm=gf.RMSNorm(),
        position=gf.Rotary(),
    )
    return Peer(config, params, model)


def mixtral() -> Peer:
    """Mixture of experts, normalised gates, and a sliding window of 3."""
    theirs = hf.MixtralConfig(
        **_SMALL,
        head_dim=6,
        intermediate_size=14,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=3,
        rms_norm_eps=1e-5,
    )
    theirs._experts_implementation = "eager"
    model = made(hf.MixtralForCausalLM, theirs)
    w = arrays(model)
    params = _llama_like(w, 2)
    for i in range(2):
        ours, experts = f"decoder.blocks.{i}.feedforward", f"model.layers.{i}.mlp.experts"
        params[f"{ours}.router.weight"] = w[f"model.layers.{i}.mlp.gate.weight"]
        for e in range(5):
            params[f"{ours}.experts.{e}.gate.weight"] = w[f"{experts}.gate_up_proj"][e, :14]
            params[f"{ours}.experts.{e}.up.weight"] = w[f"{experts}.gate_up_proj"][e, 14:]
            params[f"{ours}.experts.{e}.down.weight"] = w[f"{experts}.down_proj"][e]
    config = gf.DecoderConfig(
        vocab_size=23,
        d_model=12,
        n_layers=2,
        attention=gf.Attention(4, n_kv_heads=2, d_head=6, bias=False, window=3),
        feedforward=gf.MoE(5, 2, gf.Gated(14)),
        norm=gf.RMSNorm(1e-5),
        position=gf.Rotary(base=theirs.rope_parameters["rope_theta"]),
        head=gf.Head(tied=False),
    )
    return Peer(config, params, model)


def gptj() -> Peer:
    """Parallel branches, interleaved rotary on 4 of 6 components, a head with a bias."""
    theirs = hf.GPTJConfig(vocab_size=23, n_embd=12, n_layer=2, n_head=2, rotary_dim=4, n_positions=19, n_inner=14)
    model = made(hf.GPTJForCausalLM, theirs)
    table = {"embed.tokens": "transformer.wte", "decoder.norm": "transformer.ln_f", "head": "lm_head"}
    for i in range(2):
        b, t = f"decoder.blocks.{i}", f"transformer.h.{i}"
        table |= {f"{b}.norm": f"{t}.ln_1", f"{b}.attention.o": f"{t}.attn.out_proj"}
        table |= {f"{b}.attention.{n}": f"{t}.attn.{n}_proj" for n in "qkv"}
        table |= {f"{b}.feedforward.up": f"{t}.mlp.fc_in", f"{b}.feedforward.down": f"{t}.mlp.fc_out"}
    config = gf.DecoderConfig(
        vocab_size=23,
        d_model=12,
        n_layers=2,
        attention=gf.Attention(2, bias=False),
        feedforward=gf.Dense(14, "gelu_tanh"),
        position=gf.Rotary(pairing="interleaved", fraction=4 / 6),
        placement="parallel",
        head=gf.Head(tied=False, bias=True),
    )
    return Peer(config, renamed(arrays(model), table), model)


def bloom() -> Peer:
    """ALiBi with 3 heads (no power of two) and a norm on the embedding."""
    model = made(hf.BloomForCausalLM, hf.BloomConfig(vocab_size=23, hidden_size=12, n_layer=2, n_head=3))
    w = arrays(model)
    base = "transformer"
    table = {"embed.tokens": f"{base}.word_embeddings", "decoder.norm": f"{base}.ln_f"}
    table |= {"decoder.embed_norm": f"{base}.word_embeddings_layernorm"}
    params = {}
    for i in range(2):
        b, t = f"decoder.blocks.{i}", f"{base}.h.{i}"
        table |= {f"{b}.norm_attention": f"{t}.input_layernorm", f"{b}.attention.o": f"{t}.self_attention.dense"}
        table |= {f"{b}.norm_feedforward": f"{t}.post_attention_layernorm"}
        table |= {f"{b}.feedforward.up": f"{t}.mlp.dense_h_to_4h", f"{b}.feedforward.down": f"{t}.mlp.dense_4h_to_h"}
        fused = f"{t}.self_attention.query_key_value"
        for j, n in enumerate("qkv"):  # laid out head by head, q k v within a head
            params[f"{b}.attention.{n}.weight"] = w[f"{fused}.weight"].reshape(3, 3, 4, 12)[:, j].reshape(12, 12)
            params[f"{b}.attention.{n}.bias"] = w[f"{fused}.bias"].reshape(3, 3, 4)[:, j].reshape(12)
    config = gf.DecoderConfig(
        vocab_size=23,
        d_model=12,
        n_layers=2,
        attention=gf.Attention(3),
        feedforward=gf.Dense(48, "gelu_tanh"),
        position=gf.Alibi(),
        embedding=gf.Embedding(norm=True),
    )
    return Peer(config, params | renamed(w, table), model)


def bert() -> Peer:
    """Post-norm encoder with segments and the masked-LM head."""
    theirs = hf.BertConfig(
        vocab_size=23,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=14,
        max_position_embeddings=19,
    )
    model = made(hf.BertForMaskedLM, theirs)
    table = {
        "embed.tokens": "bert.embeddings.word_embeddings",
        "encoder.position": "bert.embeddings.position_embeddings",
    }
    table |= {"embed.segments": "bert.embeddings.token_type_embeddings"}
    table |= {"encoder.embed_norm": "bert.embeddings.LayerNorm"}
    table |= {"head.transform": "cls.predictions.transform.dense", "head.norm": "cls.predictions.transform.LayerNorm"}
    for i in range(2):
        b, t = f"encoder.blocks.{i}", f"bert.encoder.layer.{i}"
        for ours, name in zip("qkv", ("query", "key", "value"), strict=True):
            table[f"{b}.attention.{ours}"] = f"{t}.attention.self.{name}"
        table |= {f"{b}.attention.o": f"{t}.attention.output.dense"}
        table |= {f"{b}.norm_attention": f"{t}.attention.output.LayerNorm"}
        table |= {f"{b}.feedforward.up": f"{t}.intermediate.dense", f"{b}.feedforward.down": f"{t}.output.dense"}
        table |= {f"{b}.norm_feedforward": f"{t}.output.LayerNorm"}
    w = arrays(model)
    config = gf.EncoderConfig(
        vocab_size=23,
        d_model=12,
        n_layers=2,
        attention=gf.Attention(3),
        feedforward=gf.Dense(14, "gelu"),
        norm=gf.LayerNorm(1e-12),
        placement="post",
        max_len=19,
        embedding=gf.Embedding(n_segments=2, norm=True),
        head=gf.Head(bias=True, transform="gelu"),
    )
    return Peer(config, renamed(w, table) | {"head.bias": w["cls.predictions.bias"]}, model)


def t5(gated: bool = False, seed: int = 0, std: float = 0.3, vocab: int = 23) -> Peer:
    theirs = hf.T5Config(
        vocab_size=vocab,
        d_model=12,
        d_kv=5,
        d_ff=14,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=3,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=11,
        decoder_start_token_id=0,
    )
    model = made(hf.T5ForConditionalGeneration, theirs, seed, std)
    table = {"embed.tokens": "shared"} | ({"head": "lm_head"} if gated else {})
    for stack, n_layers in (("encoder", 2), ("decoder", 3)):
        table[f"{stack}.norm"] = f"{stack}.final_layer_norm"
        table[f"{stack}.position"] = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        for i in range(n_layers):
            b, t = f"{stack}.blocks.{i}", f"{stack}.block.{i}.layer"
            last = 1 if stack == "encoder" else 2
            table |= {f"{b}.attention.{n}": f"{t}.0.SelfAttention.{n}" for n in "qkvo"}
            table |= {f"{b}.norm_attention": f"{t}.0.layer_norm", f"{b}.norm_feedforward": f"{t}.{last}.layer_norm"}
            if stack == "decoder":
                table |= {f"{b}.cross.{n}": f"{t}.1.EncDecAttention.{n}" for n in "qkvo"}
                table |= {f"{b}.norm_cross": f"{t}.1.layer_norm"}
            up = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
            table |= {f"{b}.feedforward.{n}": f"{t}.{last}.DenseReluDense.{m}" for n, m in up.items()}
            table[f"{b}.feedforward.down"] = f"{t}.{last}.DenseReluDense.wo"
    config = gf.Seq2SeqConfig(
        vocab_size=vocab,
        d_model=12,
        n_layers=3,
        n_encoder_layers=2,
        attention=gf.Attention(3, d_head=5, scale=1.0, bias=False),
        feedforward=gf.Gated(14, "gelu_tanh") if gated else gf.Dense(14, "relu", bias=False),
        norm=gf.RMSNorm(),
        position=gf.T5Bias(8, 11),
        head=gf.Head(tied=not gated, scale=1.0 if gated else 12**-0.5),
    )
    return Peer(config, renamed(arrays(model), table), model)
