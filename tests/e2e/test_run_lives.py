# SPDX-License-Identifier: Apache-2.0
"""Trainings that begin again in their directory, or go back: `latest` is what was saved last, for everybody
who asks."""
import json
import os
import shutil
import time

import ckptfs as snapshots
import lightning
import pytest
import torch
import torch.distributed.checkpoint as dcp
from daemon import wait_until
from lightning.pytorch.callbacks import ModelCheckpoint
from linear_module import LinearModule
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file


def save(output, step, value):
    """A Trainer's checkpoint-<step> with one weight."""
    path = os.path.join(output, f'checkpoint-{step}')
    os.makedirs(path, exist_ok=True)
    save_file({'w': torch.full((64,), float(value))}, os.path.join(path, 'model.safetensors'), {'format': 'pt'})
    for name, text in (('config.json', {'architectures': ['Net'], 'model_type': 'net'}),
                       ('trainer_state.json', {'global_step': step, 'log_history': []})):
        with open(os.path.join(path, name), 'w', encoding='utf-8') as f:
            json.dump(text, f)
    torch.save({}, os.path.join(path, 'training_args.bin'))


def shown(mount, name='w'):
    """The value of the weight that /view shows."""
    return float(load_file(os.path.join(mount, 'view', 'tp1', 'rank0', 'model.safetensors'))[name].flatten()[0])


def seen(mount):
    """The same; None while the step that /view shows is gone, and no other has come."""
    try:
        return shown(mount)
    except (OSError, SafetensorError):
        return None


def agreed(ckptfs):
    """Returns what `resolve`, `info` and `list` call the latest: one source."""
    def ask(*words):
        return json.loads(ckptfs.run(*words, '--store', ckptfs.store, '--json').stdout)
    found = {ask('resolve', 'output')['source'], ask('info', 'output')['adopted_from'],
             ask('list')['steps'][-1]['source']}
    assert len(found) == 1
    return os.path.basename(found.pop())


@pytest.mark.parametrize('how', [[], ['--link'], ['--copy']])
@pytest.mark.parametrize('removed', [True, False])
def test_a_training_that_begins_again_is_what_is_shown(ckptfs, how, removed):
    output = os.path.join(ckptfs.folder, 'output')
    save(output, 3, 13)
    save(output, 6, 16)
    mount = ckptfs.mount(*how, adopt=[output])
    assert shown(mount) == 16
    ckptfs.umount(mount)
    if removed:
        shutil.rmtree(output)
    save(output, 3, 23)
    path = ckptfs.mountpoint()
    said = ckptfs.run('mount', '--store', ckptfs.store, *how, *ckptfs.reserve, output, path).stderr
    assert shown(path) == 23
    assert 'output/checkpoint-6' in said and 'begins another life' in said
    assert agreed(ckptfs) == 'checkpoint-3'
    assert ckptfs.list()['steps'][-1]['life'] == 2
    assert 'LIFE' in ckptfs.run('list', '--store', ckptfs.store).stdout
    assert 'of 2 lives' in ckptfs.run('status', '--store', ckptfs.store).stdout


def test_a_training_that_begins_again_is_followed(ckptfs):
    output = os.path.join(ckptfs.folder, 'output')
    save(output, 4, 14)
    save(output, 6, 16)
    _, mount = ckptfs.start('--follow', output)
    wait_until(lambda: shown(mount) == 16, 'the first training')
    shutil.rmtree(output)
    save(output, 2, 22)
    wait_until(lambda: seen(mount) == 22, 'the second training')
    save(output, 4, 24)
    wait_until(lambda: seen(mount) == 24, 'its next step')
    assert agreed(ckptfs) == 'checkpoint-4'


NAMED = ['step_{}', 'ep0-ba{}', '{}', 'iter-{:06}-ckpt', 'step{}-unsharded', 'checkpoint-epoch-{}']


