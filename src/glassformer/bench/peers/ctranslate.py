"""CTranslate2 through its own converter; int8 is its quantisation of the same weights."""

import shutil
from pathlib import Path
from typing import Any

from glassformer.bench.peers.base import Mark, Order, config_of, convert_once, library


def folder(order: Order) -> Path:
    return order.root / f"ctranslate2-{order.precision}"


def prepare(order: Order) -> None:
    """Convert with its own converter."""

    def convert(made: Path) -> None:
        converters = library("ctranslate2.converters")
        # it reads a key that configs of transformers 5 no longer have: BART normalizes after each branch
        library("transformers").BartConfig.normalize_before = False
        converters.TransformersConverter(str(order.model)).convert(str(made), quantization=order.precision)
        for name in ("tokenizer.json", "config.json"):  # the generator itself needs only model.bin and its vocabulary
            if not (made / name).exists():
                shutil.copyfile(order.model / name, made / name)

    convert_once(folder(order), convert)


class Peer:
    def __init__(self, order: Order):
        package = library("ctranslate2")
        self.version = str(package.__version__)
        config = config_of(order)
        self.is_seq2seq = bool(config.get("is_encoder_decoder")) or "decoder_layers" in config  # BART's need not say so
        self.generator = (package.Translator if self.is_seq2seq else package.Generator)(
            str(folder(order)), device="cpu", compute_type=order.precision, intra_threads=order.threads, inter_threads=1
        )

    def generate(self, prompts: tuple[tuple[int, ...], ...], new: int, mark: Mark, beams: int = 1) -> list[list[int]]:
        last = len(prompts) - 1

        def count(step: Any) -> bool:
            if step.batch_id == last:
                mark()
            return False

        words = [[f"t{token}" for token in prompt] for prompt in prompts]
        if self.is_seq2seq:
            made = self.generator.translate_batch(
                words, beam_size=beams, max_decoding_length=new, end_token=[], max_input_length=0,
                callback=None if beams > 1 else count,
            )  # fmt: skip
            return [[int(word[1:]) for word in result.hypotheses[0]] for result in made]
        results = self.generator.generate_batch(
            words,
            beam_size=beams, max_length=new, end_token=[], sampling_topk=1, include_prompt_in_result=False,
            callback=None if beams > 1 else count,
        )  # fmt: skip
        return [list(result.sequences_ids[0]) for result in results]
