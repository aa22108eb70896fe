# SPDX-License-Identifier: Apache-2.0
"""check.py finds each kind of break, and this repository has none."""
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SPDX = '// SPDX-License-Identifier: Apache-2.0\n'
BAD = {
    'core/a.h': ('#include "formats/x.h"\n', 'core must not include formats'),
    'core/b.cc': ('#include "fs/x.h"\n', 'core must not include fs'),
    'fs/a.cc': ('#include "formats/registry.h"\n', 'fs must not include formats'),
    'fs/b.cc': ('#include <fuse_lowlevel.h>\n', 'libfuse belongs to mount'),
    'formats/a.cc': ('#include <torch/torch.h>\n', 'torch headers belong'),
    'snapshot/a.cc': ('#include <cuda_runtime.h>\n', 'CUDA headers belong'),
    'core/c.h': ('\n' * 251, 'the budget is 250'),
    'core/CMakeLists.txt': ('file(GLOB x *.cc)\n', 'not by GLOB'),
    'stray/a.txt': ('', 'top level'),
    'formats/b.cc': ('auto in = std::ifstream(path);\n', 'opens or lists files by itself'),
    'core/d.cc': ('Refuse("an entry is no dict");\n', 'line 2: "is no dict": say "is not a'),
    'core/e.h': ('// Entries that are\n// no tensors.\n', 'line 2: "are // no tensors"'),
    'core/f.py': ("say('sizes are '\n    'no counts')\n", 'no counts": say "is not a'),
    'core/g.cc': ('// A piece has not the dims.\n', 'say "does not have'),
    'docs/a.md': ('Notes of what it has not.\n', 'say "lacks"'),
    'docs/b.md': ('See\n[a](../gone.md#part).\n', 'line 2: names ../gone.md, which does not exist'),
    'docs/c.md': ('`X` of core/gone/a.h.\n', 'line 1: names core/gone/a.h, which does not'),
    'mount/b.sh': ('curl https://py' + 'pi.org/simple', 'registry host'),
}


def check(root):
    """Output of check.py on a folder."""
    return subprocess.run([sys.executable, os.path.join(HERE, 'check.py'), root],
                          capture_output=True, text=True)


class HouseTest(unittest.TestCase):
    def test_this_repository_keeps_the_rules(self):
        done = check(ROOT)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_every_rule_can_fail(self):
        for path, (text, want) in BAD.items():
            with self.subTest(path), tempfile.TemporaryDirectory() as root:
                subprocess.run(['git', 'init', '-q', root], check=True)
                os.makedirs(os.path.join(root, os.path.dirname(path)))
                with open(os.path.join(root, path), 'w') as f:
                    f.write((SPDX if path.endswith(('.h', '.cc')) else '') + text)
                done = check(root)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertIn(want, done.stdout)

    def test_a_type_that_is_defined_twice_is_found(self):
        with tempfile.TemporaryDirectory() as root:
            subprocess.run(['git', 'init', '-q', root], check=True)
            for folder, space in (('core', 'a'), ('fs', 'b'), ('mount', 'a')):
                os.mkdir(os.path.join(root, folder))
                with open(os.path.join(root, folder, 'x.h'), 'w') as f:
                    f.write(f'{SPDX}namespace {space} {{\nstruct X {{}};\n}}\n')
            said = check(root).stdout
            self.assertIn('mount/x.h: a::X is defined in core/x.h, too', said)
            self.assertNotIn('fs/x.h', said)

    def test_arrows_between_rooms_are_checked(self):
        trees = (
            ('core/a reaches core/b, which stands on it', {'core/a/x.h': 'core/b/y.h', 'core/b/y.cc': 'core/a/x.h'}),
            ('core reaches core/a, which stands on it', {'core/top.h': 'core/a/x.h', 'core/a/x.h': 'core/top.h'}),
        )
        for want, files in trees:
            with tempfile.TemporaryDirectory() as root:
                subprocess.run(['git', 'init', '-q', root], check=True)
                for path, include in files.items():
                    os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
                    with open(os.path.join(root, path), 'w') as f:
                        f.write(f'{SPDX}#include "{include}"\n')
                self.assertIn(want.split(' reaches')[0], check(root).stdout)
                self.assertIn('which stands on it', check(root).stdout)

    def test_a_room_names_what_it_includes(self):
        with tempfile.TemporaryDirectory() as root:
            subprocess.run(['git', 'init', '-q', root], check=True)
            os.makedirs(os.path.join(root, 'core', 'a'))
            with open(os.path.join(root, 'core', 'a', 'x.h'), 'w') as f:
                f.write(SPDX + '#include "core/b/y.h"\n')
            with open(os.path.join(root, 'core', 'a', 'CMakeLists.txt'), 'w') as f:
                f.write('ckptfs_room(a NEEDS c\n  SOURCES x.cc)\n')
            said = check(root).stdout
            self.assertIn('a includes b and does not name it', said)
            self.assertIn('a names c and does not include it', said)

    def test_commands_that_docs_name_are_those_of_the_manual(self):
        with tempfile.TemporaryDirectory() as root:
            subprocess.run(['git', 'init', '-q', root], check=True)
            os.makedirs(os.path.join(root, 'docs', 'reference'))
            with open(os.path.join(root, 'docs', 'reference', 'ckptfs.1.md'), 'w') as f:
                f.write('## Commands\n\n### list [RUN]\n\n- `--json` print JSON\n\n### gc\n\n- `--run RUN` of it\n')
            with open(os.path.join(root, 'docs', 'a.md'), 'w') as f:
                f.write('ckptfs has `ckptfs list --json` and `ckptfs lsit`.\n\n    ckptfs gc --json | less --help\n'
                        '\n```sh\nckptfs help gc; build/ckptfs list --run a  # ckptfs x\n```\n')
            said = check(root).stdout
            self.assertEqual(said.splitlines(), [
                'docs/a.md: line 1: ckptfs has no command lsit', 'docs/a.md: line 3: ckptfs gc has no option --json',
                'docs/a.md: line 6: ckptfs list has no option --run'])

    def test_what_is_english_is_let_pass(self):
        with tempfile.TemporaryDirectory() as root:
            subprocess.run(['git', 'init', '-q', root], check=True)
            os.mkdir(os.path.join(root, 'docs'))
            with open(os.path.join(root, 'docs', 'a.md'), 'w') as f:
                f.write('There is no daemon, no step is stored, and there\nare no files; nor can there '
                        'be no index. It is no longer here, no larger than 4 and has no name.\n'
                        'One has begun, and the other has not; it has not ended, what has not?\n')
            done = check(root)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_missing_licence_line_is_found(self):
        with tempfile.TemporaryDirectory() as root:
            subprocess.run(['git', 'init', '-q', root], check=True)
            os.mkdir(os.path.join(root, 'core'))
            with open(os.path.join(root, 'core', 'a.cc'), 'w') as f:
                f.write('int x;\n')
            self.assertIn('SPDX', check(root).stdout)


if __name__ == '__main__':
    unittest.main()
