"""What a model costs before it is built: parameters, operations, memory, training tokens. Pure arithmetic, no torch.

`size(config)` returns the whole sheet; `gf.size` is this function.
"""

from glassformer.sizing.chinchilla import CORRECTED, PUBLISHED, Allocation, Chinchilla, LossFit, chinchilla
from glassformer.sizing.devices import DEVICES, Device, device
from glassformer.sizing.flops import Flops, decode_flops, flops, seen_pairs
from glassformer.sizing.johnson_lindenstrauss import JohnsonLindenstrauss, johnson_lindenstrauss
from glassformer.sizing.memory import BYTES, STATES, InferenceMemory, TrainingMemory, inference_memory, training_memory
from glassformer.sizing.parameters import PARTS, active, count, count_by_part, parameters
from glassformer.sizing.plan import Plan, plan
from glassformer.sizing.plan_text import LADDER, Plans, plan_ladder, plan_model
from glassformer.sizing.sheet import Sheet, size

__all__ = [
    "BYTES",
    "CORRECTED",
    "DEVICES",
    "LADDER",
    "PARTS",
    "PUBLISHED",
    "STATES",
    "Allocation",
    "Chinchilla",
    "Device",
    "Flops",
    "InferenceMemory",
    "JohnsonLindenstrauss",
    "LossFit",
    "Plan",
    "Plans",
    "Sheet",
    "TrainingMemory",
    "active",
    "chinchilla",
    "count",
    "count_by_part",
    "decode_flops",
    "device",
    "flops",
    "inference_memory",
    "johnson_lindenstrauss",
    "parameters",
    "plan",
    "plan_ladder",
    "plan_model",
    "seen_pairs",
    "size",
    "training_memory",
]
