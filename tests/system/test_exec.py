"""`temper exec`: verdicts for people and as JSON, and what bad input gets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system


def run(*arguments: str, stdin: str = "", nice: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from temper.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = ["nice", "-n", str(nice), sys.executable, "-P", "-c", code, "exec", *arguments]
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **environment},
    )


def test_tests_are_judged_one_by_one(tmp_path: Path) -> None:
    program = tmp_path / "double.py"
    program.write_text("print(int(input()) * 2)")
    tests = tmp_path / "tests.json"
    rows = [{"stdin": "2", "expected": "4", "name": "two"}, {"stdin": "3", "expected": "7"}]
    tests.write_text(json.dumps(rows))
    done = run(str(program), "--tests", str(tests), "--json", "--mode", "fork")
    verdict = json.loads(done.stdout)
    assert done.returncode == 10 and verdict["outcome"] == "wrong"
    assert [test["outcome"] for test in verdict["tests"]] == ["ok", "wrong"]
    assert {"wall_s", "cpu_s", "peak_bytes", "detail", "truncated"} <= verdict.keys()


def test_a_suite_calls_the_program(tmp_path: Path) -> None:
    program = tmp_path / "f.py"
    program.write_text("def f(x): return x + 1")
    tests = tmp_path / "tests.json"
    tests.write_text(json.dumps([{"suite": "assert f(1) == 2"}, {"suite": "assert f(1) == 2", "weak": True}]))
    done = run(str(program), "--tests", str(tests))
    assert done.returncode == 0 and done.stdout.startswith("ok"), done


@pytest.mark.parametrize("mode", ["fresh", "fork"])
def test_a_program_is_as_nice_as_its_worker(mode: str) -> None:
    nice = os.nice(0)
    done = run("-", "--language", "python", "--mode", mode, "--json", stdin="import os; print(os.nice(0))", nice=5)
    verdict = json.loads(done.stdout)
    assert verdict["outcome"] == "ok" and verdict["stdout"] == f"{min(nice + 5, 19)}\n", verdict


def test_limits_stdin_and_hostile_output(tmp_path: Path) -> None:
    given = tmp_path / "in"
    given.write_text("x\n")
    done = run("-", "--language", "python", "--stdin", str(given), stdin=r"print(input(), '\x1b[31m\0')")
    assert done.returncode == 0 and "x \\x1b[31m\\x00" in done.stdout
    done = run("-", "--language", "python", "--cpu-s", "0.3", stdin="while True: pass")
    assert done.returncode == 10 and done.stdout.startswith("timeout (more than 0.3 s of cpu time)")


@pytest.mark.parametrize(
    ("name", "source", "arguments", "words"),
    [
        ("a.py", "x = bytearray(100 << 20); print(len(x))", ["--memory-mb", "64"], '"outcome": "memory"'),
        ("a.py", "print(bytearray(100 << 20)[0])", ["--memory-mb", "200", "--mode", "pool"], '"outcome": "ok"'),
        ("a.c", "int main(){return 1 +;}", [], '"outcome": "compile"'),
        ("a.cpp", "#include <iostream>\nint main(){std::cout << 6 * 7;}", [], '"stdout": "42"'),
        ("a.sh", "yes", ["--output-kb", "1"], '"truncated": true'),
        ("a.js", "console.log(6 * 7)", ["--memory-mb", "512"], '"stdout": "42\\n"'),
        ("a.py", "import time; time.sleep(9)", ["--wall-s", "0.3"], "wall time"),
        ("a.py", "import os; print(os.environ['TEMPER_SEED'])", ["--seed", "5", "--mode", "fork"], '"stdout": "5\\n"'),
    ],
)
def test_every_option_does_what_it_says(
    tmp_path: Path, name: str, source: str, arguments: list[str], words: str
) -> None:
    program = tmp_path / name
    program.write_text(source)
    tool = {".c": "gcc", ".cpp": "g++", ".js": "node"}.get(program.suffix)
    if tool and shutil.which(tool) is None:
        pytest.skip(f"no {tool} on this host")
    done = run(str(program), "--json", *arguments)
    assert done.returncode in (0, 10) and words in done.stdout, done
    assert (done.returncode == 0) == ('"outcome": "ok"' in done.stdout)


def test_the_hosts_own_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("shared")
    tmp_path.chmod(0o755)
    host = tmp_path / "host.toml"
    host.write_text(f'[sandbox.binds]\n"{tmp_path}/data" = "/data"\n')
    done = run("-", "--language", "python", "--host", str(host), stdin="print(open('/data/x').read())")
    assert done.returncode == 0 and "shared" in done.stdout, done


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["/no/such/file.py"], 2, "cannot read /no/such/file.py"),
        (["/etc/passwd"], 2, "--language is needed: one of bash, c"),
        (["-", "--language", "cobol"], 2, "--language cobol: one of"),
        (["-", "--language", "python", "--tests", "/etc/passwd"], 2, "is not JSON"),
        (["-", "--language", "python", "--memory-mb", "1"], 2, "memory_bytes"),
    ],
)
def test_bad_input_gets_one_message(arguments: list[str], code: int, words: str) -> None:
    done = run(*arguments)
    assert done.returncode == code and words in done.stderr, done
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr


def test_without_nsjail_it_exits_4() -> None:
    done = run("-", "--language", "python", TEMPER_NSJAIL="/no/such/nsjail")
    assert done.returncode == 4 and "TEMPER_NSJAIL is /no/such/nsjail" in done.stderr
