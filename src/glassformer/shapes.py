"""Shape annotations of tensors: jaxtyping if it is installed, otherwise plain `Tensor`.

Write `Float[Tensor, "B T D"]`. The tests check these annotations with jaxtyping and beartype. Without jaxtyping (on a
bare GPU image) everything still imports and runs, unchecked.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped
else:
    try:
        from jaxtyping import Bool, Float, Int, Shaped
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int = Shaped = _Unchecked

__all__ = ["Bool", "Float", "Int", "Shaped"]
