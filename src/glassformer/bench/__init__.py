"""Speed beside every peer that is installed: one process per contender, taking turns on the same model in one run.

A contender that is not having its turn is stopped (SIGSTOP), so that nobody's threads disturb another; the order
rotates from round to round, so that a slow phase of the machine meets everyone; greedy ids (losses, in training) are
compared, so that a fast wrong model is found out. Nothing is imported here: a contender's process starts through this
package, and its start is one of the things measured. The way in is `glassformer.bench.run.run(Plan(...))`.
"""
