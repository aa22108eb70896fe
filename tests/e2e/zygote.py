# SPDX-License-Identifier: Apache-2.0
"""Python programs out of a process that has imported what they import.

torch takes seconds to import, and transformers, Lightning and DeepSpeed as many again; a test that
starts ten programs would wait for little else.  A zygote imports once and has done nothing else: each
program is a fork of it, with its own arguments, environment, directory and standard streams, and ends as
any interpreter does.

    zygote = Zygote(['torch', 'transformers.trainer'])
    job = zygote.start([sys.executable, 'job.py', 'word'], env=env, stdout=file)
    job.wait(60)

Usage, by itself alone: zygote.py FD MODULE...
"""
import array
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time

STREAMS = ('stdin', 'stdout', 'stderr')
LARGEST = 1 << 20  # of one request
LOST = -signal.SIGKILL  # where nobody is left to say how it ended


class Job:
    """A program that runs; as subprocess.Popen."""

    def __init__(self, pid, status, stdin=None, stdout=None, stderr=None):
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.pid, self._status, self._said, self.returncode = pid, status, b'', None

    def poll(self, seconds=0):
        """Its exit code, None while it runs: what it says at its end is known when it is gone."""
        end = None if seconds is None else time.monotonic() + seconds
        while self.returncode is None:
            left = None if end is None else max(0, end - time.monotonic())
            if not select.select([self._status], [], [], left)[0]:
                return None
            said = os.read(self._status, 16)
            self._said += said
            if not said:
                os.close(self._status)
                self.returncode = int(self._said or LOST)
        return self.returncode

    def wait(self, timeout=None):
        """Its exit code."""
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(f'program {self.pid}', timeout)
        return self.returncode

    def send_signal(self, number):
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        """At once."""
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The process that forks; made when it is first asked."""

    def __init__(self, modules):
        self._modules, self._socket, self._process = list(modules), None, None

    def _begin(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), *self._modules],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._socket = ours

    def start(self, words, env=None, cwd=None, **streams):
        """Runs [python, script or -c code, argument...]; streams are files, subprocess.PIPE for text, or nothing."""
        if self._socket is None:
            self._begin()
        null = os.open(os.devnull, os.O_RDWR)
        status, theirs = os.pipe()
        ours, given = {}, []
        for name in STREAMS:
            stream = streams.get(name)
            if stream == subprocess.PIPE:
                ends = os.pipe()
                mine, its = reversed(ends) if name == 'stdin' else ends
                ours[name] = open(mine, 'w' if name == 'stdin' else 'r', encoding='utf-8')
                given.append(its)
            else:
                given.append(stream.fileno() if stream else null)
        request = {'words': [str(word) for word in words[1:]], 'env': dict(env or os.environ),
                   'cwd': str(cwd or os.getcwd())}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [*given, theirs])
        piped = [end for name, end in zip(STREAMS, given) if name in ours]
        for end in (null, theirs, *piped):
            os.close(end)
        said = self._socket.recv(64)
        assert said, f'the process that imports {" ".join(self._modules)} ended'
        return Job(int(said), status, **ours)

    def close(self):
        """The programs it started go on."""
        if self._process is not None:
            self._socket.close()
            self._process.wait(60)


def receive(server):
    """A request and its descriptors; None where nobody asks any more."""
    size = array.array('i').itemsize * (len(STREAMS) + 1)
    said, control, _, _ = server.recvmsg(LARGEST, socket.CMSG_SPACE(size))
    if not said:
        return None
    given = array.array('i')
    given.frombytes(control[0][2][:size])
    return json.loads(said), list(given)


def run(words):
    """As the interpreter does with its command line."""
    while words[0] == '-W':
        words = words[2:]
    sys.argv = words if words[0] != '-c' else ['-c', *words[2:]]
    if words[0] == '-c':
        sys.path[0] = ''
        exec(compile(words[1], '<string>', 'exec'), {'__name__': '__main__'})  # pylint: disable=W0122
        return
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name='__main__')


def become(request, given):
    """In the program's process; returns its exit code."""
    os.close(given[-1])
    for number in range(len(STREAMS)):
        os.dup2(given[number], number)
    for number in given[:len(STREAMS)]:
        os.close(number)
    os.environ.clear()
    os.environ.update(request['env'])
    os.chdir(request['cwd'])
    more = [path for path in request['env'].get('PYTHONPATH', '').split(':') if path]
    sys.path[1:1] = [path for path in more if path not in sys.path]
    try:
        run(request['words'])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # pylint: disable=W0718
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def main():
    server = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # or each program would walk, and so copy, what was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for a child
    while (asked := receive(server)) is not None:
        request, given = asked
        if os.fork() == 0:
            # In between, for the exit code: a program may end as it likes.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pid = os.fork()
            if pid == 0:
                server.close()
                sys.exit(become(request, given))
            server.send(str(pid).encode())
            for number in given[:-1]:
                os.close(number)
            ended = os.waitpid(pid, 0)[1]
            os.write(given[-1], str(os.waitstatus_to_exitcode(ended)).encode())
            os._exit(0)
        for number in given:
            os.close(number)


if __name__ == '__main__':
    main()
