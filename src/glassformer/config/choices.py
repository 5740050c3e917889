"""Choices that several rooms offer by name, each declared once. No torch, so that the command line can list them.

Choices that belong to a config are declared with it: `Placement`, `Activation`, `Position`, `FeedForward`, `Norm`, and
the optimizers in `config.optimizer`.
"""

from typing import Literal

ModelKind = Literal["decoder", "encoder", "seq2seq"]
"""The three kinds of models."""
Device = Literal["auto", "cpu", "cuda"]
"""Where to compute; `auto` is a CUDA GPU if there is one."""
Dtype = Literal["float64", "float32", "bfloat16", "float16", "int8", "int4"]
"""Formats of weights; int8 and int4 are quantized."""
FloatDtype = Literal["float64", "float32", "bfloat16", "float16"]
"""Dtypes that torch computes in."""
Engine = Literal["auto", "torch", "native"]
"""Implementations of decoding: torch, or compiled kernels."""
Precision = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8"]
"""Formats of the weights while decoding; `auto` is exact. int8, int4 are for CPUs; int8, fp8 for GPUs."""
CacheKind = Literal["growing", "static", "windowed"]
"""Kinds of KV caches."""
TrainingPrecision = Literal["auto", "float32", "bfloat16"]
"""Dtypes of the matmuls of a training step."""
ScheduleKind = Literal["constant", "cosine", "wsd"]
"""What the learning rate does after the warm-up."""
WindowOrder = Literal["random", "epoch"]
"""The order in which training reads the windows of a text."""
ChatFormat = Literal["auto", "messages", "sharegpt", "alpaca", "prompt", "preference", "text"]
"""Formats of the rows of chat data."""
ChatLoss = Literal["assistant", "last", "all", "dpo"]
"""What is learned of a conversation: every answer, the last one, all tokens, or which of two answers is preferred."""
TooLong = Literal["drop", "cut", "error"]
"""What happens to a conversation that is longer than the context."""

Recompute = Literal["no", "selective", "full"]
"""What a training step computes again in the backward pass instead of saving it."""

Scheduler = Literal["torchrun", "slurm", "kubernetes"]
"""What starts the processes of a run on many GPUs."""
