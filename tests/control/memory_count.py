"""Counts the memory of tensors that are made while it is on, at its highest."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryCount(TorchDispatchMode):
    """`peak` and `now` in bytes: storages that operators return and that did not exist before."""

    def __init__(self, *existing):
        super().__init__()
        self.peak = self.now = self.largest = 0
        self._known = {t.untyped_storage().data_ptr() for t in existing}
        self._storages = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage):
        key, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self.now -= size
        self._known.discard(key)
