# SPDX-License-Identifier: Apache-2.0
"""The refusals that the program can print, out of its sources.

    messages.py           lists them: place, code, text with `...` for what is filled in
    messages.py --check   compares them with docs/use/troubleshooting.md

A refusal is an Error with a code, which some room of the sources makes; it may say what would
settle it (`Needing`).  On the page each remedy stands in the table of hints, by its longest words,
and each pair of room and code in a row that has `<!-- room room: code code -->`, which nobody sees.
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PAGE = os.path.join(ROOT, 'docs', 'use', 'troubleshooting.md')
FOLDERS = ('core', 'formats', 'fs', 'mount', 'snapshot')
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
CODE = re.compile(r'\bErrorCode::k(\w+)\s*,')
SHORT = re.compile(r'\bRefuse(Usage)?\(')


def argument(text, begin):
    """Returns the text between the bracket at `begin` and the one that closes it."""
    depth, at = 0, begin
    while at < len(text):
        if text[at] == '"':
            at = STRING.match(text, at).end()
            continue
        if text[at] in '({':
            depth += 1
        if text[at] in ')}':
            depth -= 1
            if depth == 0:
                return text[begin + 1:at]
        at += 1
    return text[begin + 1:]


def spelled(code):
    """The text that a C++ expression makes, `...` for what is not written in it."""
    out, at = [], 0
    for found in STRING.finditer(code):
        between = code[at:found.start()].strip()
        if not out or between:
            out.append('...' if re.search(r'\w', between.replace('StrCat', '')) else '')
        out.append(found[1].replace('\\"', '"').replace('\\n', ' '))
        at = found.end()
    if re.search(r'\w', code[at:]):
        out.append('...')
    return re.sub(r'(\.\.\.)+', '...', ''.join(out))


def sources():
    """(path below the top, text without comments) of each source."""
    for top in FOLDERS:
        for folder, _, names in os.walk(os.path.join(ROOT, top)):
            for name in sorted(names):
                if not name.endswith(('.cc', '.h')):
                    continue
                path = os.path.join(folder, name)
                with open(path, encoding='utf-8') as f:
                    yield os.path.relpath(path, ROOT), re.sub(r'(?m)^\s*//.*$', '', f.read())


def refusals():
    """(room, code, text) of each."""
    found = []
    for path, text in sources():
        room = os.path.dirname(path)
        for match in CODE.finditer(text):
            before = max(text.rfind('(', 0, match.start()), text.rfind('{', 0, match.start()))
            found.append((room, match[1].lower(), spelled(argument(text, before).split(',', 1)[-1])))
        for match in SHORT.finditer(text):
            code = 'usage' if match[1] else 'invalid'
            found.append((room, code, spelled(argument(text, match.end() - 1))))
    return found


def remedies():
    """The texts that say what would settle a refusal."""
    found = set()
    for _, text in sources():
        for match in re.finditer(r'\bNeeding\(', text):
            said = spelled(argument(text, match.end() - 1))
            if re.search(r'[a-z]{3}', said):
                found.add(said)
    return found


def core(text):
    """The longest stretch of a text that does not depend on what is filled in."""
    return max((part.strip(' ;:,`(') for part in text.split('...')), key=len)


def page():
    """(text with one space between words, rows: list of (rooms, codes))"""
    with open(PAGE, encoding='utf-8') as f:
        text = f.read()
    rows = [(rooms.split(), codes.split()) for rooms, codes in re.findall(r'<!-- ([^:>]+): ([^>]+?) -->', text)]
    return re.sub(r'\s+', ' ', text), rows


def lacking():
    """Returns all that the page does not have."""
    text, rows = page()
    pairs = {(room, code) for room, code, _ in refusals()}
    listed = {(room, code) for rooms, codes in rows for room in rooms for code in codes}
    plain = text.replace('`', '')
    out = [f'no row for {code} of {room}' for room, code in sorted(pairs - listed)]
    out += [f'a row for {code} of {room}, which there is not' for room, code in sorted(listed - pairs)]
    out += [f'no hint: {core(said)}' for said in sorted(remedies())
            if re.sub(r'\s+', ' ', core(said)).replace('`', '') not in plain]
    return out


def main():
    if sys.argv[1:] == ['--check']:
        for line in lacking():
            print(f'{os.path.relpath(PAGE, ROOT)}: {line}')
        sys.exit(1 if lacking() else 0)
    for room, code, text in sorted(refusals()):
        print(f'{room}\t{code}\t{text}')
    for text in sorted(remedies()):
        print(f'remedy\t\t{text}')


if __name__ == '__main__':
    main()
