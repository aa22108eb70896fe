# SPDX-License-Identifier: Apache-2.0
"""Makes libraries to link against, so that a program runs on an older glibc than this machine's.

Usage: older_glibc.py VERSION DIRECTORY, for example `older_glibc.py 2.28 build/portable/glibc`.

The machine's glibc still has each older version of each symbol.  DIRECTORY gets libraries without
code of glibc's names.  In these a symbol has the newest version that is not above VERSION, and a
symbol that VERSION does not have is absent: the linker then names who needs it, and
older_glibc.cc has those that we need.  The linker takes them by -LDIRECTORY.
"""
import os
import re
import subprocess
import sys
from collections import defaultdict

# Since glibc 2.34 these libraries are empty, and all is in libc.so.6; an older machine needs each.
ONCE_ELSEWHERE = (('libpthread.so.0', re.compile(r'(__)?pthread_|sem_')),
                  ('libdl.so.2', re.compile(r'dl(open|mopen|close|sym|vsym|error|addr1?|info)$')),
                  ('librt.so.1', re.compile(r'(timer|mq|aio|lio)_|shm_(open|unlink)$')))
LIBRARIES = ('libc.so.6', 'libm.so.6', 'ld-linux-x86-64.so.2')
SYMBOL = re.compile(r'^(?P<address>[0-9a-f]+) .{5}(?P<kind>.{2}) (?P<section>\S+)\s+(?P<size>[0-9a-f]+)\s+'
                    r'\(?GLIBC_(?P<version>[0-9.]+)\)?\s+(?P<name>\w+)$', re.M)


def path_of(library):
    """The machine's own library."""
    done = subprocess.run(['cc', f'-print-file-name={library}'], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def number(version):
    """A version that can be compared."""
    return tuple(map(int, version.split('.')))


def symbols(library, newest):
    """name -> (version, kind, address, size in bytes): each as `newest` has it."""
    text = subprocess.run(['objdump', '-T', path_of(library)], check=True, capture_output=True, text=True).stdout
    chosen = {}
    for found in SYMBOL.finditer(text):
        version = number(found['version'])
        # A symbol that is a version's name stands in *ABS*.
        if version > newest or found['section'] in ('*UND*', '*ABS*'):
            continue
        if found['name'] not in chosen or chosen[found['name']][0] < version:
            chosen[found['name']] = (version, found['kind'], int(found['address'], 16), int(found['size'], 16))
    return chosen


def assembly(chosen):
    """Functions that do nothing, and data of the same sizes.

    Names of one address keep one: the linker exports all of them if a program has the data."""
    lines, data = ['.text'], defaultdict(list)
    for name, (_, kind, address, size) in sorted(chosen.items()):
        if kind.endswith('O'):
            data[address].append((name, size))
        else:
            lines += [f'.globl {name}', f'.type {name}, @function', f'{name}:']
    lines += ['ret', '.data']
    for names in data.values():
        lines.append('.balign 32')
        for name, size in names:
            lines += [f'.globl {name}', f'.type {name}, @object', f'.size {name}, {size}', f'{name}:']
        lines.append(f'.zero {max(size for _, size in names)}')
    return '\n'.join([*lines, '.section .note.GNU-stack,"",@progbits', ''])


def version_script(chosen):
    """Each symbol at its version."""
    versions = defaultdict(list)
    for name, (version, *_) in chosen.items():
        versions[version].append(name)
    return ''.join('GLIBC_%s { global: %s; };\n' % ('.'.join(map(str, version)), '; '.join(sorted(names)))
                   for version, names in sorted(versions.items()))


def make(library, chosen, directory):
    """Links one library."""
    base = os.path.join(directory, library)
    with open(f'{base}.s', 'w', encoding='ascii') as f:
        f.write(assembly(chosen))
    with open(f'{base}.map', 'w', encoding='ascii') as f:
        f.write(version_script(chosen))
    subprocess.run(['cc', '-shared', '-nostdlib', f'-Wl,-soname,{library}', f'-Wl,--version-script={base}.map',
                    '-o', base, f'{base}.s'], check=True)


def name_for_linker(directory, name, text):
    """DIRECTORY/libNAME.so: what -lNAME is."""
    with open(os.path.join(directory, f'lib{name}.so'), 'w', encoding='utf-8') as f:
        f.write(text + '\n')


def main(version, directory):
    """Makes all of them."""
    directory = os.path.abspath(directory)
    os.makedirs(directory, exist_ok=True)
    for library in LIBRARIES:
        chosen = symbols(library, number(version))
        if library == 'libc.so.6':
            for other, pattern in ONCE_ELSEWHERE:
                make(other, {name: chosen.pop(name) for name in list(chosen) if pattern.match(name)}, directory)
        make(library, chosen, directory)
    name_for_linker(directory, 'c', f'GROUP ( {directory}/libc.so.6 {path_of("libc_nonshared.a")} '
                                    f'AS_NEEDED ( {directory}/ld-linux-x86-64.so.2 ) )')
    for library in ('libm.so.6', *(other for other, _ in ONCE_ELSEWHERE)):
        name_for_linker(directory, library[3:].split('.')[0], f'INPUT ( {directory}/{library} )')


if __name__ == '__main__':
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
