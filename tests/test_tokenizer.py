"""Text to ids and back, chat templates, and text from a stream of tokens."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from dspark_jax.detokenize import Detokenizer
from dspark_jax.tokenizer import ChatTokenizer

TEXT = 'naïve 😀 "€" \ufffd 日本\n'
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}"
)


def byte_level(*merges: tuple[str, str]) -> Tokenizer:
    """A byte-level BPE: 256 bytes, then one token a merge, then two special tokens and one that has text."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    # "Ã" + "¯" is ï whole; "ð" + "Ł" is half an emoji.
    tokenizer = byte_level(("Ã", "¯"), ("ð", "Ł"), ("a", "Ã"))
    return ChatTokenizer(tokenizer, template=TEMPLATE, bos_token="<bos>", eos_token="<eos>")


def test_ids_decode_to_the_text(chat):
    ids = chat.encode(TEXT)
    assert chat.decode(ids) == TEXT
    assert max(ids) < chat.num_tokens == 262
    assert chat.eos_ids == (260,) and chat.special_ids == {259, 260}


def test_template_renders_and_its_text_is_encoded_as_it_stands(chat):
    messages = [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "ja"}]
    assert chat.render(messages) == "<bos><user>hé<eos><assistant>ja<eos><assistant>"
    assert chat.render(messages[:1], add_generation_prompt=False, tools=[{"é": 1}]) == '<bos><user>hé<eos>[{"é": 1}]'
    assert chat.encode_chat("hé") == chat.encode_chat(messages[:1])
    assert chat.decode(chat.encode_chat("hé"), skip_special_tokens=False) == "<bos><user>hé<eos><assistant>"


@pytest.mark.parametrize("source", ["config", "processor"])
def test_plain_text_gets_one_bos_and_a_rendered_chat_none_beyond_its_template(source):
    tokenizer = byte_level()
    if source == "processor":
        bos = tokenizer.token_to_id("<bos>")
        tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", bos)])
    template = "{{ messages[0].content }}"
    chat = ChatTokenizer(tokenizer, template=template, bos_token="<bos>", add_bos=source == "config")
    assert chat.decode(chat.encode("a"), skip_special_tokens=False) == "<bos>a"
    assert chat.decode(chat.encode_chat("a"), skip_special_tokens=False) == "a"
    if source == "config":
        assert chat.encode("<bos>a") == chat.encode("a")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (TEMPLATE, "unknown role system"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/hostname' %}", "no loader"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
)
def test_template_that_fails_or_reaches_out_is_a_value_error(chat, template, says):
    other = ChatTokenizer(chat.tokenizer, template=template)
    with pytest.raises(ValueError, match=r"the chat template refuses these messages.*" + says):
        other.render([{"role": "system", "content": "x"}])


def test_lone_surrogates_are_refused(chat):
    for encode in (chat.encode, chat.encode_chat):
        with pytest.raises(ValueError, match=r"the lone surrogate '\\ud800' at \d+; expected whole characters"):
            encode("a\ud800b")


def test_messages_without_a_template_are_refused(chat):
    with pytest.raises(ValueError, match="no chat template"):
        ChatTokenizer(chat.tokenizer).render([])


MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{% set x = m.content %}"
    "{{ x | upper }}{{ loop.index }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def test_generation_blocks_are_rendered_and_known(chat):
    marked = ChatTokenizer(chat.tokenizer, template=MARKED)
    messages = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "hé"), ("user", "b"))]
    text, spans = marked.render_marked([*messages, messages[1]])
    assert text == marked.render([*messages, messages[1]]) == "<user>a<assistant>HÉ2<user>b<assistant>HÉ4"
    assert [text[a:b] for a, b in spans] == ["HÉ2", "HÉ4"]
    assert marked.render_marked(messages[:1]) == ("<user>a", [])
    assert chat.render_marked(messages) == (chat.render(messages), [])


@pytest.mark.parametrize("content", ["\ufdd0", "\ufdd1", "\ufdd0a\ufdd1"])
def test_messages_cannot_mark_themselves(chat, content):
    for role in ("user", "assistant"):
        with pytest.raises(ValueError, match=r"refuses these messages: the messages hold U\+FDD0"):
            ChatTokenizer(chat.tokenizer, template=MARKED).render([{"role": role, "content": content}])
    assert content in chat.render([{"role": "user", "content": content}])


