"""Nothing that happens to an isolated subject stays, and nothing it prints is heard."""

import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from glassformer.doctor.probes import subject_of
from glassformer.doctor.subject import isolate
from glassformer.doctor.subject.errors import CannotExamineError
from tests.doctor.probes.subjects import Copycat


def test_a_patient_is_a_copy_in_eval_mode():
    model = Copycat().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with isolate.borrowed(model, warm=6.0, dtype=torch.float64) as isolated:
        assert isolated is not model
        assert not isolated.training
        assert torch.equal(isolated.table.weight, 6 * before["table.weight"].double())
        isolated.table.weight.data.zero_()
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_complex_tables_stay_complex():
    model = Copycat()
    model.register_buffer("rotations", torch.polar(torch.ones(4), torch.arange(4.0)))
    model.register_buffer("ids", torch.arange(4))
    for dtype, wanted in ((torch.float64, torch.complex128), (torch.float32, torch.complex64)):
        with isolate.borrowed(model, dtype=dtype) as isolated:
            assert (isolated.table.weight.dtype, isolated.rotations.dtype) == (dtype, wanted)
            assert torch.equal(isolated.rotations.imag, model.rotations.imag.to(dtype))
            assert isolated.ids.dtype is torch.int64
    with isolate.borrowed(model, dtype=torch.bfloat16) as isolated:
        assert torch.equal(isolated.rotations, model.rotations)  # torch has no complex numbers of two bfloat16


def test_a_model_too_large_to_copy_is_put_back(monkeypatch):
    monkeypatch.setattr(isolate, "LARGE_BYTES", 0)
    model = Copycat().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with isolate.borrowed(model, warm=6.0, dtype=torch.float64) as isolated:
        assert isolated is model
        isolated.head.weight.data.zero_()
    assert model.training
    assert model.head.weight.dtype == torch.float32
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_random_state_and_gradients_are_preserved():
    model = Copycat()
    model.head.bias.grad = torch.ones_like(model.head.bias)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    with isolate.preserved(model):
        torch.rand(10)
        model.head.bias.grad = None
    assert torch.equal(torch.rand(1), expected)
    assert model.head.bias.grad is not None


def test_what_is_printed_is_kept_off_the_screen(capsys):
    printed = []
    with isolate.quiet(printed):
        print("hello")
    assert capsys.readouterr().out == ""
    assert printed == ["hello\n"]


def forever():
    with isolate.time_limit(0.05, "the call"):
        while True:
            torch.zeros(1).add(1)


def test_a_loop_ends_at_the_time_limit():
    with pytest.raises(CannotExamineError, match=r"took more than 0\.05 s"):
        forever()


def test_a_signal_ends_a_loop_without_torch_in_the_main_thread():
    def asleep():
        with isolate.time_limit(0.05, "the call"):
            while True:
                time.sleep(0.001)

    with pytest.raises(CannotExamineError, match="took more than"):
        asleep()


def test_dropout_is_identity_wherever_it_is_called_from():
    x = torch.ones(4, 4)
    q = torch.randn(1, 2, 8, 4)
    with isolate.NoDropout():
        assert torch.equal(F.dropout(x, 0.5, True), x)
        assert torch.equal(nn.Dropout(0.9)(x), x)
        a = F.scaled_dot_product_attention(q, q, q, dropout_p=0.9)
        b = F.scaled_dot_product_attention(q, q, q, None, 0.9)
    assert torch.equal(a, b)
    assert torch.allclose(a, F.scaled_dot_product_attention(q, q, q))


def in_a_thread(act):
    """What `act` returns or raises in a thread of its own."""
    result = []

    def run():
        try:
            result.append(act())
        except BaseException as error:  # what the thread met is what the test looks at
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return result[0]


def test_a_loop_ends_at_the_time_limit_in_any_thread():
    error = in_a_thread(forever)
    assert isinstance(error, CannotExamineError)
    assert "took more than 0.05 s" in str(error)


