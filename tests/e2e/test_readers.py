# SPDX-License-Identifier: Apache-2.0
"""A view is offered to the readers that take all of it, and to no others.

Real engines of DeepSpeed with optimizers of torch, each with a 0-d parameter: what is offered loads with every master,
and goes on with the losses of the run that never stopped; what its loader would fail on, or lose, is refused and
named. And transformers' own loader beside a config.json of another model.
"""
import json
import os
import shutil
import sys

import pytest
import torch

import daemon
import launch

WORLD, TAKEN, MORE = 2, 3, 3
TAG = f'global_step{TAKEN}'
OPTIMIZERS = {
    'adamw': lambda p: torch.optim.AdamW(p, lr=1e-2),
    'amsgrad': lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    'adagrad': lambda p: torch.optim.Adagrad(p, lr=1e-2),
    'rprop': lambda p: torch.optim.Rprop(p, lr=1e-2),
    'momentum': lambda p: torch.optim.SGD(p, lr=1e-2, momentum=.9),
    'rmsprop': lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=.9, centered=True),
    'nadam': lambda p: torch.optim.NAdam(p, lr=1e-2),
    'asgd': lambda p: torch.optim.ASGD(p, lr=1e-2),
}
# The states that the refusal names, by stage of the engine; the others are offered.
REFUSED = {
    1: {'nadam': 'mu_product', 'asgd': 'eta'},
    3: {'amsgrad': 'max_exp_avg_sq', 'adagrad': 'sum', 'rprop': 'prev', 'momentum': 'momentum_buffer',
        'rmsprop': 'grad_avg', 'nadam': 'mu_product', 'asgd': 'ax'},
}


class Net(torch.nn.Module):
    """With a temperature, as CLIP has one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(12, 20), torch.nn.Linear(20, 6)
        self.temperature = torch.nn.Parameter(torch.tensor(.5))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * self.temperature.exp()


def begin():
    """This rank."""
    import deepspeed
    deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False
    deepspeed.init_distributed('gloo', verbose=False)


def engine_of(optimizer, stage, load=False):
    import deepspeed
    torch.manual_seed(5)
    model = Net()
    # DeepSpeed gathers what stays gathered in one call and waits for its last tensor alone; gloo ends them in any
    # order, so that a step could begin with a 0-d parameter that is still 0.
    zero = {'stage': stage, **({'stage3_param_persistence_threshold': 0} if stage == 3 else {})}
    config = {'train_micro_batch_size_per_gpu': 2, 'bf16': {'enabled': True},
              'zero_optimization': zero, 'zero_allow_untested_optimizer': True}
    if load:
        config['checkpoint'] = {'load_universal': True}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config,
                                optimizer=OPTIMIZERS[optimizer](model.parameters()))[0]


def train(engine, first, last):
    losses = []
    for number in range(first, last):
        torch.manual_seed(number)
        loss = engine(torch.randn(2, 12).bfloat16()).float().pow(2).sum()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def masters_of(engine):
    from deepspeed.utils import safe_get_full_fp32_param
    return {k: safe_get_full_fp32_param(p).clone() for k, p in engine.module.named_parameters()}


def keep(found, out):
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)


def save_all(folder):
    """A checkpoint at ZeRO 1 of each optimizer, and how it goes on at 1 and (with as many ranks) at 3."""
    begin()
    found = {}
    for name in OPTIMIZERS:
        engine = engine_of(name, 1)
        train(engine, 0, TAKEN)
        engine.save_checkpoint(os.path.join(folder, name), tag=TAG)
        found[name] = masters_of(engine), train(engine, TAKEN, TAKEN + MORE)
    keep(found, os.path.join(folder, 'truth.pt'))


def load_all(views, out):
    """{(optimizer, stage): masters, losses} of engines that load views."""
    begin()
    found = {}
    for (name, stage), view in views.items():
        engine = engine_of(name, stage, load=True)
        assert engine.load_checkpoint(view)[0] is not None
        found[name, stage] = masters_of(engine), train(engine, TAKEN, TAKEN + MORE)
    keep(found, out)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    import deepspeed  # noqa: F401  once, before ranks are forked
    folder = str(tmp_path_factory.mktemp('readers'))
    log = os.path.join(folder, 'rank')
    assert launch.launch(save_all, WORLD, (folder,), log), launch.errors_of(log, WORLD)
    return folder


def test_engines_are_offered_what_they_take(saved, ckptfs, tmp_path):
    for name in OPTIMIZERS:
        ckptfs.adopt(os.path.join(saved, name), name)
    mount, views = ckptfs.mount(), {}
    for name in OPTIMIZERS:
        for stage, refused in REFUSED.items():
            layout = f'dp{WORLD}_zero{stage}'
            view = os.path.join(daemon.step_of(mount, name, TAG), 'view', layout)
            said = json.loads(ckptfs.run('explain', layout, '--step', f'{name}/{TAG}', '--store', ckptfs.store,
                                         '--json').stdout)['formats']['deepspeed']
            offered = 'deepspeed' in os.listdir(view)
            assert offered == (said == 'yes') == (name not in refused), (name, layout, said)
            if offered:
                views[name, stage] = os.path.join(view, 'deepspeed')
            else:
                assert f"'{refused[name]}'" in said, said
                with open(os.path.join(view, 'info.json'), encoding='utf-8') as f:
                    assert refused[name] in f.read()
    log, out = str(tmp_path / 'rank'), str(tmp_path / 'found.pt')
    assert launch.launch(load_all, WORLD, (views, out), log), launch.errors_of(log, WORLD)
    truth = torch.load(os.path.join(saved, 'truth.pt'))
    for (name, stage), (masters, losses) in torch.load(out).items():
        want, then = truth[name]
        assert all(torch.equal(masters[k].reshape(-1), want[k].reshape(-1)) for k in want), (name, stage)
        assert losses == then, (name, stage, losses, then)


TITAN = {'model.embed_tokens': 'tok_embeddings', 'lm_head': 'output', 'self_attn.q_proj': 'attention.wq',
         'self_attn.k_proj': 'attention.wk', 'self_attn.v_proj': 'attention.wv', 'self_attn.o_proj': 'attention.wo',
         'mlp.gate_proj': 'feed_forward.w1', 'mlp.up_proj': 'feed_forward.w3', 'mlp.down_proj': 'feed_forward.w2',
         'input_layernorm': 'attention_norm', 'post_attention_layernorm': 'ffn_norm', 'model.': ''}


def titan(name):
    for theirs, ours in TITAN.items():
        name = name.replace(theirs, ours)
    return name


@pytest.fixture(scope='module')
def llama(tmp_path_factory):
    """A folder with DCP directories of one model's weights, under its own names and under others, and its config."""
    import torch.distributed.checkpoint as dcp
    from transformers import LlamaConfig, LlamaForCausalLM
    folder = str(tmp_path_factory.mktemp('llama'))
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, architectures=['LlamaForCausalLM'])
    model = LlamaForCausalLM(config)
    config.save_pretrained(os.path.join(folder, 'config'))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(folder, 'truth.pt'))
    for name, spell in {'own': str, 'titan': titan, 'wrapped': 'llm.{}'.format}.items():
        dcp.save({spell(k): v for k, v in state.items()}, checkpoint_id=os.path.join(folder, name, 'step-10'), no_dist=True)
    return folder


