import pytest

from glassformer.studio import Settings, StudioError
from glassformer.studio.settings import default_folder


def test_another_host_needs_a_token(tmp_path):
    with pytest.raises(StudioError, match="give a token"):
        Settings(host="0.0.0.0", folder=tmp_path)
    assert not Settings(host="0.0.0.0", token="abcdefgh", folder=tmp_path).is_local


@pytest.mark.parametrize("token", ["short", "with blank in it", "new\nline-abcdef", "ä" * 10])
def test_a_token_that_cannot_stand_in_a_header_is_refused(token, tmp_path):
    with pytest.raises(StudioError, match="token"):
        Settings(token=token, folder=tmp_path)


def test_a_model_must_be_a_folder(tmp_path):
    with pytest.raises(StudioError, match="not a folder"):
        Settings((tmp_path / "nothing",), folder=tmp_path)


def test_a_folder_without_a_model_is_refused_before_anything_is_served(tmp_path):
    with pytest.raises(StudioError, match=r"has none of config\.json, model\.toml"):
        Settings((tmp_path,), folder=tmp_path)
    (tmp_path / "model.toml").touch()
    assert Settings((tmp_path,), folder=tmp_path).models == (tmp_path,)


def test_a_file_cannot_be_the_folder_of_the_studio(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StudioError, match="is a file"):
            Settings(folder=folder)
    Settings(folder=tmp_path / "to" / "be" / "made")


def test_the_folder_can_be_named_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("GLASSFORMER_STUDIO", str(tmp_path))
    assert Settings().folder == tmp_path
    monkeypatch.delenv("GLASSFORMER_STUDIO")
    assert default_folder().name == "studio"
