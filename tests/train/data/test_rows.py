"""Rows of ids and of text: which are read, which are skipped, which are mistakes."""

import json

import pytest

from train.data import ChatOptions, RowReader, read_documents

READER = RowReader(None, 40, ChatOptions())
TALK = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


BAD = [
    "{",
    "[1]",
    '{"prompt": [1]}',
    '{"prompt": ["a"], "answer": []}',
    '{"prompt": "12", "answer": "34"}',
    '{"prompt": [1], "answer": [1.7]}',
    '{"prompt": [], "answer": []}',
    '{"prompt": [[1, 2]], "answer": [[3, 4]]}',
    '{"prompt": [1], "answer": [-5]}',
    '{"prompt": [1], "answer": [40]}',
    '{"prompt": [1099511627776], "answer": [1]}',
    '{"messages": [{"role": "assistant", "content": "x"}]}',
]


@pytest.mark.parametrize("line", BAD)
def test_a_bad_row_names_its_line(tmp_path, line):
    path = write(tmp_path / "data.jsonl", {"prompt": [1], "answer": [39]}, "", line)
    with pytest.raises(ValueError, match=r"data.jsonl:3 "):
        read_documents([path], READER)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"turns": ["hi"]}, r"a prompt without answers; answer it with python -m train\.regenerate"),
        ({"text": "hi", "id": 3}, r"its fields are \['id', 'text'\]; expected messages, conversations, or"),
        ({"messages": "hi"}, "messages is 'hi', expected a list"),
        ({"messages": [{"role": 1}]}, "a message is .*, expected an object with 'role' and 'content'"),
        ({"messages": [{"from": "gpt", "value": "x"}]}, "expected an object with 'role' and 'content'"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is 3, expected text"),
        ({"messages": [{"role": "assistant", "content": "x"}], "tools": "{"}, "here is not"),
    ],
)
def test_a_row_of_another_shape_is_a_mistake(chat, row, says):
    with pytest.raises(ValueError, match=says):
        RowReader(chat("plain"), 300, ChatOptions()).read([("here", row)])


def test_the_usual_shapes_say_the_same(learnt):
    expected = ["<start>user\nhi<end>\n<start>assistant\n[hello<end>]"]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "hello"},
    ]
    assert learnt("plain", {"messages": messages, "prompt": "hi", "source": "x"}) == expected
    assert learnt("plain", {"conversations": TALK}) == expected
    others = [TALK[0] | {"from": "user"}, TALK[1] | {"from": "assistant"}]
    assert learnt("plain", {"conversations": others}) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": [*TALK, {"from": "narrator", "value": "x"}]}, "unknown speaker 'narrator', expected one of"),
        ({"conversations": TALK[:1]}, "no assistant turn"),
        ({"messages": []}, "no assistant turn"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "a content part that is no text"),
    ],
)
def test_a_row_that_gives_nothing_to_learn_is_skipped(learnt, row, reason):
    (text,) = learnt("plain", row)
    assert text.startswith(f"here: {reason}")


def test_rows_stay_in_order_and_skipped_ones_do_not_shift_them(chat):
    tokenizer = chat("no system")
    texts = [[{"role": r, "content": c} for r, c in (("user", "u"), ("assistant", c))] for c in "abc"]
    texts[1].insert(0, {"role": "system", "content": "s"})
    rows = [{"messages": texts[0]}, {"prompt": [1], "answer": [2, 3]}, {"messages": texts[1]}, {"messages": texts[2]}]
    documents, skipped = RowReader(tokenizer, 300, ChatOptions()).read([(str(i), row) for i, row in enumerate(rows)])
    answers = [tokenizer.decode(ids[flips[0] :]) for ids, flips in documents]
    assert answers[0] == "a" and documents[1][0].tolist() == [1, 2, 3] and answers[2] == "c"
    assert [place for place, _ in skipped] == ["2"]


def test_ids_the_target_lacks_are_a_mistake_in_text_too(chat):
    with pytest.raises(ValueError, match=r"here has the ids \d+\.\.263, expected at least one, all within 0\.\.99"):
        RowReader(chat("plain"), 100, ChatOptions()).read([("here", {"conversations": TALK})])
