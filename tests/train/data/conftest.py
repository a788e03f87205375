"""A byte-level tokenizer, and templates of the kinds there are."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dspark_jax.tokenizer import ChatTokenizer
from train.data import ChatOptions, RowReader

MARKER = "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
TURN = "<start>{{ m.role }}\n{{ m.content }}<end>\n"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}" + MARKER
TEMPLATES = {
    "plain": PLAIN,
    "no system": "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system role') }}{% endfor %}"
    + PLAIN,
    # The last turn thinks, earlier ones are rewritten without; thinking off is an empty thought in the prompt.
    "thinking": (
        "{% for m in messages %}<start>{{ m.role }}\n{% set c = m.content.split('</think>')[-1] %}"
        "{% if m.role == 'assistant' and loop.last %}<think>{{ m.thought or '' }}</think>{% endif %}{{ c }}<end>\n"
        "{% endfor %}"
        + MARKER
        + "{% if add_generation_prompt and enable_thinking is false %}<think></think>{% endif %}"
    ),
    "tools": (
        "{% if tools %}<start>system\n{{ tools | tojson }}<end>\n{% endif %}"
        "{% for m in messages %}<start>{{ m.role }}\n"
        "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<end>\n{% endfor %}"
        + MARKER
    ),
    "marked": (
        "{% for m in messages %}<start>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}<end>\n{% else %}{{ m.content }}<end>\n{% endif %}{% endfor %}" + MARKER
    ),
    "marked to its end": (
        "{% for m in messages %}<start>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<end>\n{% endgeneration %}"
        "{% else %}{{ m.content }}<end>\n{% endif %}{% endfor %}" + MARKER
    ),
    # Writes its generation prompt whether it is asked to or not.
    "always open": "{% for m in messages %}" + TURN + "{% endfor %}<start>assistant{{ '\n' }}",
    # Ends a turn with a token that the tokenizer does not name as its end.
    "other end": PLAIN.replace("<end>", "<over>"),
    # No token parts the prompt from the answer.
    "no marks": "{% for m in messages %}{{ m.content }}\n{% endfor %}",
    "upside down": "{% for m in messages | reverse %}" + TURN + "{% endfor %}" + MARKER,
}


@pytest.fixture(scope="session")
def chat() -> Callable[..., ChatTokenizer]:
    """chat(name of a template): 256 bytes, some merges and five special tokens, of which <end> ends a turn."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ċ", "Ċ"), ("Ã", "©"), ("n", "Ċ")]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<start>", "<end>", "<over>", "<think>", "</think>"])
    return lambda name: ChatTokenizer(tokenizer, template=TEMPLATES[name], eos_token="<end>")


@pytest.fixture(scope="session")
def learnt(chat) -> Callable[..., list[str]]:
    """learnt(template, messages or row, **options): the text of each document, what is supervised in [brackets].

    Roles are written by their first letters: "us" is a user's turn.
    """

    def learnt(name, row, **options):
        tokenizer = chat(name)
        row = row if isinstance(row, dict) else {"messages": row}
        documents, skipped = RowReader(tokenizer, tokenizer.num_tokens, ChatOptions(**options)).read([("here", row)])
        if skipped:
            return [f"{place}: {reason}" for place, reason in skipped]
        texts = []
        for ids, flips in documents:
            places = [0, *flips, len(ids)]
            parts = [tokenizer.decode(ids[a:b], skip_special_tokens=False) for a, b in pairwise(places)]
            texts.append("".join(f"[{part}]" if i % 2 else part for i, part in enumerate(parts)))
        return texts

    return learnt
