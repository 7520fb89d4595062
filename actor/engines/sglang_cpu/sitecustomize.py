"""Lets torchvision import beside a CPU build of torch, which SGLang needs at start-up and never uses here.

torchvision registers fake kernels for operators of its compiled extension; without that extension their schemas are
missing and the import fails. The schemas alone are defined here, when torch is first imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []  # a library's definitions live as long as it does


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Defines the schemas right before torchvision is loaded, then steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            make: Any = torch.library.Library
            _libraries.append(make("torchvision", "FRAGMENT"))
            for schema in _SCHEMAS:
                _libraries[0].define(schema)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
