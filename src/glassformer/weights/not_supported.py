"""Model types of transformers that cannot be loaded, each with the reason."""

_MIXER = "it has layers that are not attention (recurrent, linear or convolutional)"
_SPARSE = "its attention selects keys with a trained indexer"
_STREAMS = "it has several residual streams"
_MEMORY = "its attention has a pattern or a memory that is not implemented"

NOT_SUPPORTED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "kimi_linear"),
            *("lfm2", "lfm2_moe", "nemotron_h", "granitemoehybrid", "olmo_hybrid", "falcon_h1", "falcon_mamba"),
            *("mamba", "mamba2", "jamba", "bamba", "zamba", "zamba2", "minimax", "rwkv", "xlstm", "recurrent_gemma"),
            *("inkling", "zaya", "bailing_hybrid"),
        ),
        _MIXER,
    ),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "glm5_next", "mistral_large4", "hy_v4", "minimax_m3", "axk2"),
        _SPARSE,
    ),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _STREAMS),
    **dict.fromkeys(("big_bird", "longformer", "led", "funnel", "xlnet", "reformer"), _MEMORY),
}
