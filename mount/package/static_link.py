# SPDX-License-Identifier: Apache-2.0
"""Links a program with static libraries in place of the shared ones that its command names.

Usage: static_link.py PREFIX LINKER ARGUMENT...

A shared library is replaced by PREFIX/lib's static one (static_libraries makes these), else by
the machine's.  Their headers are those that the objects were compiled with, since both are of one
release of the distribution.  A library without a static one, and a program that needs more
than glibc when it runs, are errors.
"""
import os
import re
import subprocess
import sys

SHARED = re.compile(r'/lib(?P<name>[\w+-]+)\.so(\.\d+)*$')
NEEDED = re.compile(r'\(NEEDED\).*\[(?P<library>.*)\]')
GLIBC = re.compile(r'(lib(c|m|pthread|dl|rt)|ld-linux-x86-64)\.so\.\d')
ALSO = {'mount': ['blkid']}  # what a static library needs besides itself


def static(name, prefix):
    """The path of a static library."""
    own = os.path.join(prefix, 'lib', f'lib{name}.a')
    if os.path.exists(own):
        return own
    found = subprocess.run(['cc', f'-print-file-name=lib{name}.a'], check=True, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(found):
        sys.exit(f'static_link: no static library {name}; mount/package/static_libraries makes those that the system lacks')
    return found


def replaced(argument, prefix):
    """The arguments that take its place."""
    if argument.startswith('-Wl,-rpath,'):
        return []
    shared = SHARED.search(argument)
    if not shared or argument.startswith('-'):
        return [argument]
    return [static(name, prefix) for name in [shared['name'], *ALSO.get(shared['name'], [])]]


def main(prefix, *command):
    """Links, and looks at what was linked."""
    linked = [word for argument in command for word in replaced(argument, prefix)]
    code = subprocess.run(linked, check=False).returncode
    if code != 0:
        sys.exit(code)
    program = linked[linked.index('-o') + 1]
    read = subprocess.run(['readelf', '-d', program], check=True, capture_output=True, text=True).stdout
    foreign = [library for library in NEEDED.findall(read) if not GLIBC.fullmatch(library)]
    if foreign:
        os.remove(program)
        sys.exit(f'static_link: {program} would need {", ".join(foreign)}')


if __name__ == '__main__':
    main(*sys.argv[1:])
