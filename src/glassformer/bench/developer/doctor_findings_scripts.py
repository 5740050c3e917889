"""The experiments behind the gallery of findings: one function `measure(model, tokens)` per defect, as text.

Each returns a number that is 0 (or what `right` says) in a class without the defect.
"""

from dataclasses import dataclass

from glassformer.bench.developer.doctor_sweep import UNSHIFTED


@dataclass(frozen=True)
class Defect:
    """A defect of some classes, its effect in words, and how to measure it."""

    id: str
    diagnosis: str
    title: str
    classes: tuple[str, ...]
    effect: str
    """What happens, and why."""
    unit: str
    """What the number is."""
    measure: str
    least: float = 1e-6
    """The number above which the defect shows."""
    right: str = "0"


PADDING = """
def measure(model, tokens):
    mask = torch.ones_like(tokens)
    mask[:, :6] = 0
    changed = tokens.clone()
    changed[:, :6] = torch.randint(4, 97, (2, 6))
    with torch.no_grad():
        one, two = (model(ids, attention_mask=mask).logits[:, 6:] for ids in (tokens, changed))
    return float((one - two).abs().max())
"""
STEPS = """
def measure(model, tokens):
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(6)

    def gap():
        cache, parts = None, []
        with torch.no_grad():
            for piece in (tokens[:, :3], *tokens[:, 3:].split(1, 1)):
                output = model(piece, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                parts.append(output.logits)
            return float((torch.cat(parts, 1) - model(tokens, use_cache=False).logits).abs().max())

    found = gap()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    assert gap() < found / 20  # without the limit, both agree
    return found
"""
CHUNKS = """
def measure(model, tokens):
    cache, parts = {}, []
    with torch.no_grad():
        for piece in tokens.split([4, 2, 5, 7, 6], 1):
            output = model(piece, use_cache=True, **cache)
            name = "past_key_values" if "past_key_values" in output else "cache_params"
            cache = {name: output[name]}
            parts.append(output.logits)
        return float((torch.cat(parts, 1) - model(tokens, use_cache=False).logits).abs().max())
"""
FUTURE = """
def measure(model, tokens):
    model, tokens = model.double(), torch.randint(4, 97, (2, 200))
    other = (tokens - 3) % 93 + 4

    def logits(ids):
        torch.manual_seed(2)  # the hashes of LSH attention are random
        target = {"decoder_input_ids": ids} if "decoder_input_ids" in model.forward.__code__.co_varnames else {}
        with torch.no_grad():
            return model(tokens if target else ids, use_cache=False, **target).logits

    gaps = []
    for cut in (1, 11, 100):
        changed = torch.cat([tokens[:, :cut], other[:, cut:]], 1)
        gaps.append(float((logits(tokens) - logits(changed))[:, :cut].abs().max()))
    return max(gaps)
"""
TYING = """
def measure(model, tokens):
    assert model.config.tie_word_embeddings
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    return float((head - table).detach().abs().max())
"""
REORDER = """
def measure(model, tokens):
    order = torch.tensor([1, 0])
    with torch.no_grad():
        cache = model(tokens[:, :20], use_cache=True).past_key_values
        cache.reorder_cache(order)
        one = model(tokens[order, 20:21], past_key_values=cache, use_cache=True).logits[:, -1]
        two = model(tokens[order, :21], use_cache=False).logits[:, -1]
    return float((one - two).abs().max())
"""

