# SPDX-License-Identifier: Apache-2.0
"""Sources that say little of themselves, or spell things their own way.

Head sizes and families, names of wrapped models (with a real engine), tags
that are paths, and refusals that must say what they are about.
"""
import argparse
import io
import json
import os
import pickle
import shutil
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint._extension import StreamTransformExtension, ZStandard

import launch

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, '..', 'bench'))

from synthetic import make_filled  # noqa: E402

GOLDEN = os.path.join(HERE, '..', 'golden', 'deepspeed_tiny', 'ckpt')
TAG = 'global_step3'
HEADS = {'num_attention_heads': 4, 'num_key_value_heads': 2}


def save(directory, name, content):
    """torch.save into a directory that need not be there yet."""
    os.makedirs(directory, exist_ok=True)
    torch.save(content, os.path.join(directory, name))


def save_plain(directory, tensors, **more):
    """A stage-0 checkpoint of one rank: weights, and what `more` says."""
    save(directory, 'mp_rank_00_model_states.pt',
         {'module': tensors, 'buffer_names': [], 'optimizer': None,
          'global_steps': 5, 'dp_world_size': 1, 'mp_world_size': 1, **more})


def llama(layers=1):
    """4 heads of 16 with 2 key-value heads, no norms of q and k."""
    shapes = {'model.embed_tokens.weight': (64, 16),
              'model.norm.weight': (16,), 'lm_head.weight': (64, 16)}
    for i in range(layers):
        shapes.update({f'model.layers.{i}.{n}.weight': s for n, s in {
            'input_layernorm': (16,), 'post_attention_layernorm': (16,),
            'self_attn.q_proj': (64, 16), 'self_attn.k_proj': (32, 16),
            'self_attn.v_proj': (32, 16), 'self_attn.o_proj': (16, 64),
            'mlp.gate_proj': (64, 16), 'mlp.up_proj': (64, 16),
            'mlp.down_proj': (16, 64)}.items()})
    gen = torch.Generator().manual_seed(3)
    return {n: torch.rand(s, generator=gen) for n, s in shapes.items()}


def info(ckptfs, path, *words):
    """Returns what `ckptfs info` says of a path."""
    return json.loads(ckptfs.run('info', path, '--json', *words).stdout)


def refused(ckptfs, path, *words):
    """The error of `ckptfs info`."""
    done = ckptfs.run('info', path, *words, check=False)
    assert done.returncode != 0, done.stdout
    return done.stderr


def degrees(said):
    """The tensor-parallel degrees above 1 that rank files are shown for."""
    return [l for l in said['views']['rank']['shown']
            if l in ('tp2', 'tp4', 'tp8')]


def reasons(said):
    return ' '.join(said['views']['rank']['refused'])


def test_a_llama_is_cut_between_heads_only(ckptfs, tmp_path):
    run = tmp_path / 'out' / 'checkpoint-5'
    tag = run / 'global_step5'
    save_plain(tag, llama())
    unknown = info(ckptfs, run)
    assert unknown['family'] == 'llama' and degrees(unknown) == []
    assert 'head_dim' in reasons(unknown)
    assert '--family-set' in reasons(unknown)
    assert any('head_dim' in note for note in unknown['notes'])
    for word in ('head_dim=16', 'heads=4', 'num_attention_heads=4'):
        assert degrees(info(ckptfs, run, '--family-set', word)) == ['tp2']
    for folder in (tag, run, run.parent):
        (folder / 'config.json').write_text(json.dumps(HEADS))
        assert degrees(info(ckptfs, run)) == ['tp2'], folder
        assert degrees(info(ckptfs, tag)) == ['tp2'], folder
        (folder / 'config.json').unlink()
    assert degrees(info(ckptfs, run)) == []


@pytest.mark.parametrize('args', [
    argparse.Namespace(num_attention_heads=4, num_query_groups=2, group_query_attention=True),
    {'num_attention_heads': 4, 'num_query_groups': 2}], ids=['namespace', 'dict'])
