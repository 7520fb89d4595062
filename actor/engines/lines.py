"""Where lines begin and end in sampled tokens: how a function's body ends at its first line in column 0, token by token.

Such a line is no single token, so that a stop token cannot say it; a table of every token's text can. Pure; the table is
made by `text`, asked by `rows` after each step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenLines:
    """bool[V] by token id: `opens`: its text begins with something else than white space; `ends`: its last character is a
    newline; `inner`: a line in column 0 begins inside of it; `empty`: it has no text."""

    opens: Tensor
    ends: Tensor
    inner: Tensor
    empty: Tensor

    @classmethod
    def of(cls, texts: Sequence[str]) -> TokenLines:
        """The table of a vocabulary's texts in the order of their ids."""
        return cls(
            torch.tensor([bool(text[:1].strip()) for text in texts]),
            torch.tensor([text.endswith("\n") for text in texts]),
            torch.tensor([re.search(r"\n\S", text) is not None for text in texts]),
            torch.tensor([not text for text in texts]),
        )

    def begins(self, at_start: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(bool[N] whether a line in column 0 begins with or in `tokens` i64[N], bool[N] whether what follows is at the
        start of a line); `at_start` bool[N] says the latter of the tokens themselves."""
        begun = (at_start & self.opens[tokens]) | self.inner[tokens]
        return begun, self.ends[tokens] | (self.empty[tokens] & at_start)
