"""Two implementations of one model, to the first operation where they differ.

`compare(a, b)` returns the comparison; `gf.compare` is this function.
"""

from glassformer.doctor.compare.errors import CannotCompareError
from glassformer.doctor.compare.result import Comparison
from glassformer.doctor.compare.run import compare
from glassformer.doctor.compare.scene import Explanation

__all__ = ["CannotCompareError", "Comparison", "Explanation", "compare"]
