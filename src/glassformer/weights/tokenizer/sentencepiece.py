"""Read the `tokenizer.model` of sentencepiece with its own library."""

from pathlib import Path

from glassformer.errors import install
from glassformer.weights.errors import WeightsError
from glassformer.weights.tensors import AGAIN
from glassformer.weights.tokenizer.pieces import Pieces

FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm")
UNIGRAM, BPE = 1, 2


def read_sentencepiece(file: Path) -> Pieces:
    """Return the pieces and the rules of a sentencepiece model."""
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise WeightsError(f"{file} needs the packages sentencepiece and protobuf: {install('tokenizers')}.") from None
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        model.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf has its own error types
        raise WeightsError(f"{file} is not a sentencepiece model ({error}): {AGAIN}.") from None
    kind, rules = model.trainer_spec.model_type, model.normalizer_spec
    if kind not in (UNIGRAM, BPE) or not model.pieces:
        raise WeightsError(
            f"{file} is a sentencepiece model of type {kind} with {len(model.pieces)} pieces: only unigram and BPE "
            "models with pieces are read."
        )
    if model.trainer_spec.treat_whitespace_as_suffix:
        raise WeightsError(f"{file} puts spaces at the ends of words, which is not supported: use its tokenizer.json.")
    return Pieces(
        pieces=[piece.piece for piece in model.pieces],
        scores=[piece.score for piece in model.pieces],
        types=[piece.type for piece in model.pieces],
        unigram=kind == UNIGRAM,
        prefix=rules.add_dummy_prefix,
        single_spaces=rules.remove_extra_whitespaces,
        charsmap=rules.precompiled_charsmap,
    )
