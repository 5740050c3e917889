import base64

import numpy as np
import pytest
from starlette.testclient import TestClient

from glassformer.studio import Settings
from glassformer.studio.app import create_app

TEXTS = ["the cat", "the cat sat on the mat", "dog"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A tiny BERT of transformers and its tokenizer, saved as a folder."""
    transformers = pytest.importorskip("transformers")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "mat", "dog"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = tmp_path_factory.mktemp("models") / "bert"
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=20,
        max_position_embeddings=32, initializer_range=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).eval()
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]")
    tokenizer.save_pretrained(folder)
    return folder, model.bert, tokenizer


@pytest.fixture(scope="module")
def client(bert, tmp_path_factory):
    app = create_app(Settings((bert[0],), folder=tmp_path_factory.mktemp("studio"), warm=False))
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as opened:
        yield opened


def embedded(client, given, **more):
    reply = client.post("/v1/embeddings", json={"model": "bert", "input": given, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()


def vectors(answer):
    assert [row["index"] for row in answer["data"]] == list(range(len(answer["data"])))
    return np.array([row["embedding"] for row in answer["data"]])


def pooled(bert, kind):
    """The vectors of transformers."""
    import torch

    _, model, tokenizer = bert
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    return (hidden[:, 0] if kind == "cls" else (hidden * mask).sum(1) / mask.sum(1)).numpy(), int(mask.sum())


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_equal_those_of_transformers(client, bert, pooling):
    wanted, count = pooled(bert, pooling)
    answer = embedded(client, TEXTS, pooling=pooling, normalize=False)
    np.testing.assert_allclose(vectors(answer), wanted, atol=1e-5)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    unit = vectors(embedded(client, TEXTS, pooling=pooling))
    np.testing.assert_allclose(unit, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-5)


def test_inputs_are_texts_or_token_lists_and_padding_changes_nothing(client, bert):
    together = vectors(embedded(client, TEXTS))
    ids = [bert[2](text)["input_ids"] for text in TEXTS]
    np.testing.assert_allclose(vectors(embedded(client, ids)), together, atol=1e-6)
    for i, text in enumerate(TEXTS):
        np.testing.assert_allclose(vectors(embedded(client, text))[0], together[i], atol=1e-6)
        np.testing.assert_allclose(vectors(embedded(client, ids[i]))[0], together[i], atol=1e-6)


def test_base64_is_little_endian_float32_and_the_openai_client_reads_it(client):
    plain = vectors(embedded(client, TEXTS)).astype(np.float32)
    rows = embedded(client, TEXTS, encoding_format="base64")["data"]
    decoded = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in rows]
    np.testing.assert_array_equal(decoded, plain)
    openai = pytest.importorskip("openai")
    asking = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0, http_client=client)
    found = asking.embeddings.create(model="bert", input=TEXTS)  # asks for base64
    np.testing.assert_allclose([row.embedding for row in found.data], plain)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"model": "bard"}, 400, "bard is not an encoder"),
        ({"model": "unknown"}, 404, "there is no model"),
        ({"dimensions": 7}, 400, "dimensions=7 is not the width of bert, 24"),
        ({"input": []}, 422, "input"),
        ({"input": ""}, 422, "input"),
        ({"input": [[99]]}, 400, "token id 99 is outside the vocabulary"),
        ({"input": "the " * 40}, 400, "42 tokens are more than the context of 32"),
        ({"encoding_format": "hex"}, 422, "encoding_format"),
        ({"pooling": "max"}, 422, "pooling"),
    ],
)
def test_wrong_requests_are_one_sentence(client, body, status, sentence):
    reply = client.post("/v1/embeddings", json={"model": "bert", "input": "the cat", **body})
    assert reply.status_code == status, reply.text
    assert sentence in reply.json()["error"]["message"]
