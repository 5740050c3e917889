"""The same Transformer written in the styles people write it in, each able to carry one of the newer bugs.

`build(bug)` of each module gives a fresh model in evaluation mode, sound for `bug=None`.
"""
