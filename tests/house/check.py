# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that a compiler does not check.

Usage: check.py [ROOT].  Prints every break of a rule; exit code 1 if any.
  - includes follow the arrows of docs/inside/design.md, those between rooms too (rooms.py),
    and libfuse, torch and CUDA headers stay in their places
  - headers have at most 250 lines, sources 600
  - the top level holds the fixed names and dotfiles only
  - every source file has one SPDX line; CMake lists its sources by name
  - nothing in the tree names a package registry's host
  - "is no dict" and "has not the option" are "is not a dict" and "does not have the option"
  - files that docs name exist: in links, and as paths such as core/store/store.h
  - commands and options of ckptfs that docs name are in the manual, which a test compares with the program
  - no type is defined in two headers: the linker would mix their functions
  - bytes of checkpoints and stores are opened and listed in core/io only
  - no file is larger than 1 MiB
"""
import os
import re
import subprocess
import sys

import rooms

# folder -> folders of this repository that its files may include
ARROWS = {
    'core': {'core'},
    'formats': {'formats', 'core'},
    'snapshot': {'snapshot', 'core'},
    'fs': {'fs', 'core'},
    'mount': {'mount', 'fs', 'formats', 'snapshot', 'core'},
    'tests': {'tests', 'mount', 'fs', 'formats', 'snapshot', 'core'},
}
TOP = {'CMakeLists.txt', 'fs', 'core', 'snapshot', 'formats', 'mount', 'tests',
       'docs', 'README.md'}
LIMITS = {'.h': 250, '.cc': 600, '.cu': 600, '.py': 600}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
HOSTS = re.compile(r'pypi\.org|pythonhosted|deb\.debian|download\.pytorch'
                   r'|github\.com/[^ ]*/releases|conda\.anaconda')
# The verb is to be negated: "is not a dict", "does not have two".  Between two words may
# be the end of a line, with the mark of a comment or the quotes of a string that goes on.
GAP = r"""[^\S\n]*(?:['"]?\s*\n\s*(?://+|#|\*|f?['"])?)?\s*(?<=[\s'"])"""
ENGLISH = (
    (re.compile(rf'\b(?P<fine>there{GAP}(?:\w+{GAP}){{0,2}})?(?:is|are|was|were|be|been|being){GAP}no{GAP}'
                r'(?!(?:longer|more|less|fewer|better|worse|further|\w+er than)\b)\w+', re.I),
     'say "is not a ..."'),
    (re.compile(rf'(?P<fine>(?!))?\b(?:has|have|had){GAP}not{GAP}'
                r"(?:an?|the|its|their|any|one|two|three|\w+'s)\b", re.I),
     'say "does not have ..."'),
    (re.compile(rf'(?P<fine>(?!))?\b(?:what|which|than){GAP}(?:\w+{GAP}){{1,3}}(?:has|have|had){GAP}not(?=[.,;:)])',
                re.I),
     'say "lacks", or "does not have"'),
)
# Calls that open, map or list files, and the files of core, formats and fs outside
# core/io that may make them, with what for.  (mount has logs, sockets and /proc.)
RAW_FILES = re.compile(
    r'(?<![\w.>"])(?:::)?(?:open|openat|fopen|mmap|pread|preadv2|opendir|readdir|realpath)\((?!\))'
    r'|std::[io]?fstream|std::filesystem')
MAY_OPEN = {
    'core/access/kept_gates.cc': 'the directories above a file',
    'core/access/searched_directories.cc': 'the directories above a file',
    'core/adopt/own.cc': 'writes what it takes',
    'core/adopt/scan.cc': 'what a path that was given leads to',
    'core/base/descriptor.cc': 'the owner of descriptors',
    'core/base/file_lock.cc': 'locks',
    'core/state/assembler.cc': 'links that leave a checkpoint',
    'core/export/export.cc': 'writes what it exports',
    'core/model/family.cc': "the user's family files",
    'core/store/catalogue.cc': "SQLite's file",
    'core/store/store.cc': 'what a path that was given leads to',
    'fs/serve/open_files.cc': 'materialised files',
    'fs/permissions.cc': '/proc, and the directories above a root',
    'fs/serve/materialiser.cc': 'materialised files',
    'fs/serve/memory_limit.cc': '/proc, /sys',
    'fs/serve/page_pool.cc': 'materialised files',
}
# Links of a page, and the paths below the top level that it names.  A path with a mark of a
# pattern (formats/*/source.cc, formats/<name>/) is not looked up; an extension may be missing.
LINK = re.compile(r'\]\(([^)#\s]+)(?:#[^)\s]*)?\)')
NAMED = re.compile(r'(?<![\w./<>*~@$-])(?:core|formats|fs|mount|snapshot|tests|docs)/[\w./*?{}<>-]*')
PAST = 'docs/CHANGELOG.md'  # it may name files that are gone
MANUAL = 'docs/reference/ckptfs.1.md'
SPAN = re.compile(r'`([^`]+)`')
COMMAND = re.compile(r'(?:^|[\s/(])ckptfs ([a-z]+)\b([^|;#]*)')
OPTION = re.compile(r'(?<![\w-])--[a-z][a-z-]*')
SOURCE = ('.h', '.cc', '.cu', '.py')
MIB = 1 << 20


def include_errors(path, text):
    """Includes of one file that go against the arrows."""
    folder, name = path.split('/')[0], os.path.basename(path)
    for quote, target in INCLUDE.findall(text):
        first = target.split('/')[0]
        if quote == '"' and first in ARROWS and first not in ARROWS[folder]:
            yield f'{folder} must not include {first} ("{target}")'
        if re.match(r'fuse', target) and folder not in ('mount', 'tests'):
            yield f'libfuse belongs to mount/ ({target})'
        if first in ('torch', 'ATen', 'c10') and not (
                name.startswith('torch_') and folder in ('snapshot', 'tests')):
            yield f'torch headers belong to torch_* files ({target})'
        if re.match(r'cuda|cudart|driver_types', target) and not (
                path.startswith('snapshot/device/cuda_')):
            yield f'CUDA headers belong to snapshot/device/cuda_* ({target})'


def english_errors(text):
    """Phrases that no English speaker writes."""
    for pattern, remedy in ENGLISH:
        for found in pattern.finditer(text):
            if found['fine'] is None:
                line = text.count('\n', 0, found.start()) + 1
                yield f'line {line}: "{" ".join(found[0].split())}": {remedy}'


def places(paths):
    """All that a page may name: files, with and without their extensions, and folders."""
    known = set(paths) | {os.path.splitext(p)[0] for p in paths}
    for path in paths:
        while path := os.path.dirname(path):
            known.add(path)
    return known


def doc_errors(path, text, known):
    """Files that a page names and that do not exist."""
    for number, line in enumerate(text.splitlines(), 1):
        named = [(link, os.path.join(os.path.dirname(path), link))
                 for link in LINK.findall(line) if '://' not in link]
        named += [(name, name) for name in (n.rstrip('.-') for n in NAMED.findall(line))
                  if not re.search('[*?{}<>]', name)]
        for name, place in named:
            if os.path.normpath(place) not in known:
                yield f'line {number}: names {name}, which does not exist'


def options_of(manual):
    """Command -> its options, as the manual's sections list them."""
    options = {'help': set()}
    for section in re.split(r'^### ', manual, flags=re.M)[1:]:
        section = re.split(r'^## ', section, flags=re.M)[0]
        options[section.split()[0]] = {'--help', *re.findall(r'^- `(--[a-z-]+)', section, re.M)}
    return options