def test_names_of_another_model_are_not_offered_to_transformers(llama, ckptfs, tmp_path):
    from transformers import AutoModelForCausalLM
    config = os.path.join(llama, 'config')
    for name in ('own', 'titan', 'wrapped'):
        ckptfs.adopt(os.path.join(llama, name), name)
    without = ckptfs.mount()
    assert 'huggingface' not in os.listdir(os.path.join(daemon.step_of(without, 'own', 'step-10'), 'view', 'tp1'))
    ckptfs.umount(without)
    mount = ckptfs.mount('--hf-config', config)
    truth = torch.load(os.path.join(llama, 'truth.pt'))
    for name in ('own', 'titan', 'wrapped'):
        view = os.path.join(daemon.step_of(mount, name, 'step-10'), 'view', 'tp1')
        # Beside the mount, in it, and by itself.
        for words in (['tp1', '--step', f'{name}/step-10', '--store', ckptfs.store], [view],
                      ['tp1', '--step', os.path.join(llama, name, 'step-10'), '--hf-config', config]):
            said = json.loads(ckptfs.run('explain', *words, '--json').stdout)['formats']['huggingface']
            assert (said == 'yes') == (name == 'own') == ('huggingface' in os.listdir(view)), (words, said)
            assert name == 'own' or 'LlamaForCausalLM' in said or "has no name for 'layers.0.attention.wq" in said, said
    model, loading = AutoModelForCausalLM.from_pretrained(
        os.path.join(daemon.step_of(mount, 'own', 'step-10'), 'view', 'tp1', 'huggingface'), output_loading_info=True)
    assert not any(loading.values()), loading
    assert all(torch.equal(v, truth[k]) for k, v in model.state_dict().items())


