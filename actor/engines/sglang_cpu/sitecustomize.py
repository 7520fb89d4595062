"""What SGLang needs beside a CPU build of torch, and what it can spare there.

torchvision is imported at start-up and never used here. It registers fake kernels for operators of its compiled extension;
without that extension their schemas are missing and the import fails. The schemas alone are defined here, right before.

The routed experts of a mixture are kept in host memory that SGLang pins with CUDA whatever the device is. Without a GPU
there is nothing to pin it for: buffers of the device "cpu" are plain memory.

A server is three processes, and each imports everything for itself (a dozen seconds of cpu) because CUDA does not outlive a
fork. Without it they are forks of the first one while that has a single thread, and start anew otherwise: a fork copies the
locks that other threads hold.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
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


def _plain(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any, **__: Any) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)


class _AfterHostPools(importlib.abc.MetaPathFinder):
    """Names the allocator of the device "cpu" once the module that holds them is loaded, then steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "sglang.srt.mem_cache.pool_host.common":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                module.ALLOC_MEMORY_FUNCS["cpu"] = _plain

            loader.exec_module = exec_module
        return spec


def _start(process: Any) -> Any:
    alone = len(os.listdir("/proc/self/task")) == 1
    context: Any = multiprocessing.get_context("fork" if alone else "spawn")
    return context.Process._Popen(process)


_process_type: Any = multiprocessing.Process
_process_type._Popen = staticmethod(_start)
sys.meta_path[:0] = [_BeforeTorchvision(), _AfterHostPools()]
