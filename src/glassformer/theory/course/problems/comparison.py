"""Numbers for the worked example and for comparisons with other networks."""

from math import exp, sqrt

from glassformer.theory.course.answers import Matrix, Number
from glassformer.theory.course.problem import Draw, Drawn


def _matmul(a: list[list[int]], b: list[list[int]]) -> list[list[int]]:
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def _transposed(a: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*a, strict=True)]


def example_scores(draw: Draw) -> Drawn:
    x, wq, wk = draw.matrix(3, 3, -2, 2), draw.matrix(3, 2, -2, 2), draw.matrix(3, 2, -2, 2)
    q, k = _matmul(x, wq), _matmul(x, wk)
    scores = _matmul(q, _transposed(k))
    wrong = {
        "turned": _transposed(scores),
        "queries": _matmul(q, _transposed(q)),
        "keys": _matmul(k, _transposed(k)),
        "inputs": _matmul(x, _transposed(x)),
    }
    return Drawn(Matrix(scores), {"x": x, "wq": wq, "wk": wk, "q": q, "k": k}, wrong)


def example_output(draw: Draw) -> Drawn:
    scores, v = draw.vector(3, -3, 3), draw.matrix(3, 2, -4, 4)

    def mixed(row: list[float]) -> list[list[float]]:
        total = sum(map(exp, row))
        return [[sum(exp(s) / total * line[j] for s, line in zip(row, v, strict=True)) for j in range(2)]]

    largest = v[scores.index(max(scores))]
    wrong = {
        "unscaled": mixed([float(s) for s in scores]),
        "whole": mixed([s / 2 for s in scores]),
        "argmax": [largest],
        "linear": [[sum(s * line[j] for s, line in zip(scores, v, strict=True)) for j in range(2)]],
    }
    return Drawn(Matrix(mixed([s / sqrt(2) for s in scores])), {"scores": scores, "v": v}, wrong)


def example_pattern(draw: Draw) -> Drawn:
    scores = draw.matrix(3, 3, -9, 9)
    tied = any(len(set(line)) < 3 for line in [*scores, *_transposed(scores)])
    if tied:
        return example_pattern(draw)
    answer = [row.index(max(row)) + 1 for row in scores]
    columns = [row.index(max(row)) + 1 for row in _transposed(scores)]
    wrong = {"columns": [columns], "itself": [[1, 2, 3]], "least": [[row.index(min(row)) + 1 for row in scores]]}
    return Drawn(Matrix([answer]), {"scores": scores}, wrong)


def gate_count(draw: Draw) -> Drawn:
    name, gates = draw.choice([("GRU", 3), ("LSTM", 4)])
    x, h = draw.choice([64, 128, 256, 512]), draw.choice([96, 192, 320, 640])
    one = x * h + h * h + h
    wrong = {"input": gates * (x * h + h), "one": one, "bias": gates * (one - h), "extra": (7 - gates) * one}
    return Drawn(Number(gates * one), {"name": name, "gates": gates, "x": x, "h": h, "one": one}, wrong)


def state_output(draw: Draw) -> Drawn:
    k, v, q = draw.matrix(3, 2), draw.matrix(3, 2), draw.vector(2)

    def output(first: int, last: int) -> list[list[int]]:
        weights = [sum(a * b for a, b in zip(q, key, strict=True)) for key in k]
        return [[sum(weights[t] * v[t][j] for t in range(first, last)) for j in range(2)]]

    wrong = {"previous": output(0, 2), "current": output(2, 3), "forgotten": output(1, 3)}
    return Drawn(Matrix(output(0, 3)), {"k": k, "v": v, "q": q}, wrong)


def identity_mask(draw: Draw) -> Drawn:
    x, w, i = draw.matrix(3, 2), draw.matrix(2, 2), draw.integer(1, 3)
    values = _matmul(x, w)
    mean = [sum(column) / 3 for column in zip(*values, strict=True)]
    wrong = {"mean": [mean], "input": [x[i - 1]], "sum": [[sum(column) for column in zip(*values, strict=True)]]}
    return Drawn(Matrix([values[i - 1]]), {"x": x, "w": w, "i": i}, wrong)