def test_heads_are_in_megatrons_args(ckptfs, tmp_path, args):
    """As Megatron-DeepSpeed saves them, in the model states."""
    tag = tmp_path / 'run' / 'global_step5'
    save_plain(tag, llama())
    assert degrees(info(ckptfs, tag)) == []
    save_plain(tag, llama(), args=args)
    assert degrees(info(ckptfs, tag)) == ['tp2']
    # Four groups would have 64 rows, and there are 32: what contradicts the tensors tells nothing.
    save_plain(tag, llama(), args=argparse.Namespace(num_attention_heads=4, num_query_groups=4))
    assert degrees(info(ckptfs, tag)) == []


def test_a_config_that_contradicts_the_tensors_moves_no_cut(ckptfs, tmp_path):
    tag = tmp_path / 'run' / 'global_step5'
    save_plain(tag, llama())
    for wrong in ({'num_attention_heads': 8, 'head_dim': 4},
                  {'num_attention_heads': 4, 'num_key_value_heads': 4},
                  {'num_attention_heads': 7}):
        (tag / 'config.json').write_text(json.dumps(wrong))
        said = info(ckptfs, tag)
        assert degrees(said) == [], wrong
        assert any('config.json: not used' in n for n in said['notes'])
    assert degrees(info(ckptfs, tag, '--family-set', 'heads=4',
                        '--family-set', 'kv_heads=2')) == ['tp2']
    assert 'q_rows = 64' in refused(ckptfs, tag, '--family-set', 'heads=8',
                                    '--family-set', 'head_dim=4')


def test_heads_travel_with_a_copy(ckptfs, tmp_path):
    run = tmp_path / 'run'
    save_plain(run / 'global_step5', llama())
    (run / 'config.json').write_text(json.dumps(HEADS))
    ckptfs.adopt(run, extra=['--copy'])
    mount = ckptfs.mount()
    shutil.rmtree(run)
    for rank in range(2):
        shown = load_file(f'{mount}/view/tp2/rank{rank}/model.safetensors')
        name = 'model.layers.0.self_attn.k_proj.weight'
        assert torch.equal(shown[name], llama()[name].chunk(2)[rank])
    assert not os.path.exists(f'{mount}/view/tp4/rank0')


def test_a_family_of_ones_own_travels_with_the_step(ckptfs, tmp_path):
    rules = tmp_path / 'mine.toml'
    rules.write_text('''name = "mine"
[[rule]]
match = "body.{layer}.weight"
pattern = "column"
[[rename]]
plain = "body.{layer}.{rest}"
pipe = "{layer+1}.{rest}"
''')
    weights = {f'body.{i}.weight': torch.rand(4, 4) for i in range(2)}
    save_plain(tmp_path / 'run' / 'global_step5', weights)
    ckptfs.adopt(tmp_path / 'run', extra=['--family', rules])
    mount = ckptfs.mount()
    rules.unlink()
    shown = load_file(f'{mount}/view/tp1_pipe/rank0/model.safetensors')
    assert sorted(shown) == ['1.weight', '2.weight']
    assert torch.equal(shown['2.weight'], weights['body.1.weight'])


def test_families_that_do_not_fit_are_said(ckptfs, tmp_path):
    tag = tmp_path / 'run' / 'global_step5'
    save_plain(tag, {f'policy.{k}': v for k, v in llama().items()})
    assert 'no family' not in ' '.join(info(ckptfs, tag)['notes'])  # the rules hold below a module
    save_plain(tag, {f'{k}.of_it': v for k, v in llama().items()})
    notes = ' '.join(info(ckptfs, tag)['notes'])
    assert "no family matches any of the 12 parameters" in notes
    assert 'none of its rules' in refused(ckptfs, tag, '--family', 'gpt2')


def test_buffers_of_files_that_do_not_name_them_are_told_by_their_names(ckptfs, tmp_path):
    tensors = {'a.weight': torch.rand(4, 4), 'bn.running_mean': torch.rand(4), 'rope.inv_freq': torch.rand(4), 'seen': torch.tensor(3)}
    save(tmp_path / 'run' / 'global_step5', 'mp_rank_00_model_states.pt',
         {'module': tensors, 'optimizer': None, 'global_steps': 5, 'dp_world_size': 1, 'mp_world_size': 1})
    ckptfs.adopt(tmp_path / 'run')
    shown = load_file(f'{ckptfs.mount()}/view/bf16/rank0/model.safetensors')
    assert {name for name, tensor in shown.items() if tensor.dtype == tensors[name].dtype} == set(tensors) - {'a.weight'}


