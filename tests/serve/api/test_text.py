"""Text of answers: stop strings and multi-byte characters, however tokens and steps cut them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from dspark_jax.tokenizer import ChatTokenizer
from serve.api.logprobs import TokenTexts, chat_logprobs, completion_logprobs
from serve.api.text import AnswerText, StopStrings
from serve.engine.request import Output, Usage
from tests.serve.api.conftest import END, logprob

texts = st.text("abc", max_size=12)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def first_stop(text, stops):
    """(start, end) of the match that ends first, the longer of two; None."""
    found = [(end, end - len(s)) for end in range(len(text) + 1) for s in stops if text[:end].endswith(s)]
    return min(found)[::-1] if found else None


@given(texts, stop_lists, st.lists(st.integers(1, 4), min_size=1, max_size=4))
@example("abca", ["bc", "abca"], [4])
def test_stop_that_ends_first_ends_the_text_and_no_part_of_it_is_shown(text, stops, sizes):
    finder, shown, at, i = StopStrings(stops), "", 0, 0
    match = first_stop(text, stops)
    while at < len(text) and not finder.found:
        size = sizes[i % len(sizes)]
        shown += finder.add(text[at : at + size])
        at, i = at + size, i + 1
        if not finder.found:
            # Held back is just what could begin a stop string.
            seen = text[:at]
            held = max((k for s in stops for k in range(len(s)) if seen.endswith(s[:k])), default=0)
            assert shown == seen[: len(seen) - held] and finder.held == seen[len(seen) - held :]
    if match is None:
        assert not finder.found and shown + finder.finish() == text
    else:
        assert finder.found and shown == text[: match[0]] and finder.finish() == ""


def run(tokenizer, tokens, sizes, stops=(), min_tokens=0, reason="length"):
    """Pieces of an answer whose tokens come in blocks of these sizes, and the answer."""
    answer, pieces, at, i = AnswerText(tokenizer, stops, min_tokens), [], 0, 0
    while answer.finish_reason is None:
        block = tokens[at : at + sizes[i % len(sizes)]]
        at, i = at + len(block), i + 1
        end = reason if at >= len(tokens) else None
        pieces.append(answer.add(Output(block, Usage(1), [logprob(t, 2) for t in block], end)))
    return pieces, answer


@given(st.text("ab€😀é ", max_size=10), st.lists(st.text("ab€😀 ", min_size=1, max_size=3), max_size=2),
       st.lists(st.integers(1, 7), min_size=1, max_size=3))  # fmt: skip
def test_text_tokens_and_logprobs_agree(tokenizer, text, stops, sizes):
    tokens = tokenizer.encode(text) or [END]
    pieces, answer = run(tokenizer, tokens, sizes, stops)
    match = first_stop(text, stops)
    assert "".join(p.text for p in pieces) == (text if match is None else text[: match[0]])
    assert answer.finish_reason == ("length" if match is None else "stop")
    known = [len(tokenizer.decode(tokens[: i + 1]).rstrip("\ufffd")) for i in range(len(tokens))]
    count = len(tokens) if match is None else next(i + 1 for i, n in enumerate(known) if n >= match[1])
    entries = [entry for p in pieces for entry in p.logprobs]
    assert answer.tokens == count and [e.token for e, _ in entries] == tokens[:count]
    assert [offset for _, offset in entries] == [0, *known][:count]
    # What a chunk's entries tell is shown with it, unless the answer has ended.
    shown, told = "", b""
    texts = TokenTexts(tokenizer)
    for piece in pieces:
        shown += piece.text
        told += b"".join(bytes(texts(e.token)[1] or ()) for e, _ in piece.logprobs)
        if piece is not pieces[-1]:
            assert shown.startswith(told.decode(errors="ignore"))
    assert told.decode(errors="ignore").startswith(shown)


def test_unfinished_tail_is_one_replacement_character(tokenizer):
    pieces, _ = run(tokenizer, tokenizer.encode("é😀")[:-1], [1])
    assert "".join(p.text for p in pieces) == "é\ufffd"


def test_stop_id_counts_but_has_no_text(tokenizer):
    a = tokenizer.encode("a")[0]
    pieces, answer = run(tokenizer, [a, a], [2], reason="stop")
    assert "".join(p.text for p in pieces) == "a" and answer.tokens == len(pieces[0].logprobs) == 2


@pytest.mark.parametrize(
    ("stops", "text", "count", "reason"),
    [
        (["b"], "aba", 4, "stop"),
        (["ba"], "ababc", 5, "length"),
        (["bab"], "a", 4, "stop"),
        (["ba", "bac"], "ababc", 5, "length"),
    ],
)
@pytest.mark.parametrize("size", [1, 5])
def test_stop_strings_within_min_tokens_do_not_end_the_answer(tokenizer, stops, text, count, reason, size):
    tokens = [tokenizer.encode(x)[0] for x in "ababc"]
    pieces, answer = run(tokenizer, tokens, [size], stops, min_tokens=3)
    assert ("".join(p.text for p in pieces), answer.tokens, answer.finish_reason) == (text, count, reason)


def test_stop_wins_within_the_cap_and_the_cap_without_it(tokenizer):
    tokens = tokenizer.encode("xyz")
    for stop, reason, text in (("z", "stop", "xy"), ("za", "length", "xyz")):
        pieces, answer = run(tokenizer, tokens, [3], [stop])
        assert (answer.finish_reason, "".join(p.text for p in pieces), answer.tokens) == (reason, text, 3)


def test_bytes_of_tokenizers_that_fall_back_to_them():
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁a", "<0x>"]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = TokenTexts(ChatTokenizer(tokenizer))
    assert [texts(i) for i in (1 + 0x41, 1 + 0xE2, 257, 258)] == [
        ("A", [0x41]), ("bytes:\\xe2", [0xE2]), (" a", [32, 97]), ("<0x>", list(b"<0x>"))]  # fmt: skip


def test_forms_of_logprobs(tokenizer):
    half, rest = tokenizer.encode("😀")[:2]
    entries = [(logprob(half, 5), 0), (logprob(END, 0), 1)]
    texts = TokenTexts(tokenizer)
    chat = chat_logprobs(entries, texts)["content"]
    assert chat[0]["token"] == "bytes:\\xf0\\x9f" and chat[0]["bytes"] == [0xF0, 0x9F]
    assert chat[1]["token"] == "<eos>" and chat[1]["bytes"] is None and chat[1]["top_logprobs"] == []
    assert [t["logprob"] for t in chat[0]["top_logprobs"]] == [-0.5, -1.5, -2.5, -9999.0, -9999.0]
    form = completion_logprobs(entries, texts)
    assert form["tokens"] == ["bytes:\\xf0\\x9f", "<eos>"] and form["text_offset"] == [0, 1]
    assert form["token_logprobs"] == [-0.5, -0.5] and form["top_logprobs"][1] == {"<eos>": -0.5}
    assert texts(rest)[1] == [0x98]
