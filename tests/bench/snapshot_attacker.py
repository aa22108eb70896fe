# SPDX-License-Identifier: Apache-2.0
"""A client of the daemon's snapshot socket (snapshot/wire/protocol.h) that behaves badly, until it is killed.

Usage: snapshot_attacker.py SOCKET ATTACK

Prints a line when the attack goes on.
"""
import array
import itertools
import os
import socket
import struct
import sys
import threading
import time

MAGIC, HELLO, BEGIN, CHUNK, END, DROP, ASK = 0x73706b63, 1, 4, 5, 6, 7, 12
PATH = sys.argv[1]


def message(word, rank=0, world=0, step=0, attempt=0, sequence=0, chunk=0, length=0, text=b''):
    """As it is sent."""
    return struct.pack('<IIIIII5Q', MAGIC, 1, word, rank, world, len(text), step, attempt, sequence,
                       chunk, length) + text


def connected():
    """A connection."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.connect(PATH)
    return one


def entered(name, world=1, rank=0, length=4096):
    """One that is welcome."""
    one = connected()
    one.send(message(HELLO, rank, world, sequence=1, length=length, attempt=os.getpid(), text=b'bad\n' + name))
    one.recv(4096)
    return one


def reader(one):
    """Reads all, in a thread."""
    def work():
        while one.recv(4096):
            pass
    threading.Thread(target=work, daemon=True).start()


def silent():
    """1,100 connections that say nothing, made anew when they are closed."""
    held = [connected() for _ in range(1100)]
    print(len(held), flush=True)
    while True:
        time.sleep(.001)
        held.append(connected())
        held.pop(0).close()


def hello_only():
    """Clients that say hello and nothing more."""
    held = [entered(b'quiet%d' % k) for k in range(40)]
    print(len(held), flush=True)
    time.sleep(3600)


def descriptors():
    """Two with every hello."""
    null = os.open('/dev/null', os.O_RDONLY)
    more = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [null, null]))]
    print('', flush=True)
    while True:
        one = connected()
        try:
            one.sendmsg([message(HELLO, world=1, sequence=1, length=4096, text=b'bad\nfd')], more)
            one.recv(4096)
        except OSError:
            pass
        one.close()


def asks(reads=True):
    """Questions without end, by eight connections."""
    def work(one):
        for step in itertools.count(1):
            one.send(message(ASK, step=step, attempt=step * 64 + 64, text=b'nowhere'))
    for k in range(8):
        one = entered(b'asks%d' % k)
        if reads:
            reader(one)
        threading.Thread(target=work, args=(one,), daemon=True).start()
    print('', flush=True)
    time.sleep(3600)


def drops():
    """Saves that are given up as soon as they are announced."""
    one = entered(b'drops', 2)
    reader(one)
    print('', flush=True)
    for step in itertools.count(1):
        one.send(message(DROP, step=step, attempt=step * 64 + 64, text=b'x' * 1000))


def hello_and_leave():
    """A large arena is asked for, and nobody waits for it."""
    print('', flush=True)
    while True:
        one = connected()
        one.send(message(HELLO, world=1, sequence=1, length=1 << 29, text=b'bad\nleaves'))
        time.sleep(.01)
        one.close()


def large_world():
    """Saves of rank 0 of 2^20 wait for the others; by the package, since they have to be whole."""
    import ckptfs
    import torch
    from ckptfs.collector import TorchCollector

    class Alone(TorchCollector):
        """Takes rank 0's word for the world."""

        def start(self, rank, world):
            super().start(0, 1)

    store = sys.argv[3]
    net = torch.nn.Linear(4, 4)
    collector = Alone([net], [torch.optim.SGD(net.parameters(), 1e-3)])
    saver = ckptfs.Saver(collector, 'bad', store, rank=0, world=1 << 20, job='large', slots=34)
    taken = sum(saver.save(step) for step in range(32))
    saver.before_update()
    print(taken, flush=True)
    time.sleep(3600)


ATTACKS = {'silent': silent, 'hello_only': hello_only, 'descriptors': descriptors, 'asks': asks,
           'unread': lambda: asks(False), 'drops': drops, 'leave': hello_and_leave, 'world': large_world}

if __name__ == '__main__':
    ATTACKS[sys.argv[2]]()
