"""The parts of a Transformer are recognised by how numbers flow, whoever wrote it."""

import pytest
import torch
import transformers
from torch import nn

import glassformer as gf
from glassformer.anatomy.parts import Lengths, read_anatomy, visible
from glassformer.anatomy.record import record
from glassformer.doctor.subject.adapt import subject_of
from tests.doctor.compare.pairs import Nano, V, ours, theirs
from tests.weights.tiny import random_model

B, T, N = 2, 13, 11


def anatomy_of(model):
    tokens, source = torch.randint(3, V, (B, T)), torch.randint(3, V, (B, N))
    subject = subject_of(model.double())
    given = {"source": source} if subject.kind == "seq2seq" else {}
    graph, logits = record(lambda: subject.logits(tokens, **given), [tokens, source], model)
    return tokens, read_anatomy(graph, Lengths(B, T, N if given else None), logits)


class Library(nn.Module):
    """torch's own encoder layers, time first, with a causal mask."""

    def __init__(self, norm_first):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 3, 40, norm_first=norm_first)
        self.table, self.place = nn.Embedding(V, 24), nn.Embedding(64, 24)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(24, V)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=self.head.weight.dtype)
        h = (self.table(x) + self.place(torch.arange(x.shape[1]))).transpose(0, 1)
        return self.head(self.layers(h, mask=mask).transpose(0, 1))


def other(cls, config, **fields):
    made = getattr(transformers, config)(vocab_size=V, **fields)
    return random_model(getattr(transformers, cls), made)


SIZES = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 40}
MODELS = {
    "ours": lambda: ours("gpt2"),
    "GPT-2": lambda: theirs("gpt2"),
    "Llama": lambda: theirs("llama"),
    "BERT": lambda: theirs("bert"),
    "fused qkv": lambda: Nano(ours("gpt2")),
    "torch pre-norm": lambda: Library(True),
    "torch post-norm": lambda: Library(False),
    "OPT": lambda: other(
        "OPTForCausalLM", "OPTConfig", num_hidden_layers=2, hidden_size=24, num_attention_heads=3, ffn_dim=40,
        word_embed_proj_dim=24, max_position_embeddings=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_part_is_found_and_adds_up(name):
    _, parts = anatomy_of(MODELS[name]().eval())
    assert parts.embedded is not None
    assert parts.head is not None
    assert len(parts.blocks) == 2
    for block in parts.blocks:
        a = block.attention
        assert set(a.flat) == set(a.projections) == {"q", "k", "v"}
        torch.testing.assert_close(a.pattern @ a.v, a.heads)
        torch.testing.assert_close(block.entering + a.merged.out, block.joined)
        assert block.feed.down.read.shape[-1] == 40
        for p in (*a.projections.values(), a.merged, *block.feed.first, block.feed.down, parts.head):
            torch.testing.assert_close(p.read @ p.weight + (0 if p.bias is None else p.bias), p.out)
    torch.testing.assert_close(parts.head.out, parts.logits)


@pytest.mark.parametrize("name", ["GPT-J", "GPT-NeoX", "ours"])
def test_parallel_branches_are_one_sum(name):
    model = {
        "GPT-J": lambda: other(
            "GPTJForCausalLM", "GPTJConfig", n_layer=2, n_embd=48, n_head=3, rotary_dim=8, n_positions=64,
            bos_token_id=0, eos_token_id=0,
        ),
        "GPT-NeoX": lambda: other("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES),
        "ours": lambda: ours("llama", placement="parallel"),
    }[name]()  # fmt: skip
    _, parts = anatomy_of(model)
    for block in parts.blocks:
        assert block.joined is None
        total = block.entering + block.attention.merged.out + block.feed.down.out
        torch.testing.assert_close(total, block.leaving)


def test_an_encoder_decoder_has_two_stacks_and_cross_attention():
    _, parts = anatomy_of(theirs("t5"))
    kinds = [(b.attention.stack, b.attention.cross) for b in parts.blocks]
    assert kinds == [("encoder.", False)] * 2 + [("decoder.", False), ("decoder.", True)] * 2
    assert parts.blocks[3].attention.scores.shape == (B, 3, T, N)


def test_grouped_heads_are_read_before_and_after_they_are_repeated():
    _, parts = anatomy_of(theirs("llama"))
    a = parts.blocks[0].attention
    assert a.flat["k"].shape == (B, 2, T, 8)
    assert a.k.shape == (B, 6, T, 8)


def test_values_are_those_of_our_own_sites():
    model = ours("llama").double()
    tokens, parts = anatomy_of(model)
    trace = gf.trace(model, tokens)
    a, block = parts.blocks[1].attention, parts.blocks[1]
    torch.testing.assert_close(a.pattern, trace["blocks.1.attention.pattern"])
    torch.testing.assert_close(a.heads, trace["blocks.1.attention.heads"])
    torch.testing.assert_close(block.entering, trace["blocks.1.resid_pre"])
    torch.testing.assert_close(block.joined, trace["blocks.1.resid_mid"])
    torch.testing.assert_close(block.leaving, trace["blocks.1.resid_post"])
    torch.testing.assert_close(block.feed.down.read, trace["blocks.1.feedforward.post"])
    torch.testing.assert_close(parts.head.read, trace["final"])
    assert torch.equal(visible(a).bool(), trace["blocks.1.attention.pattern"] > 0)
