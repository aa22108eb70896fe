# SPDX-License-Identifier: Apache-2.0
"""Runs the ckptfs program for a test: adopt, mount, and never leave a mount.

The program comes from $CKPTFS_BIN, the checkpoints from $CKPTFS_FIXTURES.

A program built with sanitizers writes its reports into files here, since a
daemon has no stderr; fail_on_reports() makes each of them a failure.
"""
import atexit
import json
import os
import shutil
import subprocess
import tempfile
import time

BIN = os.environ.get('CKPTFS_BIN', 'build/ckptfs')
FIXTURES = os.environ.get('CKPTFS_FIXTURES', 'build/fixtures')
TIMEOUT = 120
TALLY = ('--replicated', r'.*\.tally\..*')
REPORTS = tempfile.TemporaryDirectory(prefix='ckptfs-reports-')


def keep_reports():
    """Let the sanitizers of every program started from here write to REPORTS.

    They abort, so that a report is never taken for a refusal.
    """
    os.chmod(REPORTS.name, 0o1777)  # tests become other users
    for tool in ('asan', 'lsan', 'tsan', 'ubsan'):
        key = f'{tool.upper()}_OPTIONS'
        mine = f'log_path={REPORTS.name}/{tool}:abort_on_error=1'
        os.environ[key] = ':'.join(filter(None, (os.environ.get(key), mine)))


def fail_on_reports():
    """Fail if a sanitizer has written anything since the last call."""
    texts = []
    for name in sorted(os.listdir(REPORTS.name)):
        path = os.path.join(REPORTS.name, name)
        with open(path, errors='replace') as f:
            texts.append(f'{name}\n{f.read()}')
        os.unlink(path)
    assert not texts, '\n'.join(texts)


keep_reports()


def checkpoint(variant):
    """The save directory of a fixture variant."""
    return os.path.join(FIXTURES, variant, 'ckpt')


def truth_of(variant):
    """The file that holds what the checkpoint must contain."""
    return os.path.join(FIXTURES, variant, 'truth.safetensors')


def is_mounted(path):
    """True if the kernel lists a mount at `path`."""
    path = os.path.realpath(path).replace(' ', '\\040')
    with open('/proc/mounts', errors='surrogateescape') as f:
        return any(line.split()[1] == path for line in f)


def public_program(folder):
    """A copy of the program in `folder`, which others may enter: they may not
    reach the build folder."""
    os.chmod(folder, 0o755)
    return shutil.copy(BIN, folder)


class Ckptfs:
    """One store, and the command line on it."""

    # A test's mount lives for a second; preparing memory for it is wasted.
    reserve = ('--reserve', '0')

    def __init__(self, folder):
        self.store = os.path.join(folder, 'store')
        self.folder = folder
        self.mounts = []
        self.processes = []
        atexit.register(self.end)  # where a fixture fails before it yields, nobody closes

    def run(self, *words, check=True, timeout=TIMEOUT, env=None):
        """Run `ckptfs WORDS`; returns the finished process, text output."""
        done = subprocess.run([BIN, *map(str, words)], capture_output=True,
                              text=True, errors='replace', timeout=timeout,
                              env={**os.environ, **(env or {})})
        if check and done.returncode != 0:
            raise AssertionError(
                f'ckptfs {words} exited {done.returncode}\n'
                f'{done.stdout}\n{done.stderr}')
        return done

    def adopt(self, path, name=None, check=True, extra=(), **more):
        """Adopt a checkpoint into the store; `extra`: more words."""
        words = ['adopt', path, '--store', self.store, *extra]
        return self.run(*words, *(['--name', name] if name else []),
                        check=check, **more)

    def adopt_variant(self, variant, **more):
        """Adopt a fixture as a run of its own name.

        No family has a rule for the tally buffers, which every rank holds
        whole: that has to be said.
        """
        return self.adopt(checkpoint(variant), variant, extra=TALLY, **more)

    def list(self):
        """Returns what `ckptfs list --json` says of the store."""
        return json.loads(self.run('list', '--store', self.store,
                                   '--json').stdout)

    def mountpoint(self):
        """A new empty directory that is unmounted at the end of the test."""
        path = os.path.join(self.folder, f'mnt{len(self.mounts)}')
        os.mkdir(path)
        self.mounts.append(path)
        return path

    def mount(self, *options, adopt=()):
        """Mount the store; returns the mount point."""
        path = self.mountpoint()
        more = [w for p in adopt for w in ('--adopt', p)]
        self.run('mount', '--store', self.store, *more, *self.reserve,
                 *options, path)
        return path

    def start(self, *options, path=None, stderr=None):
        """Mount in the foreground; returns (process, mount point)."""
        path = path or self.mountpoint()
        process = subprocess.Popen(
            [BIN, 'mount', '--foreground', '--store', self.store,
             *self.reserve, *map(str, options), path], stdin=subprocess.DEVNULL,
            stderr=stderr)
        self.processes.append(process)
        wait_until(lambda: is_mounted(path) and os.listdir(path),
                   'the mount', process)
        # It answers, and receives snapshots, only after it serves files.
        wait_until(lambda: self.run('status', '--store', self.store, '--mountpoint', path,
                                    check=False).returncode == 0, 'its answer', process)
        return process, path

    def umount(self, path):
        """Unmount and wait until the kernel agrees."""
        self.run('umount', path)
        wait_until(lambda: not is_mounted(path), 'the unmount')

    def running(self):
        """Processes that name this store: daemons and commands."""
        folder, found = os.fsencode(self.folder) + b'/', []
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try:
                with open(f'/proc/{pid}/cmdline', 'rb') as f:
                    words = f.read().split(b'\0')
            except OSError:
                continue
            if (os.path.basename(words[0]) == os.fsencode(os.path.basename(BIN))
                    and any(w.startswith(folder) for w in words)):
                found.append(int(pid))
        return found

    def close(self):
        """End what the test has left running, and see how it ended."""
        self.end()
        wait_until(lambda: not self.running(), 'the end of the daemons')
        fail_on_reports()

    def end(self):
        """End what the test has left running."""
        for path in self.mounts:
            if is_mounted(path):
                subprocess.run(['fusermount3', '-uz', path], check=False)
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()


def run_ranks(commands, log, seconds, start=subprocess.Popen, **options):
    """One process a rank, all to their good end; what they wrote, which goes to `log`.  `start` may be
    a zygote's."""
    with open(log, 'w', encoding='utf-8') as out:
        ranks = [start(words, stdout=out, stderr=out, **options) for words in commands]
        try:
            ended = [rank.wait(seconds) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    with open(log, encoding='utf-8') as f:
        said = f.read()
    assert ended == [0] * len(ranks), said
    return said


def wait_until(condition, what, process=None, seconds=60):
    """Poll until `condition()` holds; an error of it means not yet."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return
        except OSError:
            pass
        if process is not None and process.poll() is not None:
            raise AssertionError(f'{what}: the daemon ended with '
                                 f'{process.returncode}')
        time.sleep(0.02)
    raise AssertionError(f'{what} did not happen in {seconds} s')


def step_of(mount, run='ckpt', step=None):
    """The directory of a run's step inside a mount."""
    steps = os.path.join(mount, 'run', run, 'step')
    return os.path.join(steps, step or sorted(os.listdir(steps))[-1])