# ---- names ----------------------------------------------------------------

class Wrapped(torch.nn.Module):
    """Every wrapper's word in a name, and the same name without it."""

    def __init__(self):
        super().__init__()
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper \
            import checkpoint_wrapper
        torch.manual_seed(5)

        def holder(**parts):
            box = torch.nn.Module()
            for name, part in parts.items():
                box.add_module(name, part)
            return box
        self.a = torch.nn.Linear(8, 8)
        self.module = holder(a=torch.nn.Linear(8, 8))
        self.base_model = holder(model=holder(
            a=holder(base_layer=torch.nn.Linear(8, 8, bias=False))))
        self._orig_mod = torch.nn.Linear(8, 8, bias=False)
        self.again = checkpoint_wrapper(torch.nn.Linear(8, 8))

    def parts(self):
        return (self.a, self.module.a, self.base_model.model.a.base_layer,
                self._orig_mod)

    def forward(self, x):
        for part in self.parts():
            x = torch.tanh(part(x))
        return self.again(x).square().mean()


def engine_of(model, universal, stage):
    """An engine on one process, with Adam."""
    import deepspeed
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo', verbose=False)
    config = {'train_micro_batch_size_per_gpu': 1,
              'zero_allow_untested_optimizer': True,
              'zero_optimization': {'stage': stage},
              'checkpoint': {'load_universal': universal}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer,
                                config=config)[0]


def step_once(engine, seed):
    gen = torch.Generator().manual_seed(seed)
    loss = engine(torch.rand(1, 8, generator=gen))
    engine.backward(loss)
    engine.step()
    return float(loss)


def save_wrapped(run, truth, stage):
    engine = engine_of(Wrapped(), False, stage)
    for seed in range(3):
        step_once(engine, seed)
    engine.save_checkpoint(run, tag=TAG)
    weights = {n: p.detach().clone()
               for n, p in engine.module.named_parameters()}
    torch.save((weights, step_once(engine, 9)), truth)


def load_wrapped(view, truth, stage):
    weights, after = torch.load(truth)
    engine = engine_of(Wrapped(), True, stage)
    path, _ = engine.load_checkpoint(view, tag=TAG)
    assert path is not None
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter.detach(), weights[name]), name
    assert step_once(engine, 9) == after


@pytest.mark.parametrize('stage', [1, 2])
def test_wrapped_models_are_asked_for_by_their_own_names(ckptfs, tmp_path,
                                                         stage):
    run, truth = str(tmp_path / 'run'), str(tmp_path / 'truth.pt')
    log = str(tmp_path / 'log')
    assert launch.launch(save_wrapped, 1, (run, truth, stage), log), \
        launch.errors_of(log, 1)
    mount = ckptfs.mount(adopt=[run])
    weights, _ = torch.load(truth)
    assert {'a.weight', 'module.a.weight', '_orig_mod.weight',
            'base_model.model.a.base_layer.weight',
            'again._checkpoint_wrapped_module.weight'} < set(weights)
    shown = load_file(f'{mount}/view/tp1/rank0/model.safetensors')
    assert sorted(shown) == sorted(weights)
    for name, weight in weights.items():
        assert torch.equal(shown[name], weight), name
    view = f'{mount}/view/dp1_zero{stage}/deepspeed'
    if not os.path.isdir(view):
        view = f'{mount}/view/zero{stage}/deepspeed'
    assert sorted(set(os.listdir(f'{view}/{TAG}/zero'))
                  - {'optimizer_state.pt'}) == sorted(weights)
    assert launch.launch(load_wrapped, 1, (view, truth, stage), log), \
        launch.errors_of(log, 1)


