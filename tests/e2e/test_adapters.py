# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT: a directory that it wrote is a step, and its views are directories that it loads.

Runs where peft is installed, which tests/requirements.txt does not have.
"""
import gc
import os
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import daemon

try:
    import peft
except ImportError:
    peft = None
pytestmark = pytest.mark.skipif(peft is None, reason='peft is not installed')
WORDS = torch.arange(1, 65).reshape(4, 16)
CONFIG = {'vocab_size': 96, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, 'num_attention_heads': 4,
          'num_key_value_heads': 2, 'max_position_embeddings': 64, 'pad_token_id': 0, 'tie_word_embeddings': False}


def read(path):
    """Copies of the tensors: a mapping of the file keeps its mount."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def base():
    """The same model at every call."""
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()


def logits_of(model):
    with torch.no_grad():
        return model.eval()(WORDS).logits


class Adapter:
    """An adapter with elements of its own everywhere, as PEFT saves it."""

    def __init__(self, folder, program):
        self.folder, self.program = folder, program
        config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=['q_proj', 'v_proj', 'down_proj'],
                                 modules_to_save=['lm_head'], use_rslora=True)
        model = peft.get_peft_model(base(), config)
        torch.manual_seed(2)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if tensor.requires_grad:
                    tensor.normal_(0, 0.3)
        self.logits = logits_of(model)
        model.save_pretrained(folder + '/adapter')
        self.tensors = load_file(folder + '/adapter/adapter_model.safetensors')
        program.adopt(folder + '/adapter', 'adapter')
        self.mount = program.mount()

    def view(self, layout, run='adapter'):
        return os.path.join(daemon.step_of(self.mount, run), 'view', layout, 'huggingface')


@pytest.fixture(scope='module')
def adapter(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp('adapters'))
    program = daemon.Ckptfs(folder)
    yield Adapter(folder, program)
    gc.collect()  # models map the view's files, and modules refer to themselves
    program.close()


def test_the_directory_is_shown_as_it_is(adapter):
    for name in ('adapter_model.safetensors', 'adapter_config.json'):
        with open(f'{adapter.folder}/adapter/{name}', 'rb') as a, open(f'{adapter.view("tp1")}/{name}', 'rb') as b:
            assert a.read() == b.read(), name


def test_peft_loads_the_view_onto_its_base(adapter):
    loaded = peft.PeftModel.from_pretrained(base(), adapter.view('tp1'))
    assert torch.equal(logits_of(loaded), adapter.logits)
    assert not torch.equal(logits_of(base()), adapter.logits)


def test_a_dtype_casts_it(adapter):
    got = read(adapter.view('bf16') + '/adapter_model.safetensors')
    assert got.keys() == adapter.tensors.keys()
    assert all(torch.equal(got[name], tensor.to(torch.bfloat16)) for name, tensor in adapter.tensors.items())
    peft.PeftModel.from_pretrained(base(), adapter.view('bf16'))


def test_a_torch_file_and_a_config_above_change_nothing(adapter, tmp_path):
    """The config.json above an adapter is not its model's, whatever lies there."""
    folder = tmp_path / 'run' / 'checkpoint-3'
    folder.mkdir(parents=True)
    torch.save(adapter.tensors, folder / 'adapter_model.bin')
    shutil.copy(adapter.folder + '/adapter/adapter_config.json', folder)
    base().config.save_pretrained(tmp_path / 'run')
    program = daemon.Ckptfs(str(tmp_path))
    program.adopt(tmp_path / 'run', 'run')
    view = os.path.join(daemon.step_of(program.mount(), 'run'), 'view', 'tp1', 'huggingface')
    assert sorted(os.listdir(view)) == ['adapter_config.json', 'adapter_model.safetensors']
    got = read(view + '/adapter_model.safetensors')
    program.close()
    assert got.keys() == adapter.tensors.keys() and all(torch.equal(got[k], v) for k, v in adapter.tensors.items())


def test_ranks_do_not_cut_what_no_rule_covers(adapter):
    assert not os.path.exists(os.path.join(daemon.step_of(adapter.mount, 'adapter'), 'view', 'tp2', 'rank0'))
    said = adapter.program.run('explain', 'tp2', '--step', 'adapter', '--store', adapter.program.store, check=False)
    assert 'lora_' in said.stdout + said.stderr


def test_an_adapter_without_its_config_is_shown_as_tensors_alone(adapter, tmp_path):
    save_file(adapter.tensors, tmp_path / 'adapter_model.safetensors')
    program = daemon.Ckptfs(str(tmp_path))
    program.adopt(tmp_path / 'adapter_model.safetensors', 'file')
    view = os.path.join(daemon.step_of(program.mount(), 'file'), 'view', 'tp1')
    names = set(read(view + '/rank0/model.safetensors'))
    there = os.path.exists(view + '/huggingface')
    program.close()
    assert names == set(adapter.tensors) and not there
