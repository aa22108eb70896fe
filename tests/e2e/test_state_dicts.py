# SPDX-License-Identifier: Apache-2.0
"""Torch files as scripts write them: the model is the dict that nn.Module.state_dict() returned, whatever it is
called and whatever stands beside it, and nothing that is left out goes without a line."""
import argparse
import json
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from daemon import checkpoint, step_of


def layers(*sizes):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])))


torch.manual_seed(0)
MODULE = layers(16, 32, 8)
OPTIMIZER = torch.optim.AdamW(MODULE.named_parameters(), lr=1e-2)  # with names: whose states are whose is certain
MODULE(torch.randn(4, 16)).sum().backward()
OPTIMIZER.step()
MODEL = MODULE.state_dict()
OTHER = layers(16, 8, 8, 4).state_dict()
EMA = {name: tensor / 2 for name, tensor in MODEL.items()}
PLAIN = {name: tensor.clone() for name, tensor in MODEL.items()}  # without torch's mark
SEED = torch.get_rng_state()
CENTRE = nn.Module()
CENTRE.register_buffer('center', torch.randn(1, 8))
DDP = nn.Module()
DDP.module = MODULE
COMPILED = {f'_orig_mod.{name}': tensor for name, tensor in MODEL.items()}


class Pickled(nn.Module):
    """As ultralytics saves: the module itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)


# name: (what is saved, the model in it, words that adopt says, words that it does not)
TAKEN = {
    'loss': ({'model': MODEL, 'optimizer': OPTIMIZER.state_dict(), 'model_args': {'n_layer': 2}, 'iter_num': 100,
              'best_val_loss': torch.tensor(2.5), 'config': {'a': 1}}, MODEL, (), ('left out',)),
    'net': ({'epoch': 1, 'net': MODEL}, MODEL, (), ('left out',)),
    'params': ({'params': PLAIN, 'acc': 3}, MODEL, (), ('left out',)),
    'generator': ({'generator': PLAIN, 'loss': torch.ones(1)}, MODEL, (), ('left out',)),
    'transformer': ({'transformer': MODEL, 'rng': SEED}, MODEL, (), ('left out',)),
    'two_levels': ({'state': {'model': MODEL}, 'val.loss': torch.ones(1)}, MODEL, (), ('left out',)),
    'a_tensor_beside': ({'prototypes': torch.randn(5, 7), 'model': PLAIN}, MODEL, (), ('left out',)),
    'many_losses': ({'losses': {f'at.{i}': torch.tensor(1. * i) for i in range(99)}, 'weights_of_it': MODEL}, MODEL, (), ('left out',)),
    'arguments': ({'args': argparse.Namespace(lr=0.1), 'model': MODEL}, MODEL, (), ('left out',)),
    'flat': ({**{f'model.{k}': v for k, v in MODEL.items()}, 'optimizer.state.0.exp_avg': torch.ones(3, 3),
              'optimizer.param_groups.0.lr': torch.tensor(0.1)}, MODEL, ("'optimizer.state.0.exp_avg'",), ()),
    'top': ({**PLAIN, 'epoch': 3, 'seed': 1, 'name': 'x', 'lr': 0.1, 'optimizer': OPTIMIZER.state_dict()}, MODEL, (), ('left out',)),
    'ddp': ({'model': DDP.state_dict()}, DDP.state_dict(), (), ('left out',)),
    'timm': ({'epoch': 1, 'arch': 'vit', 'state_dict': MODEL, 'optimizer': OPTIMIZER.state_dict(), 'version': 2, 'metric': 0.5,
              'args': argparse.Namespace(lr=0.1), 'state_dict_ema': EMA, 'amp_scaler': {'scale': 1.}}, MODEL,
             ("'state_dict_ema'", '--model KEY'), ("'optimizer'",)),
    'mmengine': ({'meta': {'epoch': 1, 'seed': 3}, 'state_dict': MODEL, 'message_hub': {'log_scalars': {}},
                  'optimizer': OPTIMIZER.state_dict(), 'param_schedulers': [{'last_step': 3}]}, MODEL, (), ('left out',)),
    'fairseq': ({'args': None, 'cfg': {'a': 1}, 'model': MODEL, 'criterion': None, 'optimizer_history': [{'num_updates': 3}],
                 'task_state': {}, 'extra_state': {'x': 1}, 'last_optimizer_state': OPTIMIZER.state_dict()}, MODEL, (), ('left out',)),
    'ddp_and_ema': ({'model': DDP.state_dict(), 'model_ema': EMA, 'optimizer': OPTIMIZER.state_dict()}, DDP.state_dict(),
                    ("'model_ema'", '--model KEY'), ()),
    'compiled_and_ema': ({'model': COMPILED, 'ema': EMA, 'optimizer': OPTIMIZER.state_dict()}, COMPILED, ("'ema'", '--model KEY'), ()),
    'student': ({'student': MODEL, 'teacher': EMA}, MODEL, ("'teacher'", '--model KEY'), ()),
    'dino': ({'student': MODEL, 'teacher': EMA, 'optimizer': OPTIMIZER.state_dict(), 'epoch': 3, 'dino_loss': CENTRE.state_dict()},
             MODEL, ('--model KEY',), ("'optimizer'",)),
    'statistics': ({'policy': MODEL, 'normalizer': {'mean': torch.zeros(16), 'std': torch.ones(16)}}, MODEL, (), ('left out',)),
    'own_optimizer': ({'model': MODEL, 'optim': {'moments': {'a': torch.ones(3)}}}, MODEL, ("'optim'",), ()),
    'two_optimizers': ({'model': MODEL, 'opt': OPTIMIZER.state_dict(), 'opt_of_it': OPTIMIZER.state_dict()}, MODEL, ("'opt' and 1 more",), ()),
    'bare': (MODEL, MODEL, (), ('left out',)),
    'the_same_twice': ({'model': MODEL, 'state_dict': MODEL}, MODEL, (), ()),
}
# Their optimizers are taken, of parameters with these words before their names.
TRAINED = {**dict.fromkeys(('loss', 'top', 'timm', 'mmengine', 'fairseq', 'dino'), ''),
           'ddp_and_ema': 'module.', 'compiled_and_ema': '_orig_mod.'}

REFUSED = {
    'gan': ({'generator': MODEL, 'discriminator': OTHER}, ("'generator', 'discriminator'", '--model KEY')),
    'pipeline': ({'text_encoder': MODEL, 'unet': OTHER, 'vae': layers(4, 4).state_dict()}, ("'text_encoder', 'unet', 'vae'",)),
    'alike': ({'actor': MODEL, 'critic': PLAIN}, ("'actor', 'critic'",)),
    'module': ({'model': Pickled(), 'epoch': 1, 'best': torch.tensor(0.5)}, ("'model' is a pickled module (", 'Pickled', 'state_dict()')),
    'whole': (Pickled(), ('pickled module (',)),
    'numbers': ({'best': torch.tensor(0.5), 'epoch': 3}, ('not hold a dict of named tensors', "'best', 'epoch'")),
    'seed': ({'rng': SEED, 'epoch': 3}, ('not hold a dict of named tensors',)),
    'tensor': (torch.ones(3, 4), ('a tensor by itself',)),
    'list': ([torch.ones(3, 4)], ('not hold a dict of named tensors',)),
    'optimizer': (OPTIMIZER.state_dict(), ("optimizer's",)),
}


def same(got, want):
    return sorted(got) == sorted(want) and all(torch.equal(got[name], tensor) for name, tensor in want.items())


@pytest.fixture(scope='module')
def adopted(tmp_path_factory):
    """(the mount, {form: what adopt said}) of every form that is taken."""
    import daemon
    folder = tmp_path_factory.mktemp('forms')
    program = daemon.Ckptfs(str(folder))
    said = {}
    for name, (state, *_) in TAKEN.items():
        torch.save(state, folder / f'{name}.pt')
        said[name] = program.adopt(folder / f'{name}.pt', name, check=False)
    yield program.mount(), said
    program.close()


def rank_file(mount, name, file, step=None):
    return load_file(os.path.join(step_of(mount, name, step or f'{name}.pt'), 'view', 'tp1', 'rank0', f'{file}.safetensors'))


@pytest.mark.parametrize('form', TAKEN)
def test_the_state_dict_is_the_model(adopted, form):
    mount, said = adopted
    _, model, words, not_said = TAKEN[form]
    done = said[form]
    assert done.returncode == 0, done.stderr
    assert same(rank_file(mount, form, 'model'), model)
    for word in words:
        assert word in done.stderr
    for word in not_said:
        assert word not in done.stderr
    optimizer = rank_file(mount, form, 'optimizer')
    if form not in TRAINED:
        assert optimizer == {}
        return
    for number, (name, _) in enumerate(MODULE.named_parameters()):
        assert torch.equal(optimizer[f'exp_avg/{TRAINED[form]}{name}'], OPTIMIZER.state_dict()['state'][number]['exp_avg'])


@pytest.mark.parametrize('form', REFUSED)
def test_what_is_not_one_model_is_refused_by_name(ckptfs, tmp_path, form):
    state, words = REFUSED[form]
    torch.save(state, tmp_path / 'ckpt.pt')
    done = ckptfs.adopt(tmp_path / 'ckpt.pt', check=False)
    assert done.returncode == 4, (done.stdout, done.stderr)
    for word in words:
        assert word in done.stderr, done.stderr


def test_a_key_chooses(ckptfs, tmp_path):
    torch.save({'G': MODEL, 'D': OTHER, 'nested': {'a': PLAIN, 'b': EMA}, 'again': OTHER}, tmp_path / 'gan.pt')
    wanted = {'g': ('G', MODEL), 'd': ('D.', OTHER), 'n': ('nested.b', EMA), 'e': ('again', OTHER),
              'u': ('nested', {f'{part}.{name}': tensor for part, of in (('a', MODEL), ('b', EMA)) for name, tensor in of.items()})}
    for run, (key, _) in wanted.items():
        ckptfs.adopt(tmp_path / 'gan.pt', run, extra=('--model', key))
    mount = ckptfs.mount()
    for run, (_, want) in wanted.items():
        assert same(rank_file(mount, run, 'model', 'gan.pt'), want), run
    done = ckptfs.adopt(tmp_path / 'gan.pt', extra=('--model', 'H'), check=False)
    assert done.returncode == 4 and "'G', 'D'" in done.stderr, done.stderr


def test_a_key_of_a_dcp_directory(ckptfs, tmp_path):
    dcp.save({'generator': MODEL, 'discriminator': OTHER}, checkpoint_id=str(tmp_path / 'gan' / 'step-1'), no_dist=True)
    done = ckptfs.adopt(tmp_path / 'gan', check=False)
    assert done.returncode == 4, done.stderr
    for word in "'discriminator'", "'generator'", '--model KEY':
        assert word in done.stderr, done.stderr
    ckptfs.adopt(tmp_path / 'gan', 'd', extra=('--model', 'discriminator'))
    assert same(rank_file(ckptfs.mount(), 'd', 'model', 'step-1'), OTHER)


def test_what_stands_beside_the_model_is_carried(ckptfs, tmp_path):
    torch.save({'model': MODEL, 'iter_num': 7, 'lr_scheduler': {'last_epoch': 3}, 'rng': SEED}, tmp_path / 'ckpt.pt')
    done = json.loads(ckptfs.adopt(tmp_path / 'ckpt.pt', 'run', extra=['--json']).stdout)
    assert [step['iteration'] for step in done['steps']] == [7]


@pytest.mark.parametrize('model', [False, True])
def test_a_key_is_not_ignored(ckptfs, tmp_path, model):
    from safetensors.torch import save_file
    save_file(PLAIN, tmp_path / 'model.safetensors')
    done = ckptfs.adopt(tmp_path / 'model.safetensors', extra=('--model', 'x') if model else (), check=False)
    assert (done.returncode == 4 and 'one model' in done.stderr) == model, done.stderr


def test_a_state_flattened_into_safetensors(ckptfs, tmp_path):
    """Its optimizer and its average are not taken for parameters of the model."""
    from safetensors.torch import save_file
    state = {f'{part}.{name}': tensor.clone() for part, of in (('model', MODEL), ('ema', EMA)) for name, tensor in of.items()}
    for number, states in OPTIMIZER.state_dict()['state'].items():
        state.update({f'optimizer.state.{number}.{kind}': value.clone() for kind, value in states.items()})
    save_file(state, tmp_path / 'all.safetensors')
    said = ckptfs.adopt(tmp_path / 'all.safetensors', 'run').stderr
    assert same(rank_file(ckptfs.mount(), 'run', 'model', 'all.safetensors'), MODEL)
    assert "'ema.0.bias'" in said and "'optimizer.state.0.exp_avg'" in said, said
    ckptfs.adopt(tmp_path / 'all.safetensors', 'ema', extra=('--model', 'ema'))
    assert same(rank_file(ckptfs.mount(), 'ema', 'model', 'all.safetensors'), EMA)


def test_buffers_are_the_same_of_every_source(ckptfs, tmp_path):
    from safetensors.torch import save_file
    state = {'enc.weight': torch.randn(8, 8), 'enc.inv_freq': torch.randn(4), 'enc.masked_bias': torch.tensor([1.0, 2.0]),
             'bn.running_mean': torch.randn(8), 'bn.num_batches_tracked': torch.tensor(3), 'h.0.attn.bias': torch.ones(1, 1, 8, 8),
             'h.0.attn.c.bias': torch.ones(8), 'moe.gate.e_score_correction_bias': torch.ones(4), 'scale': torch.ones(3)}
    (tmp_path / 'safe').mkdir()
    save_file(state, tmp_path / 'safe' / 'model.safetensors', metadata={'format': 'pt'})
    torch.save({'net': state}, tmp_path / 'torch.pt')
    dcp.save({'model': state}, checkpoint_id=str(tmp_path / 'dcp' / 'step-1'), no_dist=True)
    for source in 'safe', 'torch.pt', 'dcp':
        ckptfs.adopt(tmp_path / source, source.split('.')[0])
    mount = ckptfs.mount()
    kept = {name for name in state if name not in ('enc.weight', 'h.0.attn.c.bias', 'scale')}
    for source in 'safe', 'torch', 'dcp':
        got = load_file(os.path.join(step_of(mount, source), 'view', 'bf16', 'rank0', 'model.safetensors'))
        assert {name for name, tensor in got.items() if tensor.dtype == state[name].dtype} == kept, source
        assert all(got[name].dtype == torch.bfloat16 for name in state if name not in kept)


def test_a_frequency_that_an_optimizer_trains_is_a_parameter(ckptfs, tmp_path):
    module = nn.Module()
    module.inv_freq, module.weight = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4, 4))
    optimizer = torch.optim.AdamW(module.named_parameters())
    (module.inv_freq.sum() + module.weight.sum()).backward()
    optimizer.step()
    torch.save({'model': module.state_dict(), 'optimizer': optimizer.state_dict()}, tmp_path / 'ckpt.pt')
    ckptfs.adopt(tmp_path / 'ckpt.pt', 'run')
    mount = ckptfs.mount()
    assert 'exp_avg/inv_freq' in rank_file(mount, 'run', 'optimizer', 'ckpt.pt')
    got = load_file(os.path.join(step_of(mount, 'run'), 'view', 'bf16', 'rank0', 'model.safetensors'))
    assert got['inv_freq'].dtype == torch.bfloat16


def test_the_trained_model_beside_its_average_has_the_optimizer(ckptfs, tmp_path):
    state = {'meta': {}, 'message_hub': {}, 'state_dict': EMA, 'ema_state_dict': MODEL, 'optimizer': OPTIMIZER.state_dict()}
    torch.save(state, tmp_path / 'ckpt.pt')
    done = ckptfs.adopt(tmp_path / 'ckpt.pt', 'average')
    assert 'average' in done.stderr and '--model ema_state_dict' in done.stderr, done.stderr
    ckptfs.adopt(tmp_path / 'ckpt.pt', 'trained', extra=('--model', 'ema_state_dict'))
    mount = ckptfs.mount()
    assert same(rank_file(mount, 'average', 'model', 'ckpt.pt'), EMA) and rank_file(mount, 'average', 'optimizer', 'ckpt.pt') == {}
    assert same(rank_file(mount, 'trained', 'model', 'ckpt.pt'), MODEL)
    assert 'exp_avg/0.weight' in rank_file(mount, 'trained', 'optimizer', 'ckpt.pt')


ARRAYS = {name: tensor.numpy() for name, tensor in MODEL.items()}
HEAD = {'fc.weight': torch.randn(3, 3), 'fc.bias': torch.randn(3)}


@pytest.mark.parametrize('state', [
    {'model': ARRAYS, 'pixel_mean': torch.randn(3), 'pixel_std': torch.randn(3)},
    {'model': ARRAYS, 'ema_weights': EMA},
    {'model': {0: torch.randn(3, 3), 1: torch.randn(3, 3)}, 'head': HEAD},
    {'params': list(MODULE.parameters()), 'norm': {'mean.w': torch.randn(6), 'std.w': torch.randn(6)}},
    {'model': b'PK', 'tokens': {'emb.weight': torch.randn(4, 4)}},
], ids=['arrays', 'arrays_and_average', 'numbers', 'list', 'bytes'])
def test_a_model_that_is_not_understood_makes_nothing_else_the_model(ckptfs, tmp_path, state):
    torch.save(state, tmp_path / 'ckpt.pt')
    done = ckptfs.adopt(tmp_path / 'ckpt.pt', 'run', check=False)
    (key,) = [key for key in state if key in ('model', 'params')]
    assert done.returncode == 4
    assert f"'{key}' has a model's name, but is not a dict of tensors by their names" in done.stderr
    other = '.' if 'pixel_mean' in state else next(name for name in state if name != key)
    assert f'--model {other}' in done.stderr
    ckptfs.adopt(tmp_path / 'ckpt.pt', 'run', extra=('--model', other))


def test_a_state_dict_of_arrays_is_named(ckptfs, tmp_path):
    torch.save({'backbone': ARRAYS, 'head': HEAD}, tmp_path / 'ckpt.pt')
    said = ckptfs.adopt(tmp_path / 'ckpt.pt', 'run').stderr
    assert "left out: 'backbone': it is a state_dict of arrays that are not tensors" in said


def test_packed_parameters_of_a_quantised_module_are_named(ckptfs, tmp_path):
    quantised = torch.ao.quantization.quantize_dynamic(layers(6, 5, 3), {nn.Linear}, dtype=torch.qint8)
    state = nn.ModuleDict({'emb': nn.Embedding(7, 6), 'fc': quantised}).state_dict()
    torch.save(state, tmp_path / 'ckpt.pt')
    said = ckptfs.adopt(tmp_path / 'ckpt.pt', 'run').stderr
    assert "left out: 'fc.0._packed_params._packed_params' of the module and 3 more: it is not a tensor" in said


@pytest.mark.parametrize('number', [900, 900.0, torch.tensor(900), torch.tensor(900.0), torch.tensor(900, dtype=torch.int32)],
                         ids=['int', 'float', 'tensor', 'float_tensor', 'int32'])
def test_a_count_is_a_count_in_any_form(ckptfs, tmp_path, number):
    torch.save({'model': MODEL, 'iter_num': number}, tmp_path / 'ckpt.pt')
    ckptfs.adopt(tmp_path / 'ckpt.pt', 'file')
    for name, state in {'train_state': {'train_state': {'step': number}}, 'plain': {'iteration': number},
                        'composer': {'state': {'timestamp': {'Timestamp': {'batch': number}}}}}.items():
        dcp.save({'model': MODEL, **state}, checkpoint_id=str(tmp_path / name / 'ep0'), no_dist=True)
        ckptfs.adopt(tmp_path / name, name)
    assert {step['run']: step['iteration'] for step in ckptfs.list()['steps']} == dict.fromkeys(
        ('file', 'train_state', 'plain', 'composer'), 900)


def test_a_directory_that_is_called_latest(ckptfs, tmp_path):
    for name in 'best', 'latest':
        dcp.save({'model': MODEL}, checkpoint_id=str(tmp_path / 'run' / name), no_dist=True)
    assert set(ckptfs.adopt(tmp_path / 'run', 'run').stdout.split()) == {'run/best', 'run/latest-1'}
    assert ckptfs.adopt(tmp_path / 'run' / 'latest', 'again').stdout.split() == ['again/latest-1']


def test_adapters_beside_others_are_named(ckptfs, tmp_path):
    """As PEFT saves several, and beside a whole model."""
    from safetensors.torch import save_file
    step = tmp_path / 'out' / 'checkpoint-7'
    for folder in step, step / 'second':
        folder.mkdir(parents=True)
        save_file({'base_model.model.l.0.lora_A.weight': torch.randn(2, 6)}, folder / 'adapter_model.safetensors')
        (folder / 'adapter_config.json').write_text('{"peft_type": "LORA"}')
    assert "left out: 'second/': it is another adapter (PEFT)" in ckptfs.adopt(tmp_path / 'out').stderr
    save_file(PLAIN, step / 'model.safetensors', metadata={'format': 'pt'})
    said = ckptfs.adopt(tmp_path / 'out', extra=['--refresh']).stderr
    assert "left out: 'adapter_model.safetensors': it is an adapter (PEFT) beside a whole model" in said


def test_newer_weights_of_another_form_are_named(ckptfs, tmp_path):
    """save_pretrained with shards over a whole file leaves that, and loaders take it first."""
    own = tmp_path / 'run' / 'model'
    own.mkdir(parents=True)
    for shard, name in enumerate(('model.safetensors', 'model-00001-of-00001.safetensors')):
        save_file({'a.weight': torch.full((4, 4), float(shard))}, own / name)
    index = own / 'model.safetensors.index.json'
    index.write_text(json.dumps({'metadata': {}, 'weight_map': {'a.weight': 'model-00001-of-00001.safetensors'}}))
    os.utime(own / 'model.safetensors', (1_700_000_000, 1_700_000_000))
    assert "left out: 'model.safetensors.index.json': it is newer than model.safetensors" in ckptfs.adopt(own).stderr
    os.utime(index, (1_600_000_000, 1_600_000_000))
    assert 'left out' not in ckptfs.adopt(own, extra=['--refresh']).stderr


def test_tensors_without_elements_of_their_own_are_named_as_what_they_are(ckptfs, tmp_path):
    torch.save({'meta': torch.empty(2, device='meta')}, tmp_path / 'meta.pt')
    torch.save({'thin': torch.eye(3).to_sparse()}, tmp_path / 'thin.pt')
    torch.save({'whole': torch.ones(2), 'two': TwoTensor(torch.ones(2), torch.ones(2))}, tmp_path / 'two.pt')
    own = not dist.is_initialized()
    if own:
        dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.save({'part': distribute_tensor(torch.ones(4), init_device_mesh('cpu', (1,)), [Shard(0)])}, tmp_path / 'part.pt')
    finally:
        if own:
            dist.destroy_process_group()
    for file, said in (('meta', "'meta': not a plain tensor (it is on the meta device"), ('thin', "'thin': not a plain tensor (it is sparse)"),
                       ('two', "'two': it is a tensor of the class torch.testing._internal.two_tensor.TwoTensor"),
                       ('part', "'part': it is a DTensor, of which this file has what one rank holds; save with")):
        done = ckptfs.adopt(str(tmp_path / f'{file}.pt'), file, check=False)
        assert done.returncode != 0 and said in done.stderr, done.stderr


STATES = OPTIMIZER.state_dict()
BESIDE = {  # file: (what it holds, words of the line)
    'recipe_state/recipe_state.pt': ({'optimizer': STATES, 'seed': 1}, 'the optimizer in recipe_state/recipe_state.pt'),
    'training_state.pt': ({'optimizer': STATES, 'scheduler': {}, 'step': 3}, 'the optimizer in training_state.pt'),
    'optimizer.pth': (STATES, 'the optimizer in optimizer.pth'),
    'checkpoint.pth.tar': ({'model': MODEL, 'optimizer': STATES}, 'the optimizer in checkpoint.pth.tar'),
    'optimizer.safetensors': ({'state.0.exp_avg': torch.ones(3)}, 'the optimizer in optimizer.safetensors'),
    'value_head.safetensors': ({'v_head.weight': torch.ones(2, 3)}, "'value_head.safetensors'"),
    'non_lora_trainables.bin': ({'mm.weight': torch.ones(2, 3), 'mm.bias': torch.ones(2)}, "'non_lora_trainables.bin'"),
    'ema.pt': ({'model_ema': EMA}, "'ema.pt'"),
    'training_args.bin': (argparse.Namespace(lr=1), None), 'rng_state.pth': ({'cpu': SEED}, None), 'scheduler.pt': ({'last_epoch': 3}, None),
    'notes.pt': ({'text': 'x'}, None), 'pytorch_model.bin': (MODEL, None), 'broken.pt': (None, None)}


@pytest.mark.parametrize('file', BESIDE)
def test_tensors_in_files_beside_the_weights_are_named(ckptfs, tmp_path, file):
    holds, said = BESIDE[file]
    path = tmp_path / 'run' / file
    path.parent.mkdir(parents=True)
    if holds is None:
        path.write_bytes(b'PK\x03\x04' + bytes(50))
    elif file.endswith('.safetensors'):
        save_file(holds, path)
    else:
        torch.save(holds, path)
    save_file(PLAIN, tmp_path / 'run' / 'model.safetensors', {'format': 'pt'})
    done = ckptfs.adopt(str(tmp_path / 'run'), 'run')
    if said is None:
        assert 'left out' not in done.stderr, done.stderr
        return
    assert said in done.stderr and said in ckptfs.run('info', str(tmp_path / 'run')).stdout, done.stderr
    if 'optimizer' in said:
        assert ckptfs.run('adopt', str(tmp_path / 'run'), '--require', 'optimizer', '--store', ckptfs.store + '2', check=False).returncode != 0


@pytest.mark.parametrize('file', ['unet/diffusion_pytorch_model.safetensors', 'pytorch_lora_weights.safetensors', 'mm_projector.bin',
                                  'policy/adapter_model.safetensors'])
def test_weights_under_names_of_their_own_are_named_and_not_waited_for(ckptfs, tmp_path, file):
    """diffusers' hooks, LLaVA, PEFT's named adapters: a whole save of a tool, whose weights are elsewhere in it."""
    step = tmp_path / 'run' / 'checkpoint-3'
    (step / file).parent.mkdir(parents=True)
    torch.save(MODEL, step / file) if file.endswith('.bin') else save_file(PLAIN, step / file)
    torch.save(STATES, step / 'optimizer.bin')
    torch.save({'step': 3}, step / 'random_states_0.pkl')
    done = ckptfs.adopt(str(tmp_path / 'run'), 'run', check=False)
    assert done.returncode != 0 and file in done.stderr and 'no weights yet' not in done.stderr, done.stderr
    assert ckptfs.adopt(str(step / file), 'alone').returncode == 0


@pytest.mark.parametrize('variant,file', [('tp2', 'mp_rank_00_model_states.pt'), ('pp2', 'layer_00-model_00-model_states.pt'),
                                          ('zero3', 'zero_pp_rank_0_mp_rank_00_model_states.pt'),
                                          ('moe', 'layer_0_expert_0_mp_rank_00_model_states.pt')])
def test_a_file_of_one_of_deepspeeds_ranks_is_not_a_model(ckptfs, variant, file):
    path = os.path.join(checkpoint(variant), 'global_step5', file)
    done = ckptfs.run('adopt', path, '--store', ckptfs.store, check=False)
    assert done.returncode != 0 and "DeepSpeed's ranks" in done.stderr and 'adopt the directory' in done.stderr, done.stderr


@pytest.mark.parametrize('file,other,refused', [
    ('mp_rank_00/model_optim_rng.pt', 'mp_rank_01/model_optim_rng.pt', "Megatron's ranks"), ('consolidated.00.pth', 'consolidated.01.pth', "Meta's"),
    ('rank0.pt', 'rank1.pt', ''), ('w_tp-rank-0-of-2.pt', 'w_tp-rank-1-of-2.pt', ''), ('last-model_part-0.pt', 'last-model_part-1.pt', ''),
    ('ckpt_8_rank_0.pt', 'ckpt_9_rank_0.pt', None), ('frank1.pt', 'frank2.pt', None), ('consolidated.00.pth', 'other.pth', None)])
def test_other_ranks_files_are_named(ckptfs, tmp_path, file, other, refused):
    """Each rank's may be a part of the model, or all of it: nothing tells."""
    for name in (file, other):
        os.makedirs(os.path.dirname(tmp_path / name), exist_ok=True)
        torch.save({'model': {'a.weight': torch.randn(4, 4), 'a.bias': torch.randn(4)}}, tmp_path / name)
    done = ckptfs.run('adopt', tmp_path / file, '--store', ckptfs.store, check=not refused)
    if refused:
        assert done.returncode != 0 and f'is one of 2 files of {refused}' in done.stderr, done.stderr
    elif refused == '':
        assert f"left out: '{other}': the name differs in the number of a rank alone" in done.stderr, done.stderr
    else:
        assert 'left out' not in done.stderr, done.stderr