def test_blocks_inside_one_another_are_refused(chat):
    nested = "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"
    with pytest.raises(ValueError, match="stand inside one another"):
        ChatTokenizer(chat.tokenizer, template=nested).render([])


def test_directory_gives_tokenizer_template_and_special_tokens(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        ChatTokenizer.from_directory(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    bare = ChatTokenizer.from_directory(tmp_path)
    assert bare.template is None and bare.eos_ids == ()
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    config = {"chat_template": named, "eos_token": {"content": "<eos>"}, "bos_token": "<bos>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    chat = ChatTokenizer.from_directory(tmp_path)
    assert (chat.template, chat.eos_ids, chat.bos_token, chat.add_bos) == ("D", (257,), "<bos>", True)
    (tmp_path / "chat_template.jinja").write_text("J")
    assert ChatTokenizer.from_directory(tmp_path).template == "J"
    (tmp_path / "chat_template.jinja").unlink()
    for wrong in ({"eos_token": 5}, {"bos_token": {"content": 5}}, {"chat_template": {}}, {"chat_template": ["D"]}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {next(iter(wrong))} is .*, expected a string"):
            ChatTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text('{"cut": ')
        with pytest.raises(ValueError, match=f"{name} is no"):
            ChatTokenizer.from_directory(tmp_path)


def pieces(chat, ids, sizes=(1,), skip=()):
    """The text of ids added in groups of the given sizes, in turn, and the rest."""
    stream, out, start = Detokenizer(chat, skip), [], 0
    while start < len(ids):
        size = sizes[len(out) % len(sizes)]
        out.append(stream.add(ids[start : start + size]))
        start += size
    return out, stream.finish()


tokens = st.integers(0, 261)


@given(st.lists(tokens | st.sampled_from([250, 251, 257, 258]), max_size=90), st.lists(st.integers(1, 7), min_size=1))
def test_joined_pieces_are_the_whole_decoding_of_any_tokens(chat, ids, sizes):
    out, rest = pieces(chat, ids, sizes)
    assert "".join(out) + rest == chat.decode(ids)


@given(st.text(max_size=40), st.integers(1, 5))
@example("\ufffd" * 30 + "€", 1)
@example("\ufffd\ufffd\ufffd€", 1)
@example("é" * 60, 3)
def test_joined_pieces_are_the_text_without_made_up_replacement_characters(chat, text, size):
    out, rest = pieces(chat, chat.encode(text), [size])
    assert "".join(out) + rest == text
    assert rest in ("", "\ufffd") and (not rest or text.endswith(rest))


def test_special_tokens_do_not_part_the_bytes_of_a_character(chat):
    first, *others = chat.encode("€")
    ids = [first, *[259] * 40, *others]
    assert "".join(pieces(chat, ids)[0]) == chat.decode(ids) == "€"


def test_text_is_emitted_as_soon_as_it_is_final(chat):
    ids = chat.encode("a€b")
    assert pieces(chat, ids) == (["a", "", "", "€", "b"], "")
    assert pieces(chat, ids[:3]) == (["a", "", ""], "\ufffd")
    a, think, eos = chat.encode("a<think><eos>")
    assert pieces(chat, [a, think, eos, a], skip=[a]) == (["", "<think>", "", ""], "")


def test_cost_of_a_token_does_not_grow_with_the_text(chat):
    longest = []
    decode = chat.tokenizer.decode

    class Counting:
        special_ids = chat.special_ids

        def decode(self, ids):
            longest.append(len(ids))
            return decode(ids)

    Detokenizer(Counting()).add(chat.encode("\ufffd" * 100 + "x" * 300))
    assert max(longest) <= 64


@given(st.text(st.sampled_from("ab 😀é€"), max_size=60), st.integers(1, 5))
def test_tokenizers_that_fall_back_to_bytes_stream_the_same_text(text, size):
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "a", "b", "▁"]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fallback = ChatTokenizer(tokenizer)
    out, rest = pieces(fallback, fallback.encode(text), [size])
    assert "".join(out) + rest == text
