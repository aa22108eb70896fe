# SPDX-License-Identifier: Apache-2.0
"""Plays systemd for a daemon: sd_notify(3) and sd_listen_fds(3), as far as descriptors go."""
import array
import os
import socket
import subprocess


class ServiceManager:
    """Starts commands, and keeps their descriptors from one to the next."""

    def __init__(self, folder):
        self.path = os.path.join(str(folder), 'notify')
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.setblocking(False)
        self.kept = []  # (name, descriptor)

    def hear(self):
        """Does what was asked for; the names that are kept."""
        while True:
            try:
                data, control, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(4 * 16))
            except BlockingIOError:
                return [name for name, _ in self.kept]
            words = dict(line.split('=', 1) for line in data.decode().splitlines())
            if words.get('FDSTOREREMOVE') == '1':
                for name, fd in self.kept:
                    if name == words['FDNAME']:
                        os.close(fd)
                self.kept = [one for one in self.kept if one[0] != words['FDNAME']]
            for _, _, body in control:
                fds = array.array('i')
                fds.frombytes(body)
                self.kept += [(words['FDNAME'], fd) for fd in fds]

    def start(self, command):
        """A process that is passed what is kept, from descriptor 3 on."""
        self.hear()
        fds = [fd for _, fd in self.kept]

        def place():  # in the child
            high = [os.dup2(fd, 1000 + i) for i, fd in enumerate(fds)]
            for i, fd in enumerate(high):
                os.dup2(fd, 3 + i)
            os.closerange(3 + len(fds), 4096)

        environment = dict(os.environ, NOTIFY_SOCKET=self.path)
        if fds:
            environment |= {'LISTEN_FDS': str(len(fds)),
                            'LISTEN_FDNAMES': ':'.join(name for name, _ in self.kept)}
        return subprocess.Popen(['sh', '-c', 'LISTEN_PID=$$ exec "$@"', 'sh', *command],
                                stdin=subprocess.DEVNULL, env=environment, preexec_fn=place,
                                close_fds=False)

    def close(self):
        """Nothing stays."""
        for _, fd in self.kept:
            os.close(fd)
        self.socket.close()
