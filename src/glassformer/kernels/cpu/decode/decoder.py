"""A model that generates text, whose cached step is one call of a compiled kernel."""

import ctypes

import torch
from torch import Tensor

from glassformer.kernels.cpu.decode import library
from glassformer.kernels.cpu.decode.encoder import NativeEncoder
from glassformer.kernels.cpu.decode.pack import address, empty
from glassformer.kernels.cpu.decode.stack import Tables, checked, reads_in_place, settle, weights_of
from glassformer.model import DecoderLM, Seq2Seq
from glassformer.shapes import Float, Int

CHUNK = 1024
"""Tokens of prompts that are read at once: all their hidden activations are in memory."""


SMALL = 16 << 20
"""Bytes of float32 weights below which one thread decodes: a step takes less than a millisecond, two threads would gain
a third of that on an idle machine, and would wait for each other many times as long where other programs run."""


def default_threads(model: DecoderLM | Seq2Seq, rows: int) -> int:
    """Return the number of threads that decode this many sequences, unless the caller knows better."""
    is_small = rows <= 4 and 4 * sum(p.numel() for p in model.parameters()) < SMALL
    return 1 if is_small else max(1, torch.get_num_threads())


class NativeDecoder:
    """A cache of `rows` sequences of at most `capacity` tokens, and the step that extends it.

    An encoder-decoder reads the prompts with its encoder; the cache then starts from `special.start`.

    In float32 the cache is float32. In bfloat16, int8 and int4 it is float16, half as much to read for each token, if
    the processor converts it by an instruction: with AVX2 or AVX-512, heads of a multiple of 16, no latent attention.
    """

    owns_threads = True
    """Torch should compute in one thread between the steps: the kernels have threads of their own."""

    def __init__(
        self,
        model: DecoderLM | Seq2Seq,
        rows: int = 1,
        capacity: int | None = None,
        precision: str = "float32",
        threads: int | None = None,
    ):
        cfg = model.config
        known = checked(model, precision, "use engine='torch'")
        self.library, self.config, self.rows = library.load(), cfg, rows
        self.threads = threads or default_threads(model, rows)
        self.capacity = capacity or cfg.max_len or 1024
        if cfg.learned_positions is not None and cfg.max_len is not None:
            self.capacity = min(self.capacity, cfg.max_len)
        self.unsettled = model if reads_in_place(model, known) else None
        """The model until its first prompt."""
        self.tables = Tables(weights_of(model, known), model.decoder, self.capacity)
        self.model = self.tables.model
        room, sizes = (cfg.n_layers, rows, self.model.kv_heads, self.capacity), self.model
        self.halves = precision != "float32" and cfg.attention.latent is None and self._fits_halves()
        dtype = torch.float16 if self.halves else torch.float32
        self.keys = empty(*room, sizes.d_head, dtype=dtype)
        self.values = empty(*room, sizes.d_value if cfg.attention.latent is None else 0, dtype=dtype)
        self.lengths = torch.zeros(rows, dtype=torch.int32)
        self.limit, self.rotations = cfg.changes_frequencies_at, torch.zeros(rows, dtype=torch.int32)
        """Tokens from which a prompt has other rotary frequencies, and where each sequence's are in their tables."""
        self.source = model if isinstance(model, Seq2Seq) else None
        self.encoder = None if self.source is None else NativeEncoder(self.source, precision, self.threads)
        self.cross = [torch.empty(0)] * 3
        """Keys and values of what the encoder read, as in the cache, and the lengths."""
        self.prompt_of = torch.arange(rows)
        """The prompt that each sequence continues: sequences of one prompt have the same `cross`."""

    def step(self, tokens: Int[Tensor, "B"]) -> Float[Tensor, "B V"]:
        """Return the logits after one more token per sequence."""
        # one foreign call and little else: at hundreds of tokens per second, every torch operation counts
        if tokens.shape != (self.rows,):
            raise library.NativeError(f"tokens of shape {tuple(tokens.shape)}: give one for each of {self.rows} rows.")
        for row in range(self.rows if self.limit is not None else 0):
            self._choose_frequencies(row, int(self.lengths[row]), 1)
        given = tokens.to("cpu", torch.int64).contiguous()
        logits = torch.empty(self.rows, self.config.vocab_size)
        full = self.library.glass_next(
            self.model, self._cache(), given.data_ptr(), self.lengths.data_ptr(), self.threads, logits.data_ptr()
        )
        if full:
            raise library.NativeError(self._full())
        return logits

    def _cache(self) -> library.Cache:
        addresses = [held.data_ptr() for held in (self.keys, self.values, *self.cross)]
        reach = 0 if self.source is None else self.cross[0].shape[3]
        return library.Cache(*addresses, self.rotations.data_ptr(), self.rows, self.capacity, reach, self.halves)

    def _choose_frequencies(self, row: int, length: int, new: int) -> None:
        """Choose the rotary frequencies of a sequence that begins; refuse to grow one for which they would change."""
        if self.limit is None:
            return
        if length == 0:
            self.rotations[row] = self.capacity if new > self.limit else 0
        elif length + new > self.limit and not self.rotations[row]:
            raise library.NativeError(
                f"a sequence of {length} tokens would grow beyond {self.limit}, where the rotary frequencies of this "
                "model change, also for cached keys: read it as one prompt."
            )

    def _fits_halves(self) -> bool:
        """Return whether keys and values can be float16: whole registers, on a processor that converts them."""
        fits = self.model.d_head % 16 == 0 and self.model.d_value % 16 == 0
        return fits and bool(self.library.glass_has_halves())

    def _full(self) -> str:
        return f"the cache holds {self.capacity} tokens and is full: make it larger."

    def read(self, prompts: list[list[int]], chunk: int | None = None) -> Float[Tensor, "B V"]:
        """Return the logits after one prompt per sequence, without padding. `chunk`: most tokens read at once.

        From 16 tokens on, activations are rounded too, because multiplications are then the bottleneck: to bfloat16 if
        the weights are bfloat16, to 8 bits with a scale per token and group of columns if they are int8 or int4. In all
        three precisions attention then multiplies bfloat16, where the processor has instructions for it.
        KL divergence of the next token from float32 after 96 tokens of a GPT-2 small with seeded weights: 1.9e-5 nats
        in bfloat16 and 3.8e-4 in int8 (token by token, with activations in float32 or 16 bits: 1.0e-5 and 1.6e-4; int8
        of onnxruntime, with one scale per tensor: 5.8e-4).
        """
        if self.source is not None:
            prompts = self._read_sources(prompts)
        if self.unsettled is not None:  # the tokens that follow read all weights each; a prompt gains nothing from it
            settle(self.unsettled, self.capacity - max(map(len, prompts)))
            self.unsettled = None
        rows, last = [], []
        for row, prompt in enumerate(prompts):
            start = int(self.lengths[row])
            self._choose_frequencies(row, start, len(prompt))
            rows += [(token, row, start + i) for i, token in enumerate(prompt)]
            last.append(len(rows) - 1)
        entries, ends = torch.tensor(rows, dtype=torch.int32), torch.tensor(last, dtype=torch.int32)
        size, logits = chunk or CHUNK, []
        for first in range(0, len(entries), size):
            here = ends[(ends >= first) & (ends < first + size)]
            logits.append(self._run(entries[first : first + size], here - first))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def extend(
        self, sequence: int, keep: int, tokens: list[int], wanted: int, chunk: int | None = None
    ) -> Float[Tensor, "T V"]:
        """Crop a sequence to its first `keep` tokens, read more, and return the logits after the last `wanted`."""
        self._choose_frequencies(sequence, keep, len(tokens))
        self.lengths[sequence] = keep
        entries = [(token, sequence, position) for position, token in enumerate(tokens, keep)]
        size, first_wanted, logits = max(chunk or CHUNK, wanted), len(entries) - wanted, []
        for first in range(0, len(entries), size):
            part = torch.tensor(entries[first : first + size], dtype=torch.int32)
            begin = min(max(first_wanted - first, 0), len(part) - 1)  # the kernels return at least one token's logits
            logits.append(self._run(part, torch.arange(begin, len(part), dtype=torch.int32)))
        return logits[0] if len(logits) == 1 else torch.cat(logits)[-wanted:]

    def crop(self, sequence: int, keep: int) -> None:
        """Forget all but the first `keep` tokens of a sequence."""
        self.lengths[sequence] = keep

    def take(self, filled: "NativeDecoder") -> None:
        """Take over the sequences of a decoder of the same model with less room."""
        self.unsettled = None  # in the middle of a conversation a pause of seconds would gain less than it costs
        held = int(filled.lengths.max())
        self.keys[..., :held, :] = filled.keys[..., :held, :]
        self.values[..., :held, :] = filled.values[..., :held, :]
        self.lengths.copy_(filled.lengths)
        self.rotations.copy_(torch.where(filled.rotations > 0, self.capacity, 0))

    def _run(self, entries: Int[Tensor, "N 3"], wanted: Int[Tensor, "M"]) -> Float[Tensor, "M V"]:
        """Read entries (token, sequence, position) and return the logits of those `wanted`."""
        if int(entries[:, 2].max()) >= self.capacity:
            raise library.NativeError(self._full())
        entries, wanted = entries.contiguous(), wanted.contiguous()
        logits = torch.empty(len(wanted), self.config.vocab_size)
        given = (ctypes.byref(self.model), ctypes.byref(self._cache()), address(entries), len(entries), address(wanted))
        self.library.glass_step(*given, len(wanted), self.threads, address(logits))
        self.lengths.index_put_((entries[:, 1].long(),), torch.ones_like(entries[:, 1]), accumulate=True)
        return logits

    @torch.no_grad()
    def _read_sources(self, sources: list[list[int]]) -> list[list[int]]:
        """Encode the sources, keep the keys and values of cross-attention, and return what the decoder starts from."""
        assert self.source is not None
        assert self.encoder is not None
        start = self.source.config.special.start
        if start is None:
            raise library.NativeError("config.special.start is not set: an encoder-decoder needs a first token.")
        lengths = [len(source) for source in sources]
        memory = torch.cat(self.encoder.encode(sources)).to(self.source.embed.tokens.weight.dtype)
        pairs = [block.cross.project_kv(memory[None]) for block in self.source.blocks]  # type: ignore[union-attr, operator]
        for which in range(2):
            heads = torch.stack([pair[which][0] for pair in pairs]).float()  # (L, G, tokens of all sources, width)
            padded = heads.new_zeros(len(heads), len(sources), heads.shape[1], max(lengths), heads.shape[3])
            for i, one in enumerate(heads.split(lengths, 2)):
                padded[:, i, :, : lengths[i]] = one
            self.cross[which] = padded
        self.cross[2] = torch.tensor(lengths, dtype=torch.int32)
        return [[start] for _ in sources]

    def reorder(self, parents: Int[Tensor, "N"]) -> None:
        """Let sequence i continue the present sequence parents[i]."""
        if len(parents) == self.rows:
            moved = (parents != torch.arange(self.rows)).nonzero()[:, 0]
            if not len(moved):
                return
            held = int(self.lengths.max())
            for cache in (self.keys, self.values):  # in beam search most rows stay where they are
                cache[:, moved, :, :held] = cache[:, parents[moved], :, :held]
        else:
            self.keys, self.values = self.keys.index_select(1, parents), self.values.index_select(1, parents)
        self.lengths, self.rotations = (held.index_select(0, parents) for held in (self.lengths, self.rotations))
        prompts = self.prompt_of.index_select(0, parents)
        if self.source is not None and not torch.equal(prompts, self.prompt_of):
            self.cross = [held.index_select(int(held.dim() > 1), parents) for held in self.cross]
        self.rows, self.prompt_of = len(parents), prompts
