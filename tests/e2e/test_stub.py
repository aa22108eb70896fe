# SPDX-License-Identifier: Apache-2.0
"""The stub of the compiled module promises to type checkers what nanobind made of it."""
import ast
import os

import pytest
from ckptfs import _native

STUB = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'snapshot', 'python', 'ckptfs',
                    '_native.pyi')
HEADS = {'List': 'list', 'Sequence': 'list', 'Tuple': 'tuple', 'Callable': 'object'}


def spelled(node, aliases):
    """A type in one spelling: of the stub's, and of nanobind's."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        return spelled(aliases[node.id], aliases) if node.id in aliases else HEADS.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return HEADS.get(node.attr, node.attr)
    if isinstance(node, ast.BinOp):
        return f'{spelled(node.left, aliases)} | {spelled(node.right, aliases)}'
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    head = spelled(node.value, aliases)
    if head == 'object':  # a function
        return head
    words = [spelled(one, aliases) for one in inner if not isinstance(one, ast.List)]
    return f'{words[0]} | None' if head == 'Optional' else f'{head}[{", ".join(words)}]'


def signature(function, aliases):
    """(positional-only types, (name, type) of the others and of those by keyword alone, how many have defaults, what
    it returns)."""
    given = function.args
    assert not (given.vararg or given.kwarg or any(given.kw_defaults)), function.name
    kinds = [[(a.arg, 'self' if a.arg == 'self' else spelled(a.annotation, aliases)) for a in args]
             for args in (given.posonlyargs, given.args, given.kwonlyargs)]
    only, named, keywords = ([one for one in args if one[0] != 'self'] for args in kinds)
    return ([kind for _, kind in only], named, keywords, len(given.defaults), spelled(function.returns, aliases))


def stub():
    """By name: the signatures of functions and methods; the names of all classes."""
    with open(STUB, encoding='utf-8') as file:
        tree = ast.parse(file.read())
    aliases = {one.targets[0].id: one.value for one in tree.body if isinstance(one, ast.Assign)}
    said, classes = {}, set()
    for one in tree.body:
        if isinstance(one, ast.FunctionDef):
            said[one.name] = signature(one, aliases)
        if isinstance(one, ast.ClassDef):
            classes.add(one.name)
            said |= {f'{one.name}.{f.name}': signature(f, aliases) for f in one.body
                     if isinstance(f, ast.FunctionDef)}
    return said, classes


def made():
    """The same of the module."""
    found, classes = {}, set()

    def add(name, value):
        one, = value.__nb_signature__  # of its only overload
        found[name] = signature(ast.parse(one[0].replace('\\0', 'None') + ': ...').body[0], {})

    for name, value in vars(_native).items():
        if isinstance(value, type):
            classes.add(name)
            for method, inner in vars(value).items():
                if hasattr(inner, '__nb_signature__'):
                    add(f'{name}.{method}', inner)
        elif hasattr(value, '__nb_signature__'):
            add(name, value)
    return found, classes


SAID, MADE = stub(), made()


def test_it_has_all_and_nothing_else():
    assert SAID[0].keys() == MADE[0].keys() and len(MADE[0]) > 10
    assert SAID[1] == MADE[1] == {'Capture', 'Part', 'Plan', 'Tensor', 'Writer'}


@pytest.mark.parametrize('name', sorted(MADE[0]))
def test_a_signature(name):
    said, module = SAID[0][name], MADE[0][name]
    assert said[:4] == module[:4]
    returns = said[4]
    assert module[4] in (returns, returns.partition('[')[0])  # it says list, and no more
