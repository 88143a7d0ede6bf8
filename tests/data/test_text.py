"""Tokens equal those of torchtext's `basic_english`; the vocabulary depends on the texts alone."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedala.data.text import build_vocabulary, encode_texts, fit_ids, tokenize


def reference(text):
    """torchtext's table of patterns and replacements, one after the other."""
    text = text.lower()
    for pattern, replacement in (
        (r"\'", " '  "), (r"\"", ""), (r"\.", " . "), (r"<br \/>", " "), (r",", " , "),
        (r"\(", " ( "), (r"\)", " ) "), (r"\!", " ! "), (r"\?", " ? "), (r"\;", " "), (r"\:", " "),
        (r"\s+", " "),
    ):  # fmt: skip
        text = re.sub(pattern, replacement, text)
    return text.split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Oil's UP, again!", "oil ' s up , again !"),
        ('He said: "no"; (why?)', "he said no ( why ? )"),
        ("one<br />two\t\nthree", "one two three"),
        ("$3.50 is #36;-5", "$3 . 50 is #36 -5"),
        ("", ""),
    ],
)
def test_tokens(text, expected):
    assert tokenize(text) == expected.split()


@given(st.text(alphabet=st.sampled_from(list("aB '\".,()!?;:<br/>\n\t-é\u2003"))) | st.text())
def test_tokens_are_those_of_the_reference(text):
    assert tokenize(text) == reference(text)


def test_the_vocabulary_is_by_frequency_then_alphabet():
    assert build_vocabulary([["b", "c", "a"], ["c", "z"], ["b"]]) == {
        "b": 1,
        "c": 2,
        "a": 3,
        "z": 4,
    }


def test_ids_are_cut_and_padded_to_200():
    ids, tokens = encode_texts(["a " * 300, "b a", ""])
    assert ids.shape == (3, 200)
    assert ids[0].tolist() == [1] * 200
    assert ids[1].tolist() == [2, 1] + [0] * 198
    assert ids[2].tolist() == [0] * 200
    assert tokens == ("a", "b")
    again, _ = encode_texts(["b c a"], tokens)
    assert again[0, :3].tolist() == [2, 0, 1]


def test_without_a_length_it_is_that_of_the_longest_text():
    assert encode_texts(["a b c", "a", ""], length=None)[0].shape == (3, 3)
    assert encode_texts(["a " * 300], length=None)[0].shape == (1, 200)
    assert encode_texts([""], length=None)[0].shape == (1, 1)


def test_encoded_texts_get_the_ids_and_the_length_of_others():
    ids, tokens = encode_texts(["b c a", "d d"], length=None)
    known = ("a", "b", "d")
    assert torch.equal(fit_ids(ids, tokens, known, 5), encode_texts(["b c a", "d d"], known, 5)[0])
    assert torch.equal(fit_ids(ids, tokens, known, 2), encode_texts(["b c a", "d d"], known, 2)[0])