def test_a_config_of_another_module_is_not_believed(llama, ckptfs, tmp_path):
    """It lies above accelerate's step, or beside a script's file, or beside weights of which transformers loads none."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    truth = torch.load(os.path.join(llama, 'truth.pt'))
    wrapped = {f'lm.{k}': v for k, v in truth.items()}
    for name, state in {'own': truth, 'other': wrapped}.items():
        for place in ('file', 'above', 'beside'):
            shutil.copytree(os.path.join(llama, 'config'), tmp_path / name / place)
        torch.save({'model': state}, tmp_path / name / 'file' / 'ckpt.pt')
        (tmp_path / name / 'above' / 'step_3').mkdir()
        for weights in ('above/step_3', 'beside'):
            save_file(state, tmp_path / name / weights / 'model.safetensors', metadata={'format': 'pt'})
        for place in ('file/ckpt.pt', 'above/step_3', 'beside'):
            ckptfs.adopt(tmp_path / name / place, f'{name}-{place.split("/")[0]}')
    mount = ckptfs.mount()
    for place in ('file', 'above', 'beside'):
        view = os.path.join(daemon.step_of(mount, f'own-{place}'), 'view', 'tp1', 'huggingface')
        model = AutoModelForCausalLM.from_pretrained(view)
        assert all(torch.equal(v, truth[k]) for k, v in model.state_dict().items()), place
        view = os.path.join(daemon.step_of(mount, f'other-{place}'), 'view', 'tp1')
        assert 'huggingface' not in os.listdir(view), place
        said = json.loads(ckptfs.run('explain', view, '--json').stdout)['formats']['huggingface']
        assert 'LlamaForCausalLM' in said and 'lm.' in said, said


def test_a_config_of_fewer_layers_is_refused(llama, ckptfs, tmp_path):
    """from_pretrained would take a part of the layers, and say nothing."""
    shutil.copytree(os.path.join(llama, 'config'), tmp_path / 'config')
    with open(tmp_path / 'config' / 'config.json', 'r+', encoding='utf-8') as file:
        config = json.load(file)
        config['num_hidden_layers'] = 1
        file.seek(0)
        json.dump(config, file)
        file.truncate()
    ckptfs.adopt(os.path.join(llama, 'own'), 'own')
    view = os.path.join(daemon.step_of(ckptfs.mount('--hf-config', tmp_path / 'config'), 'own', 'step-10'), 'view', 'tp1')
    assert 'huggingface' not in os.listdir(view)
    said = json.loads(ckptfs.run('explain', view, '--json').stdout)['formats']['huggingface']
    assert 'has 1 layers, but the step has 2' in said, said


def test_a_given_config_settles_the_rules_of_the_family(llama, ckptfs):
    """A mount that adopts is given the config, or the same numbers by hand; DCP needs none."""
    path, config = os.path.join(llama, 'own'), os.path.join(llama, 'config')
    for number, words in enumerate(([], ['--hf-config', config], ['--family-set', 'head_dim=8'])):
        store = ckptfs.store + str(number)
        mountpoint = ckptfs.mountpoint()
        ckptfs.run('mount', '--store', store, '--name', 'run', '--adopt', path, *words, mountpoint)
        view = os.path.join(daemon.step_of(mountpoint, 'run', 'step-10'), 'view', 'tp2')
        assert 'dcp' in os.listdir(view), words
        assert ('rank1' in os.listdir(view)) == bool(words), words


if __name__ == '__main__':
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))


@pytest.mark.parametrize('name', ['attention_bias', 'mlp_bias', 'classifier'])
def test_parameters_that_megatrons_model_lacks_are_named(ckptfs, tmp_path, name):
    """A job of Megatron's would load the rest, and compute another model."""
    import transformers
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, **({} if name == 'classifier' else {name: True}))
    kind = transformers.LlamaForSequenceClassification if name == 'classifier' else transformers.LlamaForCausalLM
    kind(config).save_pretrained(tmp_path / 'model')
    said = json.loads(ckptfs.run('explain', 'tp1', '--step', tmp_path / 'model', '--json').stdout)['formats']['megatron']
    lacking = {'attention_bias': 'self_attn', 'mlp_bias': 'mlp', 'classifier': 'score.weight'}[name]
    assert ("Megatron's model does not have this parameter" in said or "the table 'mcore' has no name for" in said) and lacking in said, said


def test_a_config_of_other_layers_refuses_megatron(ckptfs, tmp_path):
    """A pruned model beside the config of the whole one."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
    LlamaForCausalLM(config).save_pretrained(tmp_path / 'model')
    path = tmp_path / 'model' / 'config.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'num_hidden_layers': 2}))
    said = json.loads(ckptfs.run('explain', 'tp1', '--step', tmp_path / 'model', '--json').stdout)['formats']['megatron']
    assert 'config.json says that the model has 2 layers, but its tensors are of 3' in said


@pytest.mark.parametrize('kind,without,said', [
    ('Mixtral', '.experts.', "the step has no '*.experts.'"), ('Mixtral', '.gate.', "the step has no '*.gate.weight'"), ('Llama', '?', None)])
def test_tensors_that_from_pretrained_would_begin_anew(ckptfs, tmp_path, kind, without, said):
    """Names alone are all there, of other layers."""
    import transformers
    import torch.distributed.checkpoint as dcp
    config = getattr(transformers, f'{kind}Config')(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                                                    num_attention_heads=4, num_key_value_heads=2)
    model = getattr(transformers, f'{kind}ForCausalLM')(config)
    dcp.save({'model': {k: v for k, v in model.state_dict().items() if without not in k}}, checkpoint_id=str(tmp_path / 'step-1'), no_dist=True)
    config.architectures = [f'{kind}ForCausalLM']
    config.save_pretrained(tmp_path / 'step-1')
    got = json.loads(ckptfs.run('explain', 'tp1', '--step', tmp_path / 'step-1', '--json').stdout)['formats']['huggingface']
    assert said in got if said else got == 'yes', got