DEFECTS: tuple[Defect, ...] = (
    Defect(
        "label_shift",
        "label_shift",
        "Labels are not shifted: a causal model is trained to repeat its input",
        tuple(f"{name}ForCausalLM" for name in UNSHIFTED),
        "`model(tokens, labels=tokens)` returns the cross-entropy of each logit with the token of its own "
        "position. Other classes of the library shift the labels, with the same docstring and the same argument, "
        "and `DataCollatorForLanguageModeling(mlm=False)` relies on it: training then learns the identity.",
        "loss minus the cross-entropy with the next tokens, in nats; minus the one with the same tokens it is 0",
        """
        def measure(model, tokens):
            with torch.no_grad():
                output = model(tokens, labels=tokens)
            logits = output.logits[:, -tokens.shape[1] :]
            same = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            shifted = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            assert abs(output.loss - same) < 1e-4
            return float(abs(output.loss - shifted))
        """,
        1e-3,
    ),
    Defect(
        "weight_tying",
        "weight_tying",
        "The head is not tied to the embedding although the config declares it",
        ("BigBirdPegasusForCausalLM", "LukeForMaskedLM", "Pop2PianoForConditionalGeneration"),
        "`tie_word_embeddings` is true, and the output matrix is a random matrix of its own.",
        "largest difference between the weights of the head and of the embedding",
        TYING,
        1e-3,
    ),
    Defect(
        "pad_leak",
        "pad_leak",
        "Real tokens depend on masked padding",
        (
            *("ConvBertForMaskedLM", "DeepseekV4ForCausalLM", "FunnelForMaskedLM", "MobileBertForMaskedLM"),
            *("NystromformerForMaskedLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "YosoForMaskedLM"),
        ),
        "Other tokens in positions that `attention_mask` hides change the logits of real tokens. Convolutions "
        "(ConvBERT, Nyströmformer), pooling (Funnel, DeepSeek-V4), neighbours (MobileBERT) and recurrences "
        "(RecurrentGemma, RWKV) read padding; YOSO adds its mask in a form that masks nothing.",
        "largest change of a real token's logit when 6 masked tokens on the left are replaced",
        PADDING,
    ),
    Defect(
        "causal_leak",
        "causal_leak",
        "A position attends to later tokens",
        (
            *("CpmAntForCausalLM", "ProphetNetForCausalLM", "ProphetNetForConditionalGeneration"),
            "ReformerModelWithLMHead",
        ),
        "Later tokens change the logits of earlier positions, so that the training loss is too low and sampling "
        "sees something else than training did. In CPM-Ant attention is bidirectional. In Reformer the chunks of "
        "LSH attention, and so the visible keys, depend on the hashes of later tokens. In ProphetNet the leak is "
        "small.",
        "largest change of a logit when only tokens after its position are replaced, in float64",
        FUTURE,
        1e-10,
    ),
    Defect(
        "cache_mask",
        "cache_mask",
        "With a cache, a prompt attends to later tokens",
        ("FSMTForConditionalGeneration",),
        "`use_cache=True`, the default in evaluation, builds no causal mask for the decoder.",
        "largest change of an earlier logit when the last target token is replaced, with `use_cache=True`",
        """
        def measure(model, tokens):
            changed = tokens.clone()
            changed[:, -1] = (changed[:, -1] - 3) % 93 + 4

            def gap(use_cache):
                given = {"use_cache": use_cache}
                one, two = (model(tokens, decoder_input_ids=ids, **given).logits for ids in (tokens, changed))
                return float((one - two)[:, :-1].detach().abs().max())

            assert gap(False) == 0
            return gap(True)
        """,
    ),
    Defect(
        "chunks",
        "cache_mismatch",
        "Several tokens after a cached prefix start the recurrence afresh",
        ("FalconMambaForCausalLM", "JambaForCausalLM", "MambaForCausalLM"),
        "A call with more than one token and a cache that is not empty ignores the recurrent state: a prompt that "
        "is continued, prefilled in chunks, or verified by speculative decoding gets other logits than in one "
        "pass.",
        "largest difference between logits in pieces of 4, 2, 5, 7 and 6 tokens and in one pass",
        CHUNKS,
    ),
    Defect(
        "time_step_limit",
        "cache_mismatch",
        "The time step is limited in the full pass and not in cached steps",
        ("NemotronHForCausalLM", "Zamba2ForCausalLM"),
        "The pass over a prompt clamps the time step to `time_step_limit`, a cached step does not. The script "
        "scales the weights by 6, because fresh ones hardly reach the limit; without the limit both agree.",
        "largest difference between logits of cached steps and of one pass",
        STEPS,
    ),
    Defect(
        "decode_position",
        "decode_position",
        "With a cache, positions start at 0 again",
        ("BambaForCausalLM",),
        "`position_ids` default to 0, 1, ... of the new tokens, whatever the cache holds.",
        "largest difference between logits of cached steps and of one pass",
        """
        def measure(model, tokens):
            def gap(explicit):
                cache, parts, start = None, [], 0
                with torch.no_grad():
                    for piece in (tokens[:, :3], *tokens[:, 3:].split(1, 1)):
                        positions = torch.arange(start, start + piece.shape[1])[None]
                        given = {"position_ids": positions} if explicit else {}
                        output = model(piece, past_key_values=cache, use_cache=True, **given)
                        cache, start = output.past_key_values, start + piece.shape[1]
                        parts.append(output.logits)
                    return float((torch.cat(parts, 1) - model(tokens, use_cache=False).logits).abs().max())

            assert gap(explicit=True) < gap(explicit=False) / 20
            return gap(explicit=False)
        """,
        1e-4,
    ),
    Defect(
        "cache_reorder",
        "cache_reorder",
        "Reordering the cache leaves part of it behind: beam search mixes hypotheses",
        ("DeepseekV4ForCausalLM", "MiniMaxForCausalLM"),
        "`reorder_cache` moves keys and values, and not the states of the compressor or of linear attention.",
        "largest difference between logits after the cache was reordered and of one pass",
        REORDER,
        1e-4,
    ),
    Defect(
        "cache_rollback",
        "cache_rollback",
        "A cropped cache still depends on the dropped tokens",
        ("DeepseekV4ForCausalLM",),
        "`crop` leaves the state of the compressor, so that speculative decoding continues from rejected tokens.",
        "largest difference between logits after 9 tokens were kept and 5 dropped, and of one pass",
        """
        def measure(model, tokens):
            with torch.no_grad():
                cache = model(tokens[:, :9], use_cache=True).past_key_values
                cache = model(tokens[:, -5:], past_key_values=cache, use_cache=True).past_key_values
                cache.crop(-5)
                one = []
                for piece in tokens[:, 9:16].split(1, 1):
                    one.append(model(piece, past_key_values=cache, use_cache=True).logits)
                two = model(tokens[:, :16], use_cache=False).logits[:, 9:]
            return float((torch.cat(one, 1) - two).abs().max())
        """,
        1e-4,
    ),
    Defect(
        "mask_constant",
        "mask_value",
        "The causal mask is -10,000: large scores see the future",
        ("OpenAIGPTLMHeadModel",),
        "Masked scores become -10,000. Where real scores are lower, which trained models reach, the future is the "
        "best key. The script scales the projections of attention until they are.",
        "largest change of an earlier logit when the last token is replaced, projections of q, k and v times 3,000",
        """
        def measure(model, tokens):
            for block in model.transformer.h:
                block.attn.c_attn.weight.data.mul_(3000)
            changed = tokens.clone()
            changed[:, -1] = (changed[:, -1] - 3) % 93 + 4
            one, two = (model(ids).logits.detach() for ids in (tokens, changed))
            return float((one - two)[:, :-1].abs().max())
        """,
        1e-4,
    ),
    Defect(
        "padding_constant",
        "mask_value",
        "The padding mask is -1,000,000",
        ("FunnelForMaskedLM",),
        "Padding keys get a score lowered by 10^6 and not -inf; the script reads the constant of the module.",
        "the constant that is subtracted from the scores of padding keys",
        """
        def measure(model, tokens):
            return float(transformers.models.funnel.modeling_funnel.INF)
        """,
        1.0,
        "inf",
    ),
    Defect(
        "dead_gradient",
        "dead_gradient",
        "Without its CUDA kernel, attention returns zeros",
        ("MraForMaskedLM",),
        "On a CPU the attention of MRA silently returns zeros: its projections get no gradient and are not used.",
        "parameters of attention without a gradient",
        """
        def measure(model, tokens):
            logits = model(tokens).logits
            (logits * torch.randn_like(logits)).sum().backward()
            named = [(n, p) for n, p in model.named_parameters() if ".attention.self." in n and "key.bias" not in n]
            return float(sum(p.grad is None or not p.grad.any() for _, p in named))
        """,
        1.0,
    ),
    Defect(
        "initial_size",
        "residual_growth",
        "GPT-2's initial scaling reaches one of two output projections",
        ("ClvpForCausalLM",),
        "The initialisation follows GPT-2's rule std/√(2L) for what is added to the residual stream, and applies "
        "it to the feed-forward alone: attention names its output `out_proj`.",
        "standard deviation of attention's output projection over that of the feed-forward's",
        """
        def measure(model, tokens):
            layer = model.model.decoder.layers[0]
            return float((layer.attn.out_proj.weight.std() / layer.mlp.c_proj.weight.std()).detach())
        """,
        1.5,
        "1",
    ),
)
