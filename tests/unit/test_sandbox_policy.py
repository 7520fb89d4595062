"""The jail's policy file as text: what a host's kernel alone can't show."""

from __future__ import annotations

import re

from temper.sandbox.jail import POLICY

TEXT = re.sub(r"#.*", "", POLICY.read_text())
RULES = " ".join(re.findall(r'seccomp_string: "(.*)"', TEXT))
X32 = 0x4000_0000
LATEST_CALL = 470  # of Linux 6.18 on x86-64; x32 has its own up to 547


def test_every_x32_call_is_refused() -> None:
    """Kernels with x32 take each call by a second number, which a deny-list by name does not meet. This host's may not."""
    listed = {int(number, 16) - X32 for number in re.findall(r"SYSCALL\[(0x4[0-9a-f]{7})\]", RULES)}
    assert listed == set(range(608)) and max(listed) > max(LATEST_CALL, 547)


def test_no_comparison_with_a_constant_can_be_passed_by_a_high_bit() -> None:
    """The kernel looks at 32 bits of these arguments, the filter at 64: `x == 0x5412` is passed by 0x100005412."""
    for name, conditions in re.findall(r"(\w+)\([\w, ]+\) \{([^}]*)\}", RULES):
        for condition in conditions.split("||"):
            if "==" in condition:
                assert "& 0xffffffff) ==" in condition, f"{name}: {condition}"


def test_every_forbidden_call_is_forbidden_once() -> None:
    plain = re.sub(r"\([^)]*\) \{[^}]*\}", "", RULES)
    names = re.findall(r"[a-z_0-9]{3,}|SYSCALL\[\w+\]", plain.split("{", 1)[1])
    names = [name for name in names if name not in ("temper",)]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


def test_rlimits_have_their_type_and_time_has_one_owner() -> None:
    for name in re.findall(r"^rlimit_(\w+): \d+", TEXT, re.M):
        assert f"rlimit_{name}_type: VALUE" in TEXT, name
    assert "time_limit: 0" in TEXT
