# SPDX-License-Identifier: Apache-2.0
"""The fsspec protocol `ckptfs`, which fsspec finds as an entry point of this package:

    torch.distributed.checkpoint.save(state_dict, checkpoint_id="ckptfs:///data/store/job/7")

and async_save and load alike.  torch asks fsspec for the protocol and then makes a
FsspecWriter or FsspecReader of the path; for paths of ours it gets a ckptfs.dcp.Writer or
ckptfs.dcp_reader.Reader instead, since a step is not a directory that files can be
written into.  Everything else that programs do with a filesystem is refused.
"""
from typing import Any

from fsspec.spec import AbstractFileSystem

from . import url


def _instead(stock: type, ours: Any) -> None:
    """Has `stock(path)` make ours() of a path of ours; torch then resets it to the path."""
    def new(cls: type, path: Any = '', *_: Any, **__: Any) -> Any:
        return ours() if url.is_url(path) else object.__new__(cls)

    stock.__new__ = staticmethod(new)  # type: ignore[assignment]


def _install() -> None:
    try:
        from .compat import fsspec_classes
    except ImportError:
        return  # without torch: FileSystem says no
    classes = fsspec_classes()
    if not classes:
        return
    from .dcp import Writer
    from .dcp_reader import Reader
    for stock, ours in zip(classes, (Writer, Reader)):
        _instead(stock, ours)


_install()


class FileSystem(AbstractFileSystem):
    """The protocol as fsspec sees it; no method of it reads or writes."""

    protocol = url.PROTOCOL
    root_marker = '/'

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            'ckptfs:// is for torch.distributed.checkpoint.save, async_save and load; to read '
            'files, mount the store (ckptfs mount --store STORE DIR)')

    _open = open = ls = info = mkdir = makedirs = mv = rename = rm = cp_file = _refuse
    rm_file = _rm = created = modified = touch = _refuse
