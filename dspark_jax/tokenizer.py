"""Text to ids and back, and chat templates."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dspark_jax.checkpoints.json_file import read_json
from dspark_jax.generation_marks import GenerationMarks, unmark
from dspark_jax.models.config import token_ids
from dspark_jax.models.fields import refusal


class ChatTokenizer:
    """A `tokenizers` tokenizer with its chat template and special tokens.

    Attributes:
      num_tokens: one more than the largest token id.
      special_ids: ids that have no text of their own.
      eos_ids: ids that end a turn according to the tokenizer's own files.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool = False,
    ):
        self.tokenizer = tokenizer
        self.template = template
        self.bos_token, self.eos_token, self.add_bos = bos_token, eos_token, add_bos
        self.num_tokens = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        eos = tokenizer.token_to_id(eos_token) if eos_token else None
        self.eos_ids = token_ids(eos)

    @classmethod
    def from_directory(cls, directory: str | Path) -> "ChatTokenizer":
        """Reads `tokenizer.json`, `tokenizer_config.json` and the chat template of a Hugging Face directory.

        Raises:
          FileNotFoundError: there is no tokenizer.json; ValueError: one of the files is corrupt.
        """
        directory = Path(directory)
        if not (directory / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{directory} has no tokenizer.json; expected a fast tokenizer beside the weights.")
        path = directory / "tokenizer_config.json"
        config = read_json(path) if path.is_file() else {}
        template = config.get("chat_template")
        if isinstance(template, list) and all(isinstance(entry, Mapping) for entry in template):
            template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
        if (directory / "chat_template.jinja").is_file():
            template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        if not isinstance(template, str | None):
            raise refusal(path.name, "chat_template", template, "a string, or objects with a name and a template")
        try:
            tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise ValueError(f"{directory / 'tokenizer.json'} is no tokenizer ({error}); fetch it again.") from error
        return cls(
            tokenizer,
            template=template,
            bos_token=_token(config, "bos_token"),
            eos_token=_token(config, "eos_token"),
            add_bos=bool(config.get("add_bos_token", False)),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, led by the BOS token if the model wants one; special tokens in it are recognised.

        Raises:
          ValueError: the text holds lone surrogates, which are no characters.
        """
        ids = self._encode(text, add_special_tokens=True)
        bos = self.tokenizer.token_to_id(self.bos_token) if self.add_bos and self.bos_token else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Chat text of messages ({"role", "content"}); kwargs such as `enable_thinking` go to the template.

        Raises:
          ValueError: there is no template, or it refuses these messages.
        """
        return self.render_marked(messages, add_generation_prompt=add_generation_prompt, **kwargs)[0]

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """What `render` gives, and the spans of characters that the template's `{% generation %}` blocks wrote.

        Raises:
          ValueError: as `render`.
        """
        if self.template is None:
            raise ValueError("this tokenizer has no chat template; pass plain text or token ids instead of messages.")
        try:
            marked = self._compiled.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
                **kwargs,
            )
            return unmark(marked, messages) if "endgeneration" in self.template else (marked, [])
        except Exception as error:  # a template is a program from elsewhere: it may raise anything
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def encode_chat(self, prompt: str | Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Ids of a conversation ready for the assistant's answer; a plain string is one user turn.

        Raises:
          ValueError: the template refuses the messages, or they hold lone surrogates.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self._encode(self.render(messages, **kwargs), add_special_tokens=False)

    @cached_property
    def template_names(self) -> frozenset[str]:
        """Variables, fields and strings that the template holds: what a conversation may have for it to see."""
        if self.template is None:
            return frozenset()
        tree = self._compiled.environment.parse(self.template)
        names = {node.name for node in tree.find_all(nodes.Name)} | {node.attr for node in tree.find_all(nodes.Getattr)}
        return frozenset(names | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)})

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds the lone surrogate {text[error.start]!r} at {error.start}; expected whole characters. "
                "Input that is not UTF-8 is read so: convert it."
            ) from error
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    @cached_property
    def _compiled(self) -> jinja2.Template:
        assert self.template is not None
        extensions = [loopcontrols, GenerationMarks]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.template)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _token(config: Mapping[str, Any], name: str) -> str | None:
    value = config.get(name)
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str | None):
        raise refusal("tokenizer_config.json", name, value, "a string, or an object with its content")
    return text