def code_of(text):
    """(line number, code) of each line of a block and of each span of a page."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.startswith('```')
        fenced = fenced != fence
        whole = not fence and (fenced or line.startswith('    '))
        for code in [line] if whole else SPAN.findall(line):
            yield number, code


def command_errors(text, options):
    """Commands and options that a page names and that the manual does not have."""
    for number, code in code_of(text):
        for command, rest in COMMAND.findall(code.split(' #')[0]):
            if command not in options:
                yield f'line {number}: ckptfs has no command {command}'
                continue
            for option in OPTION.findall(rest):
                if option not in options[command]:
                    yield f'line {number}: ckptfs {command} has no option {option}'


def text_errors(path, text):
    """Everything wrong with one text file."""
    folder, (_, ext) = path.split('/')[0], os.path.splitext(path)
    lines = text.count('\n')
    if ext in ('.h', '.cc', '.cu') and folder in ARROWS:
        yield from include_errors(path, text)
    if ext in ('.h', '.cc') and folder in ('core', 'formats', 'fs') and not (
            path.startswith('core/io/') or path in MAY_OPEN):
        raw = RAW_FILES.search(re.sub(r'//.*', '', text))
        if raw:
            yield f'opens or lists files by itself ({raw[0]}): that is core/io\'s'
    if lines > LIMITS.get(ext, lines):
        yield f'{lines} lines, the budget is {LIMITS[ext]}'
    if ext in SOURCE and text and text[:300].count('SPDX-License-Identifier') != 1:
        yield 'the first lines need one SPDX line'
    if 'CMakeLists' in path and re.search(r'file\s*\(\s*GLOB', text):
        yield 'sources are listed by name, not by GLOB'
    if not path.startswith('tests/house/'):
        yield from english_errors(text)
    if not path.startswith('tests/house/') and HOSTS.search(text):
        yield f'names a registry host: {HOSTS.search(text)[0]}'


def type_names(text):
    """The types that a header defines, with their namespace."""
    namespace = ''
    for line in text.splitlines():
        inside = re.match(r'namespace (\S+) \{', line)
        namespace = inside[1] if inside else namespace
        defined = re.match(r'(?:enum )?(?:struct|class|enum) '
                           r'(?:alignas\(\w+\) )?([\w:]+)[^;]*\{', line)
        if defined:
            yield f'{namespace}::{defined[1]}'


def errors(root):
    """(path, what) of every break of a rule under root."""
    types, texts = {}, {}
    listed = subprocess.run(
        ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
        cwd=root, capture_output=True, text=True, check=True).stdout
    paths = sorted(set(filter(None, listed.split('\0'))))
    known = places([p for p in paths if os.path.exists(os.path.join(root, p))])
    options = {}
    if MANUAL in paths:
        with open(os.path.join(root, MANUAL), encoding='utf-8') as f:
            options = options_of(f.read())
    for name in sorted({p.split('/')[0] for p in paths}):
        if name not in TOP and not name.startswith('.'):
            yield name, 'is not one of the names of the top level'
    for path in paths:
        full = os.path.join(root, path)
        if os.path.islink(full) or not os.path.isfile(full):
            continue
        if os.path.getsize(full) > MIB:
            yield path, 'is larger than 1 MiB'
        with open(full, 'rb') as f:
            data = f.read(MIB)
        if b'\0' in data:
            continue
        texts[path] = text = data.decode('utf-8', 'replace')
        for what in text_errors(path, text):
            yield path, what
        for what in doc_errors(path, text, known) if path.endswith('.md') and path != PAST else ():
            yield path, what
        for what in command_errors(text, options) if options and path.endswith('.md') and path != PAST else ():
            yield path, what
        for name in type_names(text) if path.endswith('.h') else ():
            if types.setdefault(name, path) != path:
                yield path, f'{name} is defined in {types[name]}, too'

    yield from rooms.errors(texts)


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else '.'
    found = list(errors(root))
    for path, what in found:
        print(f'{path}: {what}')
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
