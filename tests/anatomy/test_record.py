"""Any forward becomes the same graph of elementary operations, in float64 where asked."""

import torch
from torch import nn

from glassformer.anatomy.record import OVERWRITTEN, Widened, ancestors, elementary, record, tensors_in


class Careless(nn.Module):
    """Asks for float32 by name, writes in place, attends with the fused kernel."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens):
        x = self.table(tokens)
        x = x.to(torch.float32) * torch.ones(4, dtype=torch.float32)
        x += 1
        heads = nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
        return self.out(heads[:, 0].to(self.out.weight.dtype))


def recorded(exact):
    model, tokens = Careless().to(torch.float64 if exact else torch.float32), torch.tensor([[1, 2, 3], [4, 5, 6]])
    return record(lambda: model(tokens), [tokens], model, exact)


def test_attention_is_two_products_and_a_softmax_whatever_it_is_called():
    graph, _ = recorded(exact=True)
    assert [n.op for n in graph.nodes if n.is_mixing] == ["bmm", "bmm"]
    assert sum(n.op in ("_softmax", "_safe_softmax") for n in graph.nodes) == 1
    assert [n.op for n in graph.nodes if n.is_linear] == ["addmm"]


def test_exact_means_float64_even_where_float32_is_asked_for():
    graph, logits = recorded(exact=True)
    assert logits.dtype == torch.float64
    assert all(n.value.dtype == torch.float64 for n in graph.nodes if n.live and n.value.is_floating_point())
    graph, _ = recorded(exact=False)
    assert {n.value.dtype for n in graph.nodes if n.live and n.value.is_floating_point()} == {torch.float32}


def test_values_are_those_of_the_moment():
    graph, _ = recorded(exact=True)
    before = next(n for n in graph.nodes if n.op == "mul")
    after = next(n for n in graph.nodes if n.op == "add" and before in n.inputs)
    torch.testing.assert_close(after.value, before.value + 1)


def test_parameters_go_by_their_names_and_shapes_alone_carry_no_tokens():
    graph, _ = recorded(exact=True)
    assert {"table.weight", "out.weight", "out.bias"} <= {n.name for n in graph.nodes}
    tokens = torch.tensor([[1, 2]])
    graph, _ = record(lambda: torch.zeros_like(tokens).double() + 1, [tokens])
    assert not any(n.live for n in graph.nodes if n.op == "add")


def test_the_patched_functions_are_put_back():
    with elementary(exact=True), Widened():
        assert torch.ones(2).dtype == torch.float64
        assert torch.ones(2, dtype=torch.float32).dtype == torch.float64
    assert torch.ones(2).dtype == torch.float32
    assert torch.backends.mha.get_fastpath_enabled()


def test_tensors_are_found_in_nests():
    one, two = torch.ones(1), torch.ones(2)
    assert tensors_in(({"a": [one]}, (two, 3), "text")) == [one, two]


def test_operations_between_two_nodes_and_how_often_each_is_computed():
    x = torch.rand(3, 4)
    graph, _ = record(lambda: (x.softmax(-1).t() ** 2).softmax(0).sum(), [x], exact=False)
    first = next(n for n in graph.nodes if n.op == "_softmax")
    assert graph.changes(first, graph.nodes[-1]) == ("pow", "softmax", "sum")
    assert graph.operations() == {"softmax": 2, "pow": 1, "sum": 1}
    again = [n for n in graph.nodes if n.op == "_softmax"][-1]
    assert first.index in graph.since_landmark(again)


def test_a_write_to_a_view_changes_the_tensor_it_is_a_view_of():
    """Heads written one by one into a buffer: what reads the buffer depends on the tokens and on each write."""
    x = torch.rand(2, 3)

    def call():
        buffer = torch.empty(2, 3)
        buffer[0] = x[0] * 2
        buffer[1] = x[1] * 3
        return buffer @ torch.ones(3, 4)

    graph, result = record(call, [x], exact=False)
    (matmul,) = (n for n in graph.nodes if n.op == "mm")
    read = matmul.factors[0]
    assert (read.op, read.live, matmul.is_linear) == (OVERWRITTEN, True, True)
    torch.testing.assert_close(read.value, torch.stack([x[0] * 2, x[1] * 3]))
    assert {n.index for n in graph.nodes if n.op == "mul"} <= ancestors(matmul)
    torch.testing.assert_close(result, read.value @ torch.ones(3, 4))


def test_a_write_next_to_a_view_leaves_it_alone():
    x = torch.rand(2, 3)

    def call():
        left, right = (x * 2).chunk(2, 0)
        left.mul_(5)
        return right + 1

    graph, _ = record(call, [x], exact=False)
    assert not any(n.op == OVERWRITTEN for n in graph.nodes)


def test_operations_carry_the_path_of_their_module_and_parameters_are_known_by_storage():
    model, tokens = Careless(), torch.tensor([[1, 2, 3]])
    graph, _ = record(lambda: model(tokens), [tokens], model, exact=False)
    (linear,) = (n for n in graph.nodes if n.is_linear)
    assert linear.path == "out"
    assert next(n.path for n in graph.nodes if n.op == "embedding") == "table"
    assert {n.path for n in graph.nodes if n.op == "bmm"} == {""}
    assert [graph.is_parameter(f) for f in linear.factors] == [False, True]
    assert not model.out._forward_hooks


def test_inference_mode_is_recorded_too():
    model, x = nn.Linear(3, 4), torch.rand(2, 5, 3)

    @torch.inference_mode()
    def call():
        return model(x)

    graph, result = record(call, [x], model, exact=False)
    (linear,) = (n for n in graph.nodes if n.is_linear)
    assert linear.bias is not None
    torch.testing.assert_close(linear.value, result.clone())


def test_recording_works_when_the_compiler_is_imported():
    import torch._dynamo

    assert record(lambda: torch.ones(2) + 1, [], None)[0].nodes
