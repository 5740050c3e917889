"""Numbers for the problems about several heads."""

from glassformer.theory.course.answers import Matrix, Number
from glassformer.theory.course.problem import Draw, Drawn


def times(row: list[int], matrix: list[list[int]]) -> list[int]:
    """Return the product of a row vector and a matrix."""
    return [sum(x * line[j] for x, line in zip(row, matrix, strict=True)) for j in range(len(matrix[0]))]


def head_blocks(draw: Draw) -> Drawn:
    first, second, w = draw.vector(2), draw.vector(2), draw.matrix(4, 2)
    answer = times([*first, *second], w)
    added = [x + y for x, y in zip(first, second, strict=True)]
    wrong = {
        "one": [times(first, w[:2])],
        "swapped": [times([*second, *first], w)],
        "added": [times(added, w[:2])],
        "mean": [[x / 2 for x in answer]],
    }
    return Drawn(Matrix([answer]), {"first": first, "second": second, "w": w}, wrong)


def merged_storage(draw: Draw) -> Drawn:
    h, u = draw.choice([4, 6, 8, 12, 16]), draw.choice([16, 32, 48, 64])
    d = h * u
    wrong = {"separate": 2 * h * d * u, "one": d * d, "small": h * u * u}
    return Drawn(Number(h * d * d), {"h": h, "u": u, "d": d, "separate": 2 * h * d * u}, wrong)