@pytest.mark.parametrize('form', [*NAMED, 'ckpt_{}.pth', 'checkpoint{:04}.pth.tar', 'model_{:07}.pt', 'counted'])
def test_numbers_in_names_order_steps_that_were_copied(ckptfs, form):
    """They were fetched in lexical order, so that their times say nothing."""
    output = os.path.join(ckptfs.folder, 'output')
    os.mkdir(output)
    paths = []
    for n, step in enumerate((1000, 1100, 800, 900)):
        path = os.path.join(output, 'abcd'[n] + '.pt' if form == 'counted' else form.format(step))
        weights = {'a.weight': torch.full((4, 3), float(step))}
        if form == 'counted':
            torch.save({'state_dict': weights, 'epoch': step}, path)
        elif '.p' in form:
            torch.save(weights, path)
        elif form == 'step_{}':  # several formats name directories so
            dcp.save({'model': weights}, checkpoint_id=path, no_dist=True)
        else:
            os.mkdir(path)
            save_file(weights, os.path.join(path, 'model.safetensors'))
        for name in os.listdir(path) if os.path.isdir(path) else ['']:
            os.utime(os.path.join(path, name) if name else path, (1.7e9 + 10 * n,) * 2)
        paths.append(path)
    ckptfs.run('adopt', '--store', ckptfs.store, *([output] if os.path.isdir(paths[0]) else sorted(paths)))
    steps = ckptfs.list()['steps']
    assert [one['iteration'] for one in steps] == [800, 900, 1000, 1100] and {one['run'] for one in steps} == {'output'}
    assert shown(ckptfs.mount(), 'a.weight') == 1100


@pytest.mark.parametrize('names', [('epoch1_step90.pt', 'epoch1_step180.pt', 'epoch2_step5.pt'), ('epoch_0_batch_900.pt', 'epoch_1_batch_0.pt'),
                                   ('model_0000999.pth', 'model_0001999.pth', 'model_final.pth'), ('epoch-1-step-90', 'epoch-1-step-180', 'epoch-2-step-5')])
def test_times_decide_where_numbers_do_not(ckptfs, names):
    """Steps may begin anew in each epoch, and the last file may have no number."""
    output = os.path.join(ckptfs.folder, 'output')
    os.mkdir(output)
    for n, name in enumerate(names):
        path, weights = os.path.join(output, name), {'a.weight': torch.full((4, 3), float(n))}
        if '.p' in name:
            torch.save(weights, path)
        else:
            os.mkdir(path)
            path = os.path.join(path, 'model.safetensors')
            save_file(weights, path)
        os.utime(path, (1.7e9 + 10 * n,) * 2)
    ckptfs.run('adopt', '--store', ckptfs.store, *([os.path.join(output, name) for name in names] if '.p' in names[0] else [output]))
    assert shown(ckptfs.mount(), 'a.weight') == len(names) - 1


@pytest.mark.parametrize('files', [
    {'G_800.pth': {}, 'G_900.pth': {}, 'G_1000.pth': {}}, {'8_net_G.pth': {}, '10_net_G.pth': {}},
    {'model_8_val_acc=0.91.pt': {}, 'model_10_val_acc=0.93.pt': {}}, {'step-800/lit_model.pth': {}, 'step-1000/lit_model.pth': {}},
    {'epoch_8.pth': {'epoch': 8, 'step': 90}, 'epoch_10.pth': {'epoch': 10, 'step': 10}},
    {'ckpt_900.pth': {'epoch': 8, 'step': 0}, 'ckpt_1000.pth': {'epoch': 9, 'step': 0}}], ids=lambda files: next(iter(files)))
def test_numbers_of_scripts_files_order_them(ckptfs, tmp_path, files):
    """They were copied in the order of their names' letters: the last of these is not the newest."""
    for place, name in enumerate(sorted(files)):
        os.makedirs(os.path.dirname(tmp_path / name), exist_ok=True)
        torch.save({'state_dict': {'w': torch.full((64,), 1.), 'b': torch.ones(4)}, **files[name]}, tmp_path / name)
        os.utime(tmp_path / name, (time.time() - 1000 + place,) * 2)
    ckptfs.run('adopt', '--name', 'run', *(tmp_path / name for name in files), '--store', ckptfs.store)
    newest = json.loads(ckptfs.run('resolve', 'run', '--store', ckptfs.store, '--json').stdout)['source']
    assert newest.endswith(list(files)[-1]), newest


def test_the_best_of_epochs_is_of_its_own_epoch(ckptfs, tmp_path):
    """It was copied last."""
    for place, (name, epoch) in enumerate([('epoch_10.pth', 10), ('epoch_8.pth', 8), ('epoch_9.pth', 9), ('model_best.pth', 4)]):
        torch.save({'state_dict': {'w': torch.full((64,), float(epoch)), 'b': torch.ones(4)}, 'epoch': epoch}, tmp_path / name)
        os.utime(tmp_path / name, (time.time() - 1000 + place,) * 2)
    ckptfs.run('adopt', '--name', 'run', *tmp_path.glob('*.pth'), '--store', ckptfs.store)
    assert shown(ckptfs.mount()) == 10


