from glassformer.studio import errors


def test_each_refusal_has_its_status():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.StudioError)]
    assert {kind.status for kind in kinds} == {400, 404, 409, 413, 429, 503, 504}
    assert all(issubclass(kind, ValueError) for kind in kinds)