def test_peft_names_are_kept_and_cut_by_the_base_models_rules(ckptfs,
                                                              tmp_path):
    def spelled(name):
        name = name.replace('q_proj.weight', 'q_proj.base_layer.weight')
        return f'base_model.model.{name}'
    weights = {spelled(k): v for k, v in llama().items()}
    save_plain(tmp_path / 'run' / 'global_step5', weights)
    ckptfs.adopt(tmp_path / 'run', extra=['--family-set', 'heads=4'])
    mount = ckptfs.mount()
    name = 'base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight'
    for rank in range(2):
        shown = load_file(f'{mount}/view/tp2/rank{rank}/model.safetensors')
        assert sorted(shown) == sorted(weights)
        assert torch.equal(shown[name], weights[name].chunk(2)[rank])


# ---- tags, degrees and refusals --------------------------------------------

def test_a_tag_may_be_a_path(ckptfs, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(f'{GOLDEN}/{TAG}', run / 'epoch1' / TAG)
    (run / 'latest').write_text(f'epoch1/{TAG}')
    shutil.copytree(f'{GOLDEN}/{TAG}', run / 'epoch2' / 'last')
    for path in (run, run / 'epoch1', run / 'epoch1' / TAG):
        assert f'run/epoch1-{TAG}' in ckptfs.adopt(path).stdout.split(), path
    assert {step['id'] for step in ckptfs.list()['steps']} == {f'epoch1-{TAG}', 'epoch2-last'}
    mount = ckptfs.mount()
    step = f'{mount}/run/run/step/epoch1-{TAG}/source'
    assert open(f'{step}/latest', encoding='ascii').read() == f'epoch1/{TAG}' and os.listdir(f'{step}/epoch1/{TAG}')
    ckptfs.umount(mount)
    for bad in ('../run', '/etc', 'epoch1//x', 'epoch1/../..', '.'):
        (run / 'latest').write_text(bad)
        assert 'latest' in refused(ckptfs, run), bad


def synthetic(directory, shards, dp, **info_lists):
    """A ZeRO-3 checkpoint with only what DeepSpeed's converter reads."""
    names = list(shards)
    for tp in range(len(shards[names[0]])):
        flat = torch.cat([shards[n][tp].reshape(-1) for n in names])
        shapes = [{n: list(shards[n][tp].shape) for n in names}]
        for rank, part in enumerate(flat.chunk(dp)):
            part, stem = part.clone(), f'zero_pp_rank_{rank}_mp_rank_{tp:02d}'
            zero = {'optimizer_state_dict': {
                        'state': [{'exp_avg': part * 10}],
                        'param_groups': [{}]},
                    'fp32_flat_groups': [part], 'zero_stage': 3}
            save(directory, f'{stem}_model_states.pt',
                 {'param_shapes': shapes,
                  'universal_checkpoint_info': info_lists})
            save(directory, f'{stem}_optim_states.pt',
                 {'optimizer_state_dict': zero})


LISTS = {'universal_checkpoint_version': 0.4,
         'parameter_with_row_parallelism_patterns': [],
         'tp_replicated_parameter_patterns': [r'^ln\.weight$'],
         'vocabulary_parameter_patterns': [], 'parameter_with_sub_params': []}


@pytest.mark.parametrize('rows,dp,lists', [((2, 2), 2, LISTS),
                                           ((3, 2), 2, LISTS), ((2,), 2, {}),
                                           ((2, 2), 1, LISTS)])
def test_the_files_names_tell_degrees_that_nothing_records(
        ckptfs, tmp_path, rows, dp, lists):
    whole = torch.arange(sum(rows) * 4, dtype=torch.float32).reshape(-1, 4)
    shards = {'fc.weight': list(whole.split(list(rows)))}
    if dp == 2 and lists:  # empty lists say that everything is cut along dim 0
        lists = {**lists, 'tp_replicated_parameter_patterns': []}
    if dp == 1:  # replicated beside it
        shards['ln.weight'] = [torch.tensor([1., 2., 3., 4.])] * len(rows)
    synthetic(tmp_path / 'run' / 'step0', shards, dp, **lists)
    mount = ckptfs.mount(adopt=[tmp_path / 'run'])
    shown = load_file(f'{mount}/view/tp1/rank0/model.safetensors')
    assert torch.equal(shown['fc.weight'], whole)
    states = load_file(f'{mount}/view/tp1/rank0/optimizer.safetensors')
    assert torch.equal(states['exp_avg/fc.weight'], whole * 10)
    if dp == 1:
        assert torch.equal(shown['ln.weight'], shards['ln.weight'][0])
    os.unlink(tmp_path / 'run' / 'step0' /
              'zero_pp_rank_0_mp_rank_00_optim_states.pt')
    assert 'rank 0' in refused(ckptfs, tmp_path / 'run' / 'step0')


def test_stage_3_pads_each_parameter(ckptfs, tmp_path):
    """40 parameters of 5 elements on 4 ranks: 3 of padding for each."""
    gen = torch.Generator().manual_seed(7)
    states = {kind: {f'l{i}.bias': torch.rand(5, generator=gen)
                     for i in range(40)}
              for kind in ('master', 'exp_avg', 'exp_avg_sq')}
    make_filled(tmp_path / 'run', states, 4)
    mount = ckptfs.mount(adopt=[tmp_path / 'run'])
    shown = load_file(f'{mount}/view/tp1/rank0/optimizer.safetensors')
    for kind in ('exp_avg', 'exp_avg_sq'):
        for name, tensor in states[kind].items():
            assert torch.equal(shown[f'{kind}/{name}'], tensor)


def test_frozen_slices_without_a_shape(ckptfs, tmp_path):
    tag = tmp_path / 'run' / 'step0'
    synthetic(tag, {'fc.weight': [torch.rand(2, 4)] * 2}, 1)
    for mp in range(2):  # of two pipeline stages; only the first has shapes
        path = tag / f'zero_pp_rank_0_mp_rank_{mp:02d}_model_states.pt'
        states = torch.load(path, weights_only=False)
        states['checkpoint_parallel_dimensions'] = {'pp_degree': 2,
                                                    'tp_degree': 1}
        states['frozen_param_shapes'] = {} if mp else {'x.weight': [4]}
        states['frozen_param_fragments'] = {'x.weight': torch.rand(4)}
        torch.save(states, path)
    said = refused(ckptfs, tag)
    assert "frozen_param_fragments has 'x.weight'" in said
    assert 'mp_rank_01' in said


def test_a_world_that_no_file_bears_out_ends(ckptfs, tmp_path):
    tag = tmp_path / 'run' / 'global_step5'
    save_plain(tag, {'a.weight': torch.rand(4)}, dp_world_size=2**40)
    assert 'dp_world_size' in refused(ckptfs, tag)


def test_autoep_under_zero_is_said_to_be_that(ckptfs, tmp_path):
    run = shutil.copytree(GOLDEN, tmp_path / 'run')
    path = run / TAG / 'mp_rank_00_model_states.pt'
    states = torch.load(path, weights_only=False)
    states['ds_autoep_layers'] = None  # as native MoE writes it
    torch.save(states, path)
    info(ckptfs, run / TAG)
    states['ds_autoep_layers'] = [{'expert_key_prefix': 'x'}]
    torch.save(states, path)
    assert 'AutoEP' in refused(ckptfs, run / TAG)


def test_frozen_parameters_that_nothing_tells_apart(ckptfs, tmp_path):
    weights = {f'{n}.weight': torch.rand(4, 4) for n in 'abc'}
    weights['d.weight'] = torch.rand(5)
    state = {i: {'step': torch.tensor(1.), 'exp_avg': torch.rand(s),
                 'exp_avg_sq': torch.rand(s)}
             for i, s in enumerate([(4, 4), (4, 4), (5,)])}
    tag = tmp_path / 'run' / 'global_step5'
    save_plain(tag, weights, optimizer={
        'state': state, 'param_groups': [{'lr': .1, 'params': [0, 1, 2]}]})
    told = info(ckptfs, tag)
    text = told['left_out'][0]['text']
    assert "'a.weight'" in text and "'d.weight'" not in text and '--parameter-order' in text
    assert 'weight' in told['kinds'] and 'exp_avg' not in told['kinds']
    assert not info(ckptfs, tag, '--weights-only')['left_out']


class Inverted(StreamTransformExtension):
    """A transform of somebody's own."""

    class Stream(io.RawIOBase):
        """A stream that inverts what is written to it and passes it on."""

        def __init__(self, output):
            super().__init__()
            self.output = output

        def writable(self):
            return True

        def write(self, data):
            return self.output.write(bytes(byte ^ 255 for byte in bytes(data)))

    @staticmethod
    def from_descriptor(version):
        return Inverted()

    @staticmethod
    def registry_name():
        return 'stream.inverted'

    def get_descriptor(self):
        return 'stream.inverted@here/3'

    def transform_to(self, output):
        return self.Stream(output)

    def transform_from(self, input):  # pylint: disable=redefined-builtin
        raise NotImplementedError


class SaidToBeZstd(Inverted):
    """Where no package compresses: what torch's own leaves in the metadata."""

    def get_descriptor(self):
        return 'stream.zstd/1'


@pytest.mark.parametrize('extension,said', [
    (ZStandard if ZStandard.is_available() else SaidToBeZstd, "compressed with zstd ('stream.zstd/1')"),
    (Inverted, "written through a transform ('stream.inverted@here/3')")])
def test_transformed_chunks_are_refused_by_name(ckptfs, tmp_path, extension, said):
    step = tmp_path / 'run' / 'step-3'
    dcp.save({'model': {'w': torch.arange(4096.)}, 'note': 'x'}, no_dist=True,
             storage_writer=dcp.FileSystemWriter(step, _extensions=[extension()]))
    why = refused(ckptfs, step)
    assert f'{step}/.metadata' in why and 'the data in __0_0.distcp' in why and said in why, why
    assert 'save it again without _extensions' in why
    # And where the metadata does not say it, by what the chunks are not.
    metadata = pickle.loads((step / '.metadata').read_bytes())
    for stored in metadata.storage_data.values():
        stored.transform_descriptors = None
    (step / '.metadata').write_bytes(pickle.dumps(metadata))
    assert '__0_0.distcp' in refused(ckptfs, step)


@pytest.mark.parametrize('other', ['flax_model.msgpack', 'tf_model.h5', 'model.Q4.gguf'])
def test_other_forms_of_a_hubs_weights_belong_to_its_model(ckptfs, tmp_path, other):
    """Also where a .ckpt makes the directory one of several steps."""
    weights = {'a.weight': torch.ones(3, 3)}
    save_file(weights, tmp_path / 'model.safetensors', {'format': 'pt'})
    (tmp_path / 'config.json').write_text('{"model_type": "bert"}')
    torch.save(weights, tmp_path / 'v1-5.ckpt')
    (tmp_path / other).write_bytes(b'x' * 100)
    done = ckptfs.adopt(tmp_path, 'hub')
    assert done.returncode == 0 and 'not readable yet' not in done.stderr, done.stderr


@pytest.mark.parametrize('tied', [True, False])
def test_pipelines_without_zero_do_not_name_what_stages_share(ckptfs, tmp_path, tied):
    """Two stages of which one layer each is in a file; the optimizers have a third tensor, or not."""
    weight = torch.rand(4, 4)
    for stage in range(2):
        net = [torch.nn.Parameter(weight.clone()) for _ in range(1 + (tied and stage == 1))]
        opt = torch.optim.Adam(net)
        save(tmp_path / 'ckpt' / TAG, f'mp_rank_{stage:02}_model_states.pt',
             {'module': None, 'buffer_names': [], 'optimizer': opt.state_dict(), 'param_shapes': None, 'global_steps': 3,
              'dp_world_size': 1, 'mp_world_size': 2, 'checkpoint_parallel_dimensions': {'pp_degree': 2, 'tp_degree': 1}})
        save(tmp_path / 'ckpt' / TAG, f'layer_{stage:02}-model_00-model_states.pt', {'weight': weight})
    said = ckptfs.adopt(tmp_path / 'ckpt', 'run').stderr
    assert ("the names of what the pipeline's stages share (tied_modules)" in said) == tied, said
