"""What the assistant writes, as templates of every kind say it."""

import pytest

from train.data import ChatOptions, RowReader

ASK, HELLO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
MORE, BYE = {"role": "user", "content": "é?"}, {"role": "assistant", "content": "bye 😀"}
TALK = [ASK, HELLO, MORE, BYE]
OPENING = "<start>user\nhi<end>\n<start>assistant\n"
NEXT = "\n<start>user\né?<end>\n<start>assistant\n"


@pytest.mark.parametrize("name", ["plain", "marked", "marked to its end", "always open"])
def test_answers_and_their_end_tokens_are_supervised_and_nothing_else(learnt, name):
    assert learnt(name, TALK) == [f"{OPENING}[hello<end>]{NEXT}[bye 😀<end>]"]


def test_an_end_token_that_only_the_template_knows_is_supervised(learnt):
    assert learnt("other end", TALK[:2]) == ["<start>user\nhi<over>\n<start>assistant\n[hello<over>]"]


def test_turns_behind_the_last_answer_are_left_out(learnt):
    assert learnt("plain", [*TALK[:2], MORE]) == [f"{OPENING}[hello<end>]"]
    assert learnt("marked", [*TALK[:2], MORE]) == [f"{OPENING}[hello<end>]"]


def test_a_template_that_rewrites_earlier_turns_gives_a_document_for_each_answer(learnt):
    thought = [ASK, HELLO | {"thought": "hm"}, MORE, BYE | {"thought": "so"}]
    first = f"{OPENING}[<think>hm</think>hello<end>]"
    last = f"{OPENING}hello<end>{NEXT}[<think>so</think>bye 😀<end>]"
    assert learnt("thinking", thought) == [first, last]
    assert learnt("thinking", thought, turns="last") == [last]
    assert learnt("plain", TALK, turns="last") == learnt("plain", TALK)


def test_what_thinking_off_puts_into_the_prompt_is_not_supervised(learnt):
    empty = f"{OPENING}<think></think>[hello<end>]"
    assert learnt("thinking", TALK[:2], thinking=False) == [empty]
    assert learnt("thinking", TALK[:2]) == [f"{OPENING}[<think></think>hello<end>]"]
    assert learnt("thinking", {"messages": TALK[:2], "chat_template_kwargs": {"enable_thinking": False}}) == [empty]
    (refused,) = learnt("thinking", [ASK, HELLO | {"thought": "hm"}], thinking=False)
    assert refused.startswith("here: the template renders an answer that does not begin")


def test_tool_calls_are_supervised_and_their_results_are_not(learnt):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    row = {"messages": [ASK, call, {"role": "tool", "content": "42"}, HELLO], "tools": [{"name": "f"}]}
    expected = (
        f'<start>system\n[{{"name": "f"}}]<end>\n{OPENING}[{{"name": "f"}}<end>]\n<start>tool\n42<end>\n'
        "<start>assistant\n[hello<end>]"
    )
    assert learnt("tools", row) == [expected]
    assert learnt("tools", row | {"tools": '[{"name": "f"}]'}) == [expected]


@pytest.mark.parametrize("name", ["plain", "marked", "marked to its end", "other end"])
def test_an_answer_that_was_cut_off_has_no_end_token(learnt, name):
    (text,) = learnt(name, {"messages": TALK, "finish_reason": "length"})
    assert text.endswith("[bye 😀]") and "[hello<" in text
    assert not learnt(name, {"messages": TALK, "finish_reason": "stop"})[0].endswith("[bye 😀]")


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("no system", [{"role": "system", "content": "x"}, *TALK], "refuses these messages: no system role"),
        ("upside down", TALK, "does not begin with its own generation prompt"),
        ("plain", [ASK, {"role": "assistant", "content": "a\ud800"}], "lone surrogates"),
        ("marked", [{"role": "user", "content": "\ufdd0x\ufdd1"}, HELLO], "U\\+FDD0"),
        ("no marks", [{"role": "user", "content": "n"}, {"role": "assistant", "content": "\nhi"}], "a token straddles"),
    ],
)
def test_what_cannot_be_told_is_skipped_with_the_reason(learnt, name, messages, reason):
    (text,) = learnt(name, messages)
    assert text.startswith("here: ")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(text)


def test_ids_are_those_of_the_whole_text_and_those_the_target_is_asked_with(chat):
    tokenizer = chat("plain")
    ((ids, flips),), _ = RowReader(tokenizer, 300, ChatOptions()).read([("here", {"messages": TALK})])
    assert ids.tolist() == tokenizer.tokenizer.encode(tokenizer.render(TALK, add_generation_prompt=False)[:-1]).ids
    assert ids[: flips[0]].tolist() == tokenizer.encode_chat(TALK[:1])
    assert ids[: flips[2]].tolist() == tokenizer.encode_chat(TALK[:3])
