"""BERT's style: post-norm, segments, a masked-language-modelling loss of its own."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "initializer_range": 0.02,
    "hidden_act": "gelu",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "is_causal": False,
}


class Embeddings(nn.Module):
    def __init__(self, config, bug: str | None):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm, self.bug = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps), bug

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.position_embeddings(torch.arange(ids.shape[1], device=ids.device))[None]
        x = self.word_embeddings(ids) + self.token_type_embeddings(torch.zeros_like(ids))
        x = x + positions
        if self.bug == "position_twice":
            x = x + positions
        x = self.LayerNorm(x)
        if self.bug == "position_after_norm":
            x = x + positions
        return x


class Layer(nn.Module):
    def __init__(self, config, bug: str | None):
        super().__init__()
        d, eps = config.hidden_size, config.layer_norm_eps
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.dense = nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, config.intermediate_size), nn.Linear(config.intermediate_size, d)
        self.norm_a, self.norm_f = nn.LayerNorm(d, eps=eps), nn.LayerNorm(d, eps=eps)
        self.heads, self.bug = config.num_attention_heads, bug

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for m in (self.query, self.key, self.key if self.bug == "values_from_keys" else self.value)
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores + (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        weights = scores.half().softmax(-1).to(x.dtype) if self.bug == "half_softmax" else scores.softmax(-1)
        if self.bug == "softmax_twice":
            weights = weights.softmax(-1)
        if self.bug == "weights_squared":
            weights = weights * weights
        x = self.norm_a(x + self.dense((weights @ v).transpose(1, 2).flatten(2)))
        return self.norm_f(x + self.down(F.gelu(self.up(x))))


class MaskedLM(nn.Module):
    def __init__(self, config, bug: str | None = None):
        super().__init__()
        self.config, self.bug = config, bug
        self.embeddings = Embeddings(config, bug)
        layers = [Layer(config, bug) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList([layers[0]] * 3 if bug == "layers_multiplied" else layers)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=config.initializer_range)
            elif "bias" in name:
                nn.init.zeros_(p)
        if bug == "slightly_large_head":
            nn.init.normal_(self.decoder.weight, std=0.08)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        if self.bug == "layer_twice":
            x = self.layers[1](x, attention_mask)
        return self.decoder(x)

    def loss(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits = self(input_ids, attention_mask)
        if attention_mask is not None and self.bug != "padding_labels":
            labels = labels.masked_fill(~attention_mask.bool(), -100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def build(bug: str | None = None, **changes: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MaskedLM(SimpleNamespace(**{**CONFIG, **changes}), bug).eval()


class LabelsInForward(MaskedLM):
    """`model(ids, mask, labels)`: as in Hugging Face's classes, the caller marks padding with -100."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        logits = super().forward(input_ids, attention_mask)
        if labels is None:
            return (logits,)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits

    loss = None


def labels_in_forward() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LabelsInForward(SimpleNamespace(**CONFIG)).eval()


BUGS = {
    "softmax_twice": "attention_weights",
    "weights_squared": "attention_weights",
    "values_from_keys": "dead_gradient",
    "layers_multiplied": "layer_reuse",
    "layer_twice": "layer_reuse",
    "position_twice": "position_twice",
    "position_after_norm": "position_twice",
    "half_softmax": "low_precision",
    "padding_labels": "loss_padding",
    "slightly_large_head": "init_loss",
}
