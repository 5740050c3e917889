"""Look inside a model: record activations, edit them, decompose the residual stream, read it at every depth.

`trace` and `patch` are functions here, as in `gf.trace` and `gf.patch`. To import from the modules of these names,
write `from glassformer.lens.trace import ...`.
"""

from glassformer.lens.logit_lens import LensReading, TunedLens, logit_lens, train_tuned_lens
from glassformer.lens.patch import (
    EffectMap,
    Intervention,
    PathEffect,
    from_run,
    mean,
    patch,
    patch_effects,
    path_effect,
    resample,
    value,
    zero,
)
from glassformer.lens.residual import (
    Attribution,
    Decomposition,
    StreamNorms,
    attribute_logits,
    decompose,
    stream_norms,
)
from glassformer.lens.sites import LensError, Site, Sites, sites_of
from glassformer.lens.trace import Trace, trace

__all__ = [
    "Attribution",
    "Decomposition",
    "EffectMap",
    "Intervention",
    "LensError",
    "LensReading",
    "PathEffect",
    "Site",
    "Sites",
    "StreamNorms",
    "Trace",
    "TunedLens",
    "attribute_logits",
    "decompose",
    "from_run",
    "logit_lens",
    "mean",
    "patch",
    "patch_effects",
    "path_effect",
    "resample",
    "sites_of",
    "stream_norms",
    "trace",
    "train_tuned_lens",
    "value",
    "zero",
]
