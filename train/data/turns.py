"""What the assistant writes in a conversation, found by asking the template as serving does."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from dspark_jax.tokenizer import ChatTokenizer
from train.data.conversations import Conversation, UnusableRow


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """How conversations become documents.

    Attributes:
      thinking: `enable_thinking` of the template; None leaves it to the template.
      turns: `all` learns every answer as it is served: where a template rewrites earlier turns (Qwen3 drops their
        thinking), a conversation becomes several documents. `last` keeps the last of them only, which is fewer tokens.
    """

    thinking: bool | None = None
    turns: Literal["all", "last"] = "all"


class Turns(NamedTuple):
    """A text, and the spans of characters in it that the assistant writes, end tokens included.

    The text ends with the last of them.
    """

    text: str
    spans: list[tuple[int, int]]


def find_turns(tokenizer: ChatTokenizer, conversation: Conversation, options: ChatOptions) -> list[Turns]:
    """The texts that hold each answer once, behind just what the target is given when it is asked for that answer.

    An answer is what the template adds to its own generation prompt, up to the end token; whitespace after it is the
    template's. A text goes on while the template only appends. Templates with `{% generation %}` blocks say themselves
    what the assistant writes, in one text.

    Raises:
      UnusableRow: the template refuses the conversation, or an answer does not begin as it is asked for.
    """
    arguments = dict(conversation.options)
    if options.thinking is not None:
        arguments.setdefault("enable_thinking", options.thinking)
    try:
        if "endgeneration" in (tokenizer.template or ""):
            texts = [_marked(tokenizer, conversation, arguments)]
        else:
            texts = _asked(tokenizer, conversation, arguments)
        for turns in texts:
            turns.text.encode()
    except UnicodeEncodeError as error:
        raise UnusableRow("lone surrogates, which are no characters") from error
    except UnusableRow:
        raise
    except ValueError as error:
        raise UnusableRow(str(error)) from error
    return texts if options.turns == "all" else texts[-1:]


def _asked(tokenizer: ChatTokenizer, conversation: Conversation, arguments: dict[str, Any]) -> list[Turns]:
    texts: list[Turns] = []
    messages = conversation.messages
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.render(messages[:i], add_generation_prompt=True, **arguments)
        goes_on = bool(texts) and before.startswith(texts[-1].text)
        through = tokenizer.render(messages[: i + 1], add_generation_prompt=False, **arguments)
        if not through.startswith(before):
            raise UnusableRow(
                "the template renders an answer that does not begin with its own generation prompt; does chat.thinking "
                "fit the row?"
            )
        end = len(before) + _length(tokenizer, through[len(before) :], conversation.unfinished and i == last)
        spans = [*texts.pop().spans, (len(before), end)] if goes_on else [(len(before), end)]
        texts.append(Turns(through[:end], spans))
    return texts


def _marked(tokenizer: ChatTokenizer, conversation: Conversation, arguments: dict[str, Any]) -> Turns:
    text, marks = tokenizer.render_marked(conversation.messages, add_generation_prompt=False, **arguments)
    if not marks:
        raise UnusableRow("the template marks nothing as the assistant's")
    spans = []
    for start, end in marks:
        # The end token belongs to the answer, whether or not the mark holds it.
        if tokenizer.eos_token and text.startswith(tokenizer.eos_token, end):
            end += len(tokenizer.eos_token)
        cut = conversation.unfinished and start == marks[-1][0]
        spans.append((start, start + _length(tokenizer, text[start:end], cut)))
    return Turns(text[: spans[-1][1]], spans)


def _length(tokenizer: ChatTokenizer, answer: str, unfinished: bool) -> int:
    """Characters of an answer up to and with its end token (without, if it is unfinished)."""
    if tokenizer.eos_token and (at := answer.find(tokenizer.eos_token)) >= 0:
        return at if unfinished else at + len(tokenizer.eos_token)
    answer = answer.rstrip()
    if unfinished:
        for token in tokenizer.special_ids:
            answer = answer.removesuffix(tokenizer.tokenizer.id_to_token(token) or "")
    return len(answer)


def encode_turns(tokenizer: ChatTokenizer, texts: Sequence[Turns]) -> list[tuple[list[int], list[int]] | None]:
    """Ids of each text and where in them the mask flips: at the start of an answer, after its end, and so on.

    Every prefix of a text that ends at such a place is encoded by itself, as serving does, and must give the ids that
    the whole begins with. Where it does not, because a token straddles the place, there is None.
    """
    cuts = [sorted({at for span in turns.spans for at in span}) for turns in texts]
    prefixes = [turns.text[:at] for turns, places in zip(texts, cuts, strict=True) for at in places]
    encoded = iter(tokenizer.tokenizer.encode_batch_fast(prefixes, add_special_tokens=False))
    out = []
    for turns, places in zip(texts, cuts, strict=True):
        heads = {at: next(encoded).ids for at in places}
        ids = heads[len(turns.text)]
        straddled = any(ids[: len(head)] != head for head in heads.values())
        flips = [len(heads[at]) for span in turns.spans if span[0] < span[1] for at in span]
        out.append(None if straddled else (ids, flips))
    return out
