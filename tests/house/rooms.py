# SPDX-License-Identifier: Apache-2.0
"""Arrows between rooms, which are the folders of a top-level folder.

A header and its source are one place.  The places of a folder that reach one of its own
subfolders are above these, the others below: so fs/filesystem.h may stand on fs/tree, and
fs/tree on fs/types.h.  No two rooms may reach each other.  The rooms of core say in their
CMakeLists.txt what they need: `ckptfs_room(NAME NEEDS ROOM... SOURCES ...)` names what their
files include, no less and no more.
"""
import os
import re

INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
ROOM = re.compile(r'ckptfs_room\((\w+)((?:\s+[\w./]+)*)\s*\)')


def includes(texts, top):
    """{place: places of the same top-level folder that it includes}"""
    found = {}
    for path, text in texts.items():
        place = os.path.splitext(path)[0]
        named = (os.path.splitext(i)[0] for i in INCLUDE.findall(text) if i.startswith(top + '/'))
        found.setdefault(place, set()).update(set(named) - {place})
    return found


def reached(graph, start):
    """All that `start` leads to."""
    seen, todo = set(), [start]
    while todo:
        for step in graph.get(todo.pop(), ()):
            if step not in seen:
                seen.add(step)
                todo.append(step)
    return seen


def rooms_of(graph):
    """{place: its room}; a room's name ends in ' (above)' where its places stand on subfolders."""
    rooms = {}
    for place in set(graph).union(*graph.values()):
        folder = os.path.dirname(place)
        above = any(os.path.dirname(p).startswith(folder + '/') for p in reached(graph, place))
        rooms[place] = folder + ' (above)' * above
    return rooms


def cycles(texts, top):
    """(path, what) for each pair of rooms of `top` that reach each other."""
    graph = includes(texts, top)
    if not graph:
        return
    rooms = rooms_of(graph)
    between = {}
    for place, named in graph.items():
        for other in named:
            if rooms[place] != rooms[other]:
                between.setdefault(rooms[place], {}).setdefault(rooms[other], f'{place} includes {other}')
    for room in sorted(between):
        for other in sorted(between[room]):
            if room in reached(between, other):
                yield other.removesuffix(' (above)'), f'reaches {room}, which stands on it: {between[room][other]}'


def needs(texts, scripts):
    """(path, what) for each room of core whose NEEDS are not what it includes."""
    for path, script in scripts.items():
        for name, rest in ROOM.findall(script):
            words = rest.split('SOURCES')[0].split()
            said = set(words[1:]) if words[:1] == ['NEEDS'] else set()
            home = f'core/{name}/'
            included = {i.split('/')[1] for file, text in texts.items() if file.startswith(home)
                        for i in INCLUDE.findall(text) if i.startswith('core/')} - {name}
            for room in sorted(included - said):
                yield path, f'{name} includes {room} and does not name it'
            for room in sorted(said - included):
                yield path, f'{name} names {room} and does not include it'


def errors(texts):
    """(path, what) of every arrow that runs the wrong way; `texts`: {path: text} of the tree."""
    for top in ('core', 'formats', 'snapshot', 'fs', 'mount'):
        yield from cycles({p: t for p, t in texts.items() if p.startswith(top + '/') and p.endswith(('.h', '.cc', '.cu'))}, top)
    core = {p: t for p, t in texts.items() if p.startswith('core/')}
    yield from needs({p: t for p, t in core.items() if p.endswith(('.h', '.cc'))},
                     {p: t for p, t in core.items() if p.endswith('/CMakeLists.txt')})
