"""Compare our speed with every installed peer: one process per contender, in turns, on the same model, in one run.

A contender that is waiting is stopped (SIGSTOP), so that its threads do not disturb the others. The order rotates
from round to round, so that a slow phase of the machine affects all contenders. Greedy ids (in training: losses) are
compared, so that a fast but wrong model is detected. Nothing is imported here, because the start-up of a contender's
process, which imports this package, is one of the things measured. The entry point is
`glassformer.bench.run.run(Plan(...))`.
"""
