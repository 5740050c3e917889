"""Model types of transformers that cannot be loaded, each with the reason."""

_MIXER = "it has layers that are not attention (recurrent, linear or convolutional)"
_SPARSE = "its attention selects keys with a trained indexer"
_STREAMS = "it has several residual streams"
_MEMORY = "its attention has a pattern or a memory that is not implemented"

_APPROXIMATE = "it approximates attention"
_OTHER_INPUTS = "it reads more than token ids"

NOT_SUPPORTED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "kimi_linear"),
            *("lfm2", "lfm2_moe", "nemotron_h", "granitemoehybrid", "olmo_hybrid", "falcon_h1", "falcon_mamba"),
            *("mamba", "mamba2", "jamba", "bamba", "zamba", "zamba2", "minimax", "rwkv", "xlstm", "recurrent_gemma"),
            *("inkling", "zaya", "bailing_hybrid", "fnet", "convbert", "hrm_text", "squeezebert"),
        ),
        _MIXER,
    ),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "glm5_next", "mistral_large4", "hy_v4", "minimax_m3", "axk2"),
        _SPARSE,
    ),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _STREAMS),
    **dict.fromkeys(
        (
            *("big_bird", "longformer", "led", "funnel", "xlnet", "reformer", "longt5", "bigbird_pegasus", "pegasus_x"),
            *("perceiver", "prophetnet", "llama4", "llama4_text"),
        ),
        _MEMORY,
    ),
    **dict.fromkeys(("nystromformer", "yoso", "mra"), _APPROXIMATE),
    **dict.fromkeys(
        ("layoutlm", "luke", "tapas", "whisper", "trocr", "git", "musicgen", "moshi", "cpmant"), _OTHER_INPUTS
    ),
    **dict.fromkeys(("deberta", "deberta-v2"), "its attention adds scores between contents and relative positions"),
    **dict.fromkeys(
        ("switch_transformers", "nllb-moe"), "its experts have a capacity, beyond which tokens are dropped"
    ),
    "diffllama": "its attention is the difference of two attention patterns",
    "jetmoe": "its attention heads are experts",
    "doge": "its attention masks keys by trained weights",
    "phimoe": "its router chooses experts with a sparse mixer",
    "apertus": "it has the trained activation xIELU",
    "bitnet": "it has norms inside attention and feed-forward",
    "nanochat": "it rotates queries and keys in the negative direction",
    "umt5": "each of its layers has position biases of its own",
    "esm": "it rescales embeddings by the share of masked tokens",
    "mobilebert": "its blocks have bottlenecks",
    "longcat_flash": "its blocks have two attention layers each",
    "afmoe": "its attention has an output gate",
}