def test_a_model_that_catches_everything_does_not_escape_the_limit(monkeypatch):
    monkeypatch.setattr(isolate, "AGAIN", 0.05)

    def stubborn():
        with isolate.time_limit(0.05, "the call"):
            for _ in range(2):
                try:
                    while True:
                        torch.zeros(1).add(1)
                except BaseException:  # what a careless model does
                    pass
            while True:
                torch.zeros(1).add(1)

    assert "took more than" in str(in_a_thread(stubborn))
    with pytest.raises(CannotExamineError, match="took more than"):
        stubborn()


def test_a_limit_that_is_kept_leaves_nothing_behind():
    def quick():
        with isolate.time_limit(0.02, "the call"):
            pass
        time.sleep(0.06)
        return "done"

    assert in_a_thread(quick) == "done"
    assert quick() == "done"


def test_putting_a_model_back_is_not_cut_short(monkeypatch):
    monkeypatch.setattr(isolate, "LARGE_BYTES", 0)
    monkeypatch.setattr(isolate, "AGAIN", 0.02)
    model = Copycat().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    copy_ = torch.Tensor.copy_

    def slowly(*args):
        time.sleep(0.05)
        return copy_(*args)

    def run():
        with isolate.time_limit(0.03, "the call"), isolate.borrowed(model, warm=6.0), torch.no_grad():
            monkeypatch.setattr(torch.Tensor, "copy_", slowly)
            while True:
                torch.zeros(1).add(1)

    def here():
        with pytest.raises(CannotExamineError):
            run()

    for where in (lambda: in_a_thread(run), here):
        where()
        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_other_threads_are_heard_while_one_is_kept_quiet(capsys):
    import sys

    real, printed = sys.stdout, []
    with isolate.quiet(printed):
        in_a_thread(lambda: print("a server speaks"))
        print("a model speaks")
    assert capsys.readouterr().out == "a server speaks\n"
    assert printed == ["a model speaks\n"]
    assert sys.stdout is real


def test_float32_by_name_becomes_float64():
    x = torch.ones(2, 3, dtype=torch.float64)
    with isolate.AllDouble():
        assert x.float().dtype == x.to(torch.float32).dtype == x.softmax(-1, dtype=torch.float32).dtype == x.dtype
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float64
        positions = torch.arange(2).float()
        assert positions.dtype == torch.float32  # whole numbers are exact, and T5's buckets depend on their rounding
        assert (positions @ x).dtype == torch.float64
    assert x.float().dtype == torch.float32


def test_float16_matmuls_are_computed_in_float32_and_rounded():
    x, w, b = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((3, 5), (7, 5), (7,)))
    half = [t.half() for t in (x, w, b)]
    calls = [
        lambda: F.linear(*half),
        lambda: torch.addmm(half[2], half[0], half[1].t()),
        lambda: half[0] @ half[1].t() + half[2],
    ]
    wanted = F.linear(*(t.float() for t in half))
    with isolate.HalfAsFloat():
        for call in calls:
            found = call()
            assert found.dtype == torch.float16
            torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3)
        assert torch.isinf(F.linear(torch.full((1, 2), 300.0).half(), torch.full((1, 2), 300.0).half())).all()
        assert F.linear(x, w, b).dtype == torch.float32


def test_float16_is_widened_only_for_a_large_model_on_a_cpu():
    subject = subject_of(Copycat())
    with subject.isolated(dtype=torch.float16) as isolated:
        assert not isinstance(isolate.HalfAsFloat.where_slow(isolated), isolate.HalfAsFloat)
        isolated.brief = True
        assert isinstance(isolate.HalfAsFloat.where_slow(isolated), isolate.HalfAsFloat)
    with subject.isolated() as isolated:
        isolated.brief = True
        assert not isinstance(isolate.HalfAsFloat.where_slow(isolated), isolate.HalfAsFloat)
