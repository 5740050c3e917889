"""The source of the kernels, put together."""

from glassformer.kernels.cuda.decode import library


def test_sizes_come_first_and_the_machine_can_be_another():
    text = library.source({"D": 40}, instead={"machine.cuh": "// here"})
    assert text.startswith("#define D 40\n")
    assert "// here" in text
    assert "bar.sync" not in text
    assert "bar.sync" in library.source({"D": 40})
    assert text.index("Pack") < text.index("// here") < text.index("decode(const Arguments a)")


def test_every_pointer_has_its_place():
    assert [name for name, _ in library.Arguments._fields_][: len(library.TENSORS)] == list(library.TENSORS)
    assert len(set(library.TENSORS)) == len(library.TENSORS)
