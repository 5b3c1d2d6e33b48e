"""Caption tokens: every text survives encoding and decoding, GPT-2's files are read, and other files are rejected."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clipmill.manifests.errors import UserError
from clipmill.train.tasks.caption.tokenizer import (
    END,
    NO_TOKEN,
    CaptionTokenizer,
    one_line,
    read_tokenizer,
    train_tokenizer,
)

TEXTS = ["A red square moves left.", "a blue circle moves <b>up</b>", "ein grüner Kreis", "赤い四角"]
TOKENIZER = train_tokenizer(TEXTS, vocabulary_size=320)
ONE_TOKEN = '{"model":{"type":"BPE","vocab":{"<|endoftext|>":0},"merges":[]}}'


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
@example("a <|endoftext|> b")
def test_every_text_comes_back_but_for_control_characters_and_spaces(text: str) -> None:
    assert TOKENIZER.text(TOKENIZER.ids(text)) == one_line(text)


def test_special_tokens_are_text_in_a_caption_and_tokens_in_a_prompt() -> None:
    text = f"a {END} b"
    for tokenizer in (TOKENIZER, pickle.loads(pickle.dumps(TOKENIZER))):
        assert tokenizer.end_id not in tokenizer.ids(text) and tokenizer.end_id in tokenizer.prompt_ids(text)
        assert tokenizer.targets(text, max_tokens=40).tolist().count(tokenizer.end_id) == 1
        num_tokens = len(tokenizer.ids(text))
        assert [tokenizer.count_longer([text], max_tokens=size) for size in (num_tokens, num_tokens + 1)] == [1, 0]


def test_a_caption_is_one_line_whatever_tokens_a_model_finds() -> None:
    vocabulary = json.loads(TOKENIZER.as_json())["model"]["vocab"]
    line_end, tab = vocabulary["Ċ"], vocabulary["ĉ"]
    ids = [tab, *TOKENIZER.ids("a red"), line_end, line_end, *TOKENIZER.ids("square")]
    assert TOKENIZER.text(ids) == "a red square"


def test_the_same_captions_give_the_same_tokenizer() -> None:
    assert train_tokenizer(TEXTS, vocabulary_size=320).as_json() == TOKENIZER.as_json()
    assert TOKENIZER.vocabulary_size <= 320
    assert train_tokenizer(["a"], vocabulary_size=320).vocabulary_size == 257  # bytes and the end token


def test_targets_end_where_there_is_room_and_are_padded_with_what_losses_leave_out() -> None:
    ids = TOKENIZER.ids(TEXTS[0])
    assert TOKENIZER.targets(TEXTS[0], max_tokens=len(ids) + 3).tolist() == [
        *ids,
        TOKENIZER.end_id,
        NO_TOKEN,
        NO_TOKEN,
    ]
    assert TOKENIZER.targets(TEXTS[0], max_tokens=2).tolist() == ids[:2]
    counted = [TOKENIZER.count_longer(TEXTS, max_tokens=size) for size in (1, len(ids), len(ids) + 1)]
    assert counted == [4, sum(len(TOKENIZER.ids(text)) >= len(ids) for text in TEXTS), counted[2]]
    assert counted[2] < counted[1]


def test_gpt2s_two_files_and_the_one_of_the_library_are_the_same_tokenizer(tmp_path: Path) -> None:
    from transformers import GPT2Tokenizer

    whole = json.loads(TOKENIZER.as_json())
    two, first_folder = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    (two / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in whole["model"]["merges"])
    (two / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    theirs = GPT2Tokenizer(vocab=str(two / "vocab.json"), merges=str(two / "merges.txt"))
    theirs.save_pretrained(first_folder)
    for folder in (first_folder, two):
        ours: CaptionTokenizer = read_tokenizer(folder)
        for text in TEXTS:
            assert ours.ids(text) == theirs.encode(text) == TOKENIZER.ids(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read the tokenizer"),
        (None, "there is no tokenizer"),
        ("no end", "has no <.endoftext.>.* special tokens are <stop>"),
        (ONE_TOKEN, "has no tokens for 62 of 62 letters and digits, such as 'a'"),
        (ONE_TOKEN.replace('"merges"', '"unk_token":"<|endoftext|>","merges"'), "has no tokens for 62 of 62"),
        ("no Q", "has no tokens for 1 of 62 letters and digits, such as 'Q'"),
    ],
)
def test_folders_without_a_fitting_tokenizer_are_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        changes = {"no end": ("<|endoftext|>", "<stop>"), "no Q": ('"Q"', '"!Q"')}
        text = TOKENIZER.as_json().decode().replace(*changes[content]) if content in changes else content
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_tokenizer(tmp_path)
