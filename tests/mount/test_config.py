# SPDX-License-Identifier: Apache-2.0
"""Configuration files: what they say, what the line says, and what a reload changes."""
import json
import os
import signal
import subprocess

from daemon import BIN, is_mounted, wait_until


def write(path, *lines):
    path.write_text('\n'.join(lines) + '\n')
    return str(path)


def status_of(ckptfs, mount):
    done = ckptfs.run('status', '--store', ckptfs.store, '--mountpoint', mount, '--json')
    return json.loads(done.stdout)[0]['status']


def test_a_file_mounts(ckptfs, source, tmp_path):
    mount = ckptfs.mountpoint()
    file = write(tmp_path / 'run.toml', '[mount]', f'mountpoint = "{mount}"', f'checkpoint = ["{source}"]',
                 f'store = "{ckptfs.store}"', 'layout = ["tp2", "dp8"]', 'reserve = 0', 'mode = "stream"')
    ckptfs.run('mount', '--config', file)
    assert {'tp2', 'dp8'} <= set(os.listdir(f'{mount}/view/'))
    status = status_of(ckptfs, mount)
    assert status['mode'] == 'stream' and status['configuration']['file'] == file
    assert f'config: {file}' in ckptfs.run('status', '--store', ckptfs.store).stdout
    record = json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json').stdout)[0]
    ckptfs.umount(mount)
    # The line goes first, with its mount point, too, which leaves the checkpoints to the file.
    other = ckptfs.mountpoint()
    ckptfs.run('mount', '--config', file, '--mode', 'direct', other)
    assert status_of(ckptfs, other)['mode'] == 'direct' and not is_mounted(mount)
    assert record['alive']


def test_the_cure_of_a_dead_mount_names_the_file(ckptfs, source, tmp_path):
    file = write(tmp_path / 'run.toml', '[mount]', f'store = "{ckptfs.store}"', f'checkpoint = "{source}"',
                 'mode = "stream"')
    process, mount = ckptfs.start('--config', file)
    process.kill()
    process.wait()
    cure = json.loads(ckptfs.run('status', '--store', ckptfs.store, '--json', check=False).stdout)[0]['cure']
    assert f'--config {file}' in cure and '--mode' not in cure, cure


def test_errors_stop_a_mount_and_a_check(ckptfs, tmp_path):
    bad = write(tmp_path / 'bad.toml', '[mount]', 'mountpoint = "/mnt"', 'folow = true', 'budget = "lots"')
    done = ckptfs.run('mount', '--config', bad, check=False)
    assert done.returncode == 2
    assert f"{bad}:3: 'folow' is not an option of [mount]; do you mean follow?" in done.stderr
    assert f"{bad}:4: budget: 'lots' is not a size" in done.stderr
    good = write(tmp_path / 'good.toml', '[daemon]', 'keep-last = 3')
    done = ckptfs.run('config', 'check', bad, good, check=False)
    assert done.returncode == 4
    assert done.stdout.splitlines() == [
        f"{bad}:3: 'folow' is not an option of [mount]; do you mean follow?",
        f"{bad}:4: budget: 'lots' is not a size: write bytes, or K, M, G, T of 1024",
        f'{good}: ok: a daemon, 1 option']
    assert ckptfs.run('config', 'check', tmp_path, check=False).stdout == done.stdout
    os.chmod(good, 0o666)
    assert 'not believed' in ckptfs.run('config', 'check', good, check=False).stdout
    assert ckptfs.run('config', 'chekc', check=False).returncode == 2


def test_a_reload_changes_what_it_can(ckptfs, source, tmp_path):
    log = tmp_path / 'log'
    head = ['[mount]', f'store = "{ckptfs.store}"', f'log = "{log}"', 'reserve = 0']
    file = write(tmp_path / 'run.toml', *head, 'keep-last = 5')
    mount = ckptfs.mountpoint()
    ckptfs.run('mount', '--config', file, '--adopt', source, mount)
    write(tmp_path / 'run.toml', *head, 'keep-last = 2', 'log-format = "json"', 'mode = "stream"')
    done = ckptfs.run('config', 'reload', '--store', ckptfs.store)
    assert 'in force now: log-format, keep-last' in done.stdout, done.stdout
    assert 'waits for the next start: mode' in done.stdout
    assert 'waits for the next start: mode' in ckptfs.run('status', '--store', ckptfs.store).stdout
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{')]
    assert any('read again' in line['message'] and line['level'] == 'info' for line in lines)
    # A file that breaks a rule changes nothing.
    write(tmp_path / 'run.toml', *head, 'log-format = "xml"')
    done = ckptfs.run('config', 'reload', '--store', ckptfs.store, check=False)
    assert done.returncode != 0 and ':5: log-format' in done.stderr, done.stderr
    assert is_mounted(mount)
    assert status_of(ckptfs, mount)['configuration']['needs_restart'] == ['mode']


def test_a_hangup_reads_the_file_again_and_opens_the_log_anew(ckptfs, source, tmp_path):
    log = tmp_path / 'log'
    file = write(tmp_path / 'run.toml', '[mount]', f'log = "{log}"')
    process, mount = ckptfs.start('--config', file, '--adopt', source)
    os.rename(log, tmp_path / 'log.1')
    process.send_signal(signal.SIGUSR1)
    wait_until(log.exists, 'the new log', process)
    write(tmp_path / 'run.toml', '[mount]', f'log = "{log}"', 'mode = "stream"')
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: status_of(ckptfs, mount)['configuration']['needs_restart'] == ['mode'], 'the reload', process)
    assert 'read again' in log.read_text() and 'read again' not in (tmp_path / 'log.1').read_text()
    assert os.stat(log).st_mode & 0o777 == 0o600
    assert is_mounted(mount)


def test_lines_of_json(ckptfs, source, tmp_path):
    stderr = open(tmp_path / 'err', 'w+')
    process, mount = ckptfs.start('--log-format', 'json', '--adopt', source, stderr=stderr)
    ckptfs.umount(mount)
    assert process.wait(20) == 0
    stderr.seek(0)
    lines = [json.loads(line) for line in stderr.read().splitlines()]
    assert lines[-1]['message'] == 'unmounted'
    assert all(line['pid'] == process.pid and line['time'].endswith('Z') for line in lines)


def test_a_daemon_without_a_mount_reloads(ckptfs, tmp_path):
    file = write(tmp_path / 'd.toml', '[daemon]', 'snapshot-memory = "64M"')
    daemon = subprocess.Popen([BIN, 'daemon', '--foreground', '--store', ckptfs.store, '--config', file],
                              stdin=subprocess.DEVNULL)
    ckptfs.processes.append(daemon)
    wait_until(lambda: ckptfs.run('status', '--store', ckptfs.store, check=False).returncode == 0, 'it', daemon)
    write(tmp_path / 'd.toml', '[daemon]', 'snapshot-memory = "32M"', 'keep-every = 10')
    done = ckptfs.run('config', 'reload', '--store', ckptfs.store)
    assert 'in force now: keep-every' in done.stdout and 'next start: snapshot-memory' in done.stdout
    daemon.terminate()
    assert daemon.wait(20) == 0
