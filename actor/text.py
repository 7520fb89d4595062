"""Text to ids and back, from the model bundle's own files: tokenizer, chat template, end-of-sequence ids.

Ids that an engine sampled are never re-encoded; only prompts, tool texts and demonstrations are encoded here. The chat
template comes from an untrusted file and runs in jinja's immutable sandbox, bounded in size. Called by `episodes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from temper.actor.engines.lines import TokenLines
from temper.common.errors import ConfigError
from temper.common.model_files import end_ids, object_in
from tokenizers import Tokenizer

TEMPLATE_LIMIT_BYTES = 256 * 1024


class Text:
    """One model's tokenizer and template."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files`: the bundle by file name; tokenizer.json and config.json are needed. ConfigError if one is unusable."""
        for name in ("tokenizer.json", "config.json"):
            if name not in files:
                raise ConfigError(f"the model bundle has no {name}; it holds {', '.join(sorted(files)) or 'nothing'}")
        try:
            self._tokenizer = Tokenizer.from_str(bytes(files["tokenizer.json"]).decode())
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ConfigError(f"tokenizer.json of the bundle can't be loaded: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._unknown_token = str(getattr(self._tokenizer.model, "unk_token", None) or "")
        self._unknown: int | None = self._tokenizer.token_to_id(self._unknown_token) if self._unknown_token else None
        self._settings = object_in(files, "tokenizer_config.json")
        self.eos_ids = end_ids(files)
        self._template = self._compile(files)
        self._ids = max(int(object_in(files, "config.json").get("vocab_size") or 0), self._tokenizer.get_vocab_size())
        self._lines: TokenLines | None = None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of `text`; `special` adds what the tokenizer puts around a whole document (usually a bos)."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def prompt_ids(self, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a task's prompt: raw text as a document's beginning, messages through the chat template. ConfigError if
        the tokenizer has no token for a part of it."""
        text = prompt if isinstance(prompt, str) else self.render(prompt)
        ids = self.encode(text, special=isinstance(prompt, str))
        if self._unknown in ids and self._unknown_token not in text:
            raise ConfigError(
                f"the model's tokenizer does not know some character of the prompt {text[:60]!r}: the domain needs another "
                "model, or the model a recipe with other domains"
            )
        return ids

    def render(self, messages: Sequence[Mapping[str, str]], *, generation_prompt: bool = True) -> str:
        """Messages as the model's chat text, up to where the assistant answers. ConfigError without a template."""
        if self._template is None:
            raise ConfigError("a chat prompt, but the model has no chat template: use a raw text prompt")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=generation_prompt,
                bos_token=_token(self._settings.get("bos_token")),
                eos_token=_token(self._settings.get("eos_token")),
            )
        except Exception as error:  # a template can raise anything
            raise ConfigError(f"the model's chat template refuses these messages: {error}") from error

    def stop_ids(self, stop: Sequence[str]) -> tuple[int, ...]:
        """The eos ids and the single token of each stop string. ConfigError if one is not a single token."""
        found = list(self.eos_ids)
        for text in stop:
            ids = self.encode(text)
            if len(ids) != 1:
                raise ConfigError(f"sampling.stop {text!r} is {len(ids)} tokens of this model, expected a single one")
            found += [ids[0]] if ids[0] not in found else []
        return tuple(found)

    def lines(self) -> TokenLines:
        """Where the lines of every token's text begin and end; made when first asked for.

        A token's text is what it adds behind another one: alone, some tokenizers' tokens lose their leading space.
        """
        if self._lines is None:
            anchor = self.encode("a")[-1:]
            begin = len(self.decode(anchor))
            texts = self._tokenizer.decode_batch([[*anchor, token] for token in range(self._ids)])
            self._lines = TokenLines.of([text[begin:] for text in texts])
        return self._lines

    def _compile(self, files: Mapping[str, bytes]) -> jinja2.Template | None:
        if "chat_template.jinja" in files:
            source: Any = bytes(files["chat_template.jinja"]).decode()
        else:
            source = self._settings.get("chat_template")
        if isinstance(source, list):
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        if not source:
            return None
        if len(source) > TEMPLATE_LIMIT_BYTES:
            raise ConfigError(f"chat template of {len(source)} characters, at most {TEMPLATE_LIMIT_BYTES}")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template can't be compiled: {error}") from error


def _token(value: Any) -> str:
    """A special token as config files write it: a string, or an object with its content."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
