"""Size a model before building it: parameters, FLOPs, memory, training tokens. Pure arithmetic, without torch.

`size(config)` returns the complete sheet of a ModelConfig. The public function `gf.size(subject)` also accepts presets,
folders, run files and models (`glassformer.training.size`).
"""

from glassformer.config.choices import Dtype
from glassformer.sizing.catalogue import Catalogue
from glassformer.sizing.chinchilla import CORRECTED, PUBLISHED, Allocation, Chinchilla, LossFit, chinchilla
from glassformer.sizing.devices import DEVICES, Device, device
from glassformer.sizing.flops import Flops, attended_pairs, decode_flops, flops
from glassformer.sizing.johnson_lindenstrauss import JohnsonLindenstrauss, johnson_lindenstrauss
from glassformer.sizing.memory import InferenceMemory, TrainingMemory, inference_memory, training_memory
from glassformer.sizing.parameters import PARTS, active, count, count_by_part, parameters
from glassformer.sizing.plan import Plan, plan
from glassformer.sizing.plan_text import LADDER, Plans, plan_ladder, plan_model
from glassformer.sizing.sheet import Sheet, size
from glassformer.sizing.step import BYTES, Optimizer, StepOptions

__all__ = [
    "BYTES",
    "CORRECTED",
    "DEVICES",
    "LADDER",
    "PARTS",
    "PUBLISHED",
    "Allocation",
    "Catalogue",
    "Chinchilla",
    "Device",
    "Dtype",
    "Flops",
    "InferenceMemory",
    "JohnsonLindenstrauss",
    "LossFit",
    "Optimizer",
    "Plan",
    "Plans",
    "Sheet",
    "StepOptions",
    "TrainingMemory",
    "active",
    "attended_pairs",
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
    "size",
    "training_memory",
]
