"""All exercises by id."""

from glassformer.errors import nearest
from glassformer.theory.exercises import attention, block, counting, heads, positions, sampling
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
        block.NORM,
        block.PRE_NORM,
        sampling.TEMPERATURE,
        sampling.TOP_K,
        sampling.TOP_P,
        counting.BLOCK,
        counting.GPT2,
        counting.NGRAM,
    )
}


def find(id: str) -> Exercise:
    """Return the exercise with this id; the error for an unknown id names the nearest one."""
    if id not in ALL:
        hint = nearest(id, ALL, others="Exercises:")
        raise ExerciseError(f"there is no exercise {id!r}.{hint}")
    return ALL[id]
