# SPDX-License-Identifier: Apache-2.0
"""Classes that no reader of ours knows: they must come back as they were."""
import enum

import torch


class Stage(enum.IntEnum):
    ONE = 1
    TWO = 2


class Colour(enum.Enum):
    RED = "red"


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __eq__(self, other):
        return (self.a, self.b) == (other.a, other.b)


class Outer:
    class Inner(Plain):
        pass


class ListOf(list):
    pass


class DictOf(dict):
    pass


class Keyword:
    """Pickled by NEWOBJ_EX."""

    def __new__(cls, a, *, b):
        self = super().__new__(cls)
        self.a, self.b = a, b
        return self

    def __getnewargs_ex__(self):
        return (self.a,), {"b": self.b}


class Weights(torch.nn.Parameter):
    """A subclass of Parameter, as some frameworks have."""


class Annotated(torch.Tensor):
    pass