def test_a_trainers_step_under_another_name_has_its_own_number(ckptfs, tmp_path):
    for place, step in enumerate((1000, 800, 900)):
        save(str(tmp_path / 'out'), step, step)
        os.rename(tmp_path / 'out' / f'checkpoint-{step}', tmp_path / 'out' / f'checkpoint-1-{step}')
        for name in os.listdir(tmp_path / 'out' / f'checkpoint-1-{step}'):
            os.utime(tmp_path / 'out' / f'checkpoint-1-{step}' / name, (time.time() - 1000 + place,) * 2)
    ckptfs.run('adopt', '--name', 'run', *sorted((tmp_path / 'out').iterdir()), '--store', ckptfs.store)
    assert shown(ckptfs.mount()) == 1000


@pytest.mark.parametrize('by', ['the job', 'a copy'])
def test_a_smaller_iteration_that_arrives_is_a_life_if_its_tool_saved_it(ckptfs, by):
    """A copy of a finished run brings its steps in any order, and what is written last not last."""
    output = os.path.join(ckptfs.folder, 'output')
    for step in (800, 1000):
        save(output, step, step)
    _, mount = ckptfs.start('--follow', output)
    wait_until(lambda: shown(mount) == 1000, 'the steps that were there')
    save(os.path.join(ckptfs.folder, 'made'), 900, 900)
    made, there = (os.path.join(ckptfs.folder, folder, 'checkpoint-900') for folder in ('made', 'output'))
    os.mkdir(there)
    for name in sorted(os.listdir(made), key=lambda name: (name == 'trainer_state.json') == (by == 'the job')):
        shutil.copyfile(os.path.join(made, name), os.path.join(there, name))
        time.sleep(0.02)
    wait_until(lambda: 'output/checkpoint-900' in ckptfs.run('list', '--store', ckptfs.store).stdout, 'the step that came')
    if by == 'the job':
        wait_until(lambda: shown(mount) == 900, 'where the job has gone back')
    assert shown(mount) == (900 if by == 'the job' else 1000)
    assert agreed(ckptfs) == ('checkpoint-900' if by == 'the job' else 'checkpoint-1000')


@pytest.mark.parametrize('between', [True, False])
def test_versions_of_names_are_of_a_later_run(ckptfs, between):
    """Lightning writes epoch=0-step=3-v1.ckpt beside what an earlier run left."""
    output = os.path.join(ckptfs.folder, 'output')

    def fit(steps):
        keep = ModelCheckpoint(dirpath=output, every_n_train_steps=3, save_top_k=-1, save_last=True)
        trainer = lightning.Trainer(max_steps=steps, accelerator='cpu', logger=False, enable_progress_bar=False, callbacks=[keep],
                                    enable_model_summary=False)
        trainer.fit(LinearModule(), torch.utils.data.DataLoader(torch.rand(64, 4), batch_size=4))
        return trainer.lightning_module.state_dict()
    fit(9)
    if between:
        ckptfs.adopt(output)
        assert agreed(ckptfs) == 'epoch=0-step=9.ckpt'
    weights = fit(6)
    assert 'its name says that another save had it before' in ckptfs.adopt(output).stderr
    assert agreed(ckptfs) == 'epoch=0-step=6-v1.ckpt'
    assert [(one['life'], one['id']) for one in ckptfs.list()['steps'] if '-v1' in one['id'] or '=9' in one['id']] == [
        (1, 'epoch=0-step=9.ckpt'), (2, 'epoch=0-step=3-v1.ckpt'), (2, 'last-v1.ckpt'), (2, 'epoch=0-step=6-v1.ckpt')]
    got = torch.load(os.path.join(ckptfs.mount(), 'view', 'tp1', 'rank0', 'model.pt'))
    assert all(torch.equal(got[name], value) for name, value in weights.items())


def test_an_old_step_that_somebody_edits_begins_no_life(ckptfs):
    """Its weights were cast in place; what its tool writes last is as it was."""
    output = os.path.join(ckptfs.folder, 'output')
    for step in (2, 6):
        save(output, step, step)
    ckptfs.adopt(output)
    time.sleep(0.3)
    save_file({'w': torch.full((64,), 22.)}, os.path.join(ckptfs.folder, 'edited.safetensors'), {'format': 'pt'})
    with open(os.path.join(ckptfs.folder, 'edited.safetensors'), 'rb') as edited, \
            open(os.path.join(output, 'checkpoint-2', 'model.safetensors'), 'wb') as file:
        file.write(edited.read())
    assert 'begins another life' not in ckptfs.adopt(output).stderr
    assert agreed(ckptfs) == 'checkpoint-6'


