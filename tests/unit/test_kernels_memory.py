"""The head's peak memory does not grow with the tokens, beyond what goes in and comes out."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from pathlib import Path
import torch
from temper.kernels.linear_logprob import linear_logprob

def status(field):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field)) * 1024

torch.set_num_threads(1)
n, h, v = int(sys.argv[1]), 64, 16384
hidden = torch.randn(n, h).requires_grad_()
weight = (torch.randn(v, h) / 8).requires_grad_()
target = torch.randint(0, v, (n,))
linear_logprob(hidden[:8], weight, target[:8], entropy="grad").logprob.sum().backward()  # libraries load, pools fill
hidden.grad = weight.grad = None
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
out = linear_logprob(hidden, weight, target, entropy="grad")
(out.logprob.sum() + out.entropy.sum()).backward()
print(status("VmHWM") - before)
"""


def peak_bytes(tokens: int) -> int:
    found = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(tokens)], capture_output=True, text=True, timeout=100, check=True
    )
    return int(found.stdout)


@pytest.mark.timeout(240)
def test_peak_from_1k_to_8k_tokens() -> None:
    outputs = (8192 - 1024) * 64 * 4  # the gradient of the hidden states; logits would be 470 MB
    grown = peak_bytes(8192) - peak_bytes(1024) - outputs
    assert grown < 8 << 20
