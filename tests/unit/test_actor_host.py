"""What may execute on a host comes from its own file alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from temper.actor.host import ActorHost, built_in_domains, domain_digests, load_host
from temper.common.errors import ConfigError


def test_the_defaults_allow_the_built_in_domains() -> None:
    assert load_host(None) == ActorHost(None, 0)
    names = built_in_domains()
    assert "temper.actor.domains.reverse" in names
    digests = domain_digests(names)
    assert digests.keys() == set(names) and all(len(digest) == 32 for digest in digests.values())


def test_a_host_file_names_what_it_allows(tmp_path: Path) -> None:
    path = tmp_path / "host.toml"
    path.write_text('[actor]\ndomains = ["a.b"]\nslots = 3\n[sandbox]\nother = 1\n')
    assert load_host(path) == ActorHost(("a.b",), 3)
    path.write_text(
        '[actor.sglang]\npython = "/x/python"\nflags = ["--tp-size", "2"]\nenvironment = { A = "1" }\ncpu = true\n'
    )
    sglang = load_host(path).sglang
    assert (sglang.python, sglang.flags, sglang.environment, sglang.cpu) == (
        "/x/python",
        ("--tp-size", "2"),
        {"A": "1"},
        True,
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[actor]\ndomain = []", "actor.domain, expected one of domains, slots"),
        ("[actor]\ndomains = 'x'", "Expected `array"),
        ("[actor]\nslots = true", "Expected `int`"),
        ("actor = 3", "expected a table"),
        ("[actor.sglang]\ncuda = true", "unknown key actor.sglang.cuda"),
        ("[actor", "not TOML"),
    ],
)
def test_a_wrong_host_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "host.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_host(path)
    with pytest.raises(ConfigError, match="No such file"):
        load_host(tmp_path / "absent.toml")


def test_an_allowed_module_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no_such_domain"):
        domain_digests(["no_such_domain"])
    with pytest.raises(ConfigError, match=r"no_such_package"):
        domain_digests(["no_such_package.x"])