def test_a_finished_run_is_one_life_however_it_is_adopted(ckptfs):
    output = os.path.join(ckptfs.folder, 'output')
    for step in (100, 200, 300):
        save(output, step, step)
    for step in (300, 100, 200):
        ckptfs.adopt(os.path.join(output, f'checkpoint-{step}'))
    assert agreed(ckptfs) == 'checkpoint-300'
    # Copied without its times, the last step first.
    copied = os.path.join(ckptfs.folder, 'copied', 'output')
    for step in (300, 100, 200):
        shutil.copytree(os.path.join(output, f'checkpoint-{step}'), os.path.join(copied, f'checkpoint-{step}'),
                        copy_function=shutil.copyfile)
        for name in os.listdir(os.path.join(copied, f'checkpoint-{step}')):
            os.utime(os.path.join(copied, f'checkpoint-{step}', name))
    said = ckptfs.adopt(copied, 'copied').stderr
    assert json.loads(ckptfs.run('resolve', '--store', ckptfs.store, 'copied', '--json').stdout)['iteration'] == 300
    assert {one['life'] for one in ckptfs.list()['steps']} == {1}
    assert 'copied/checkpoint-200 has a later time than copied/checkpoint-300' in said


def test_a_mount_says_that_the_step_it_shows_is_gone(ckptfs):
    output = os.path.join(ckptfs.folder, 'output')
    save(output, 3, 13)
    save(output, 6, 16)
    ckptfs.adopt(output)
    shutil.rmtree(os.path.join(output, 'checkpoint-6'))
    path = ckptfs.mountpoint()
    said = ckptfs.run('mount', '--store', ckptfs.store, *ckptfs.reserve, path).stderr
    assert 'output/checkpoint-6' in said and 'no longer there' in said


def branch(store, model, optimizer, steps, truths):
    """Saves steps of one life of a job, each durable."""
    with snapshots.Snapshotter(model, optimizer, run='job', store=store) as snap:
        for step in steps:
            model(torch.randn(4, 100)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            truths.append(model.weight.detach().clone())
            assert snap.save(step) and snap.wait_durable(step, 60)


def test_after_a_rollback_latest_is_what_was_saved_last(ckptfs):
    ckptfs.start()
    model = torch.nn.Linear(100, 100)
    optimizer, truths = torch.optim.Adam(model.parameters()), []

    def saved(step):
        with snapshots.SavedStep(f'ckptfs://{ckptfs.store}/job/{step}') as one:
            return one.model()['weight']

    branch(ckptfs.store, model, optimizer, range(100, 106), truths)
    assert torch.equal(saved('latest'), truths[5])
    with torch.no_grad():
        model.weight.copy_(saved(102))
    branch(ckptfs.store, model, optimizer, (103, 104), truths)
    assert torch.equal(saved('latest'), truths[-1])
    assert torch.equal(saved(104), truths[-1]) and torch.equal(saved(103), truths[-2])
    lives = [(one['id'], one['life']) for one in ckptfs.list()['steps']]
    assert lives == [(str(n), 1) for n in range(100, 106)] + [('103-1', 2), ('104-1', 2)]
    ckptfs.run('gc', '--store', ckptfs.store, '--keep-last', '2')
    # A step that somebody has open stays until the next time.
    kept = [one['id'] for one in ckptfs.list()['steps']]
    assert kept[-2:] == ['103-1', '104-1'] and not {'104', '105'} & set(kept), kept


def test_a_mount_that_was_switched_follows_again(ckptfs):
    output = os.path.join(ckptfs.folder, 'output')
    for step in (1, 2):
        save(output, step, step)
    _, mount = ckptfs.start('--follow', output)
    wait_until(lambda: shown(mount) == 2, 'the steps that were there')
    ckptfs.run('switch', '--store', ckptfs.store, 'output/checkpoint-1')
    assert shown(mount) == 1
    ckptfs.run('switch', '--store', ckptfs.store, 'output/latest')
    assert shown(mount) == 2
    save(output, 3, 3)
    wait_until(lambda: shown(mount) == 3, 'the next step')
