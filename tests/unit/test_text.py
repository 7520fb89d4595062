"""Text to ids and back, from bundle files alone."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from temper.actor.bundle import unpack_bundle
from temper.actor.text import Text
from temper.common.errors import ConfigError, ProtocolError
from temper.common.model_files import end_ids
from temper.common.schema import Bundle, BundleFile
from temper.learner.models import character_tokenizer


def files(**extra: Any) -> dict[str, bytes]:
    made = {"tokenizer.json": character_tokenizer(list("abc>\n ")), "config.json": {"eos_token_id": 0}} | extra
    return {name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in made.items()}


def test_ids_and_back_without_special_tokens() -> None:
    text = Text(files())
    ids = text.encode("abc>")
    assert ids == [1, 2, 3, 4] == text.prompt_ids("abc>")
    assert text.decode([*ids, 0]) == "abc>"


def test_a_prompt_with_characters_that_the_tokenizer_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not know some character of the prompt 'abX'"):
        Text(files()).prompt_ids("abX")


def test_end_ids_prefer_the_generation_config() -> None:
    assert end_ids(files()) == (0,)
    assert end_ids(files(**{"generation_config.json": {"eos_token_id": [2, 1]}})) == (2, 1)
    with pytest.raises(ConfigError, match="eos_token_id"):
        end_ids(files(**{"config.json": {}}))
    for wrong in ("2", [2, None], [], True, 1.5):
        with pytest.raises(ConfigError, match="eos_token_id"):
            end_ids(files(**{"config.json": {"eos_token_id": wrong}}))


def test_stop_ids_are_single_tokens() -> None:
    text = Text(files())
    assert text.stop_ids(["\n", ">"]) == (0, 5, 4)
    with pytest.raises(ConfigError, match="2 tokens"):
        text.stop_ids(["ab"])


def test_chat_template_from_either_file() -> None:
    template = "{% for m in messages %}{{ m['role'][0] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}a>{% endif %}"
    settings = {"chat_template": template, "eos_token": {"content": "\n"}}
    messages = [{"role": "b", "content": "ab"}]
    text = Text(files(**{"tokenizer_config.json": settings}))
    assert text.render(messages) == "b>ab\na>"
    assert text.prompt_ids(messages) == text.encode("b>ab\na>")
    other = Text(files(**{"tokenizer_config.json": settings, "chat_template.jinja": b"only {{ messages|length }}"}))
    assert other.render(messages) == "only 1"


def test_a_chat_prompt_without_template_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Text(files()).prompt_ids([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "template",
    [
        b"{{ messages.__class__.__mro__[1].__subclasses__() }}",
        b"{{ ''.__class__.__base__ }}",
        b"{{ raise_exception('no system role') }}",
        b"{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_a_hostile_template_is_refused(template: bytes) -> None:
    text = Text(files(**{"chat_template.jinja": template}))
    with pytest.raises(ConfigError, match="refuses these messages"):
        text.render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"tokenizer.json": b"{}"}, "tokenizer.json"),
        ({"config.json": b"[1]"}, "expected an object"),
        ({"config.json": b"{"}, "not JSON"),
        ({"chat_template.jinja": b"{% if %}"}, "can't be compiled"),
        ({"chat_template.jinja": b"x" * 300_000}, "at most"),
    ],
)
def test_unusable_files_are_named(extra: dict[str, bytes], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Text(files(**extra))


def test_a_bundle_is_checked_against_its_table() -> None:
    data = b"{}"
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    good = Bundle([BundleFile("config.json", digest, 1)])
    assert unpack_bundle(good, [memoryview(data)]) == {"config.json": data}
    for bad, frames, named in (
        (Bundle([BundleFile("config.json", "0" * 32, 1)]), [memoryview(data)], "digest"),
        (Bundle([BundleFile("modeling.py", digest, 1)]), [memoryview(data)], "modeling.py"),
        (good, [memoryview(data)] * 2, "2 frames"),
        (Bundle([BundleFile("config.json", digest, -1)]), [], "digest"),
    ):
        with pytest.raises(ProtocolError, match=named):
            unpack_bundle(bad, frames)
