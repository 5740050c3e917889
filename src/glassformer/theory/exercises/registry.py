"""All exercises by id."""

from glassformer.errors import nearest
from glassformer.theory.exercises import (
    attention,
    backward,
    block,
    counting,
    decoding,
    heads,
    loading,
    mechanisms,
    model,
    nano,
    positions,
    sampling,
    training,
    triage,
)
from glassformer.theory.exercises.exercise import Exercise, ExerciseError

ALL: dict[str, Exercise] = {
    exercise.id: exercise
    for exercise in (
        attention.ATTENTION,
        attention.CAUSAL,
        heads.HEADS,
        heads.CACHE,
        attention.CROSS,
        positions.SINUSOIDAL,
        positions.ROPE,
        positions.EXTRAPOLATION,
        block.NORM,
        block.PRE_NORM,
        model.GPT,
        model.TIED,
        model.ENCODER,
        loading.LOADING,
        sampling.TEMPERATURE,
        sampling.TOP_K,
        sampling.TOP_P,
        decoding.GREEDY,
        decoding.BEAM,
        counting.BLOCK,
        counting.GPT2,
        counting.NGRAM,
        mechanisms.INDUCTION,
        mechanisms.COLLAPSE,
        mechanisms.ATTRIBUTION,
        mechanisms.GRADIENT,
        training.BATCH,
        backward.LOSS,
        backward.ATTENTION,
        backward.NORM,
        training.ADAMW,
        training.SCHEDULE,
        nano.TRAIN,
        decoding.SAMPLE,
        triage.TRIAGE,
        triage.REPAIR,
    )
}


def find(id: str) -> Exercise:
    """Return the exercise with this id; the error for an unknown id names the nearest one."""
    if id not in ALL:
        hint = nearest(id, ALL, others="Exercises:")
        raise ExerciseError(f"there is no exercise {id!r}.{hint}")
    return ALL[id]
