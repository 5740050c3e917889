"""What a plan fills in and what it refuses."""

import pytest

from glassformer.bench.plan import BenchError, Plan, available_cores, unknown


@pytest.mark.parametrize(
    ("task", "prompt", "new"),
    [
        *(("decode", 32, 128), ("prefill", 512, 1), ("startup", 32, 1), ("train", 0, 10), ("encode", 128, 1)),
    ],
)
def test_each_task_has_the_lengths_of_its_published_setting(task, prompt, new):
    plan = Plan(task)
    assert (plan.length_prompt, plan.length_new, plan.n_threads) == (prompt, new, available_cores())
    assert plan.sequences == plan.to_dict()["batch"] == (32 if task == "encode" else 1)


def test_given_lengths_are_kept():
    plan = Plan("decode", prompt=7, new=9, threads=3)
    assert plan.to_dict() | {"prompt": 7, "new": 9, "threads": 3} == plan.to_dict()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"task": "decod"}, "Did you mean decode"),
        ({"precisions": ("float16",)}, "'float16' is not a precision. Did you mean bfloat16"),
        ({"precisions": ("zzz",)}, "Use one of bfloat16, float32, float8, int4, int8."),
        ({"batch": -1}, "--batch -1 must be a whole number of at least 1"),
        ({"rounds": -1}, "--rounds -1"),
        ({"threads": -2}, "--threads -2"),
        ({"new": 2}, "--new 2 is too few"),
        ({"task": "prefill", "new": 4}, "leave --new out"),
        ({"task": "encode", "new": 4}, "an encoder makes no new tokens"),
        ({"layers": -3}, "--layers -3"),
        ({"task": "train", "layers": 2}, "leave --layers, --batch and --prompt out, or give --model"),
        ({"task": "train", "batch": 1}, "nanoGPT's two CPU settings"),
        ({"task": "train", "device": "cuda"}, "train on --device cuda needs a model"),
        ({"task": "train", "model": "nano", "precisions": ("int8",)}, "float8 on a GPU, not int8"),
        ({"task": "startup", "batch": 2}, "leave --batch out"),
        ({"task": "prefill", "training": True}, "--training belongs to startup, not to prefill"),
        ({"task": "prefill", "sampled": True}, "--sampled belongs to decode, not to prefill"),
        ({"task": "prefill", "beams": 4}, "--beams 4 must be 1, or more with decode"),
        ({"beams": 0}, "--beams 0 must be 1"),
        ({"device": "gpu"}, "--device gpu is not known: use cpu or cuda."),
        ({"precisions": ("float8",)}, "float8 is for GPUs"),
        ({"device": "cuda", "precisions": ("int4",)}, "int4 is for CPUs"),
        ({"device": "cuda", "cpu_time": True}, "--cpu-time measures a CPU"),
    ],
)
def test_a_plan_that_cannot_be_measured_is_one_sentence(changes, sentence):
    with pytest.raises(BenchError) as error:
        Plan(**{"task": "decode", **changes})
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_training_of_a_model_has_a_batch_and_a_length_of_its_own():
    plan = Plan("train", model="nano")
    assert (plan.sequences, plan.length_prompt, plan.chosen_precisions) == (4, 512, ("float32", "bfloat16"))
    start = Plan("startup", training=True, batch=2)
    assert (start.sequences, start.length_prompt, start.model_name) == (2, 512, "gpt2")
    assert Plan("train").length_prompt == 0


def test_a_gpu_has_other_precisions_by_default():
    assert Plan("decode", device="cuda").chosen_precisions == ("bfloat16",)
    assert Plan("decode").chosen_precisions == ("float32", "bfloat16", "int8", "int4")
    assert Plan("decode", device="cuda", precisions=("float8", "int8", "float8")).chosen_precisions == (
        "float8",
        "int8",
    )


def test_the_nearest_name_is_offered():
    assert unknown("lama.cpp", ["llama.cpp", "nanogpt"], "contender").endswith("Did you mean llama.cpp?")
    assert unknown("xyz", ["nanogpt", "all"], "contender") == "'xyz' is not a contender. Use one of all, nanogpt."
