"""Shape annotations of tensors: jaxtyping where it is installed, plain `Tensor` where it is not.

Write `Float[Tensor, "B T D"]`. The tests execute these through jaxtyping and beartype; a machine without jaxtyping (a
bare GPU image) still imports and runs everything.
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
