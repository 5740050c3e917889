"""Two implementations of one model, to the first operation where they part.

`compare(a, b)` does it; the module itself can be called and does the same, so that `glassformer.compare` is at once the
place of these functions and the function `gf.compare(a, b)` of the public contract.
"""

from glassformer.callable_module import make_callable
from glassformer.doctor.compare.errors import CannotCompareError
from glassformer.doctor.compare.result import Comparison
from glassformer.doctor.compare.run import compare
from glassformer.doctor.compare.scene import Explanation

__all__ = ["CannotCompareError", "Comparison", "Explanation", "compare"]

make_callable(__name__, "compare")
