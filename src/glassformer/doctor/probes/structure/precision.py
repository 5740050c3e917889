"""Softmax runs in the model's own dtype or a wider one.

A float32 model that casts its scores to float16 for softmax keeps three digits of each attention weight, and overflows
at scores of 65,504. Mixed precision does the opposite: matmuls in 16 bits, softmax in float32.

Assumption: the weights are in a wider dtype than 16 bits. A bfloat16 softmax after a bfloat16 q·k is what autocast
gives on a CPU, and not judged.
"""

import torch

from glassformer.anatomy.record import SOFTMAXES
from glassformer.doctor.probes.structure.recording import Recording
from glassformer.doctor.subject.subject import Subject, layer_of
from glassformer.finding import Finding, Verdict

ID = "low_precision/softmax"


def softmax_in_own_dtype(subject: Subject, recording: Recording) -> Finding:
    """The input of each softmax over scores has at least the precision of the weights, or of q·k."""
    own = subject.dtype
    if own.itemsize <= 2:
        return Finding.skip(ID, f"the model itself is in {_name(own)}")
    nodes = [n for n in recording.graph.nodes if n.op in SOFTMAXES and n.live]
    if not nodes:
        return Finding.skip(ID, "no softmax was seen")
    for node in nodes:
        scores = node.inputs[0]
        dots = [n.value.dtype for n in recording.graph.landmarks_before(scores) if n.is_mixing]
        narrow = scores.value.dtype
        wider = any(torch.finfo(d).eps < torch.finfo(narrow).eps for d in dots)
        if torch.finfo(narrow).eps <= torch.finfo(own).eps or not (wider or narrow is torch.float16):
            continue
        at = layer_of(node.path, subject.blocks())
        where = f"layer {at[1]}" if at else node.path or "the model"
        step = torch.finfo(narrow).eps
        why = f"in {where} softmax runs in {_name(narrow)}, while the weights are {_name(own)}: weights keep {step:.1g}"
        remedy = f"Cast nothing to {_name(narrow)} before softmax: softmax(scores, dim=-1, dtype=torch.float32)."
        evidence = {"layer": at[1] if at else None, "dtype": _name(narrow), "module": node.path}
        return Finding(ID, Verdict.FAIL, step, torch.finfo(own).eps, why, remedy, evidence)
    return Finding(
        ID, Verdict.PASS, torch.finfo(own).eps, torch.finfo(own).eps, f"softmax runs in {_name(own)} or wider"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
