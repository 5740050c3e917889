"""`glass sample` as a user meets it."""

from tests.cli.asking import run, run_json


def test_sample_continues_the_prompt_and_repeats_itself(capsys, folder):
    first = run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20")
    assert first[0] == 0
    assert first[1].startswith("the cat")
    assert run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20") == first
    other = run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20", "--seed", "1")
    assert other[1] != first[1]
    uncached = run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20", "--no-cache")
    assert uncached[1] == first[1]


def test_sample_with_a_draft_says_the_same_and_counts(capsys, folder):
    greedy = ["sample", "--model", folder, "the cat", "--max-new-tokens", "20", "--temperature", "0"]
    _, plain, quiet = run(capsys, *greedy)
    assert quiet == ""
    code, out, err = run(capsys, *greedy, "--draft", folder, "--draft-tokens", "3")
    assert (code, out) == (0, plain)
    assert err == "draft: 15 of 15 proposed tokens accepted (100%); 20 tokens in 5 passes of the model\n"
    code, out, err = run(capsys, *greedy, "--draft", "lookup")
    assert (code, out) == (0, plain)
    assert err.startswith("draft: ")
    code, result = run_json(capsys, *greedy, "--draft", folder, "--draft-tokens", "3")
    assert code == 0
    assert result["draft"] == {"proposed": 15, "accepted": 15, "passes": 5}


def test_the_bundled_bard_speaks_without_a_word_about_models(capsys):
    code, out, _ = run(capsys, "sample", "ROMEO:", "--max-new-tokens", "40")
    assert code == 0
    assert out.startswith("ROMEO:")
    assert len(out) > 40


def test_sample_as_json_by_beams_and_by_ids(capsys, folder):
    code, result = run_json(capsys, "sample", "--model", folder, "--beams", "3", "the", "--max-new-tokens", "5")
    assert code == 0
    assert len(result["new_tokens"]) == 5
    code, result = run_json(capsys, "sample", "--model", folder, "--ids", "5 6", "--max-new-tokens", "5")
    assert code == 0
    assert result["prompt_tokens"] == [5, 6]
