"""Out of memory on demand: the allocation of a given number fails, and those of a failed job can be looked for."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class FailingAllocation(TorchDispatchMode):
    """Context manager: allocation number `fails_at` (1 is the first) of new tensor memory raises OutOfMemoryError.

    persists: all later ones, too. times: in how many attempts of the job, if it begins with that allocation.
    """

    def __init__(self, fails_at: int = 0, *, persists: bool = False, times: int = 1) -> None:
        super().__init__()
        self.allocations = 0
        self._fails_at = fails_at
        self._persists = persists
        self._last = fails_at + times - 1
        self._storages: list[StorageWeakRef] = []

    @property
    def has_fired(self) -> bool:
        return 0 < self._fails_at <= self.allocations

    def alive(self, but: Sequence[torch.Tensor]) -> int:
        """How many of the storages that were allocated are still referred to, without those of `but`."""
        ours = {tensor.untyped_storage()._cdata for tensor in but}
        return sum(not storage.expired() and storage.cdata not in ours for storage in self._storages)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # A result without alias is new memory; views and what changes in place have one. The update of bitsandbytes
        # allocates in between its changes, out of this mode's sight.
        allocates_inside = func.namespace == "bitsandbytes"
        allocates = any(result.alias_info is None and "Tensor" in str(result.type) for result in func._schema.returns)
        result = func(*args, **kwargs or {}) if allocates_inside else None
        if allocates or allocates_inside:
            self.allocations += 1
            if self._fails_at <= self.allocations <= self._last or (self._persists and self.has_fired):
                raise torch.OutOfMemoryError(f"injected at {func}")
        if not allocates_inside:
            result = func(*args, **kwargs or {})
        if allocates:
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self._storages.append(StorageWeakRef(tensor.untyped_storage()))
        return result


class FaultyJobs:
    """A DeviceOptions.fault of several workers: `next_job` holds for the job that begins next on any device thread."""

    def __init__(self) -> None:
        self.next_job: FailingAllocation | None = None
        self._active: dict[int, FailingAllocation] = {}  # by thread: each has its own stack of modes

    def __call__(self, point: str) -> None:
        thread = threading.get_ident()
        if thread in self._active:
            self._active.pop(thread).__exit__(None, None, None)
        if self.next_job is not None:
            self._active[thread], self.next_job = self.next_job, None
            self._active[thread].__enter__()