@pytest.mark.parametrize('form', ['file', 'folder', 'part', 'trainer'])
def test_a_model_beside_the_steps_is_named(ckptfs, tmp_path, form):
    """An average, a critic: the step has one model."""
    step = tmp_path / 'checkpoint-5'
    step.mkdir()
    if form == 'trainer':
        save_file(PLAIN, step / 'model.safetensors', {'format': 'pt'})
        (step / 'ema').mkdir()
        save_file(PLAIN, step / 'ema' / 'model.safetensors', {'format': 'pt'})
    else:
        dcp.save({'model': PLAIN}, checkpoint_id=str(step / 'model' if form == 'part' else step), no_dist=True)
        if form == 'part':  # as Automodel saves
            states = {'state': {name: {'exp_avg': one} for name, one in PLAIN.items()}, 'param_groups': [{'lr': 0.1, 'params': list(PLAIN)}]}
            dcp.save({'optim': states}, checkpoint_id=str(step / 'optim'), no_dist=True)
        if form == 'file':
            torch.save(PLAIN, step / 'ema.pt')
        else:
            dcp.save({'ema': PLAIN}, checkpoint_id=str(step / 'ema'), no_dist=True)
    said = ckptfs.adopt(step, 'run').stderr
    assert ("left out: 'ema.pt': " if form == 'file' else "left out: 'ema/': a step has one model") in said, said
