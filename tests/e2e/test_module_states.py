# SPDX-License-Identifier: Apache-2.0
"""What a module's state dict has beside its parameters and buffers is in a snapshot, or refuses it by name."""
import ckptfs as snapshots
import pytest
import torch
from test_snapshot_values import SIZE, saved_fixture  # noqa: F401 (a fixture)


@pytest.mark.parametrize('name', ['_forward_module', '_orig_mod', '_checkpoint_wrapped_module'])
def test_a_child_that_is_called_as_a_wrappers_is_a_child(saved, name):
    model = torch.nn.Module()
    model.add_module(name, torch.nn.Linear(SIZE, SIZE))
    model.norm = torch.nn.BatchNorm1d(SIZE)
    model.register_buffer('scale', torch.randn(SIZE))
    held = saved(torch.nn.Sequential(model)).model()
    assert sorted(held) == sorted(torch.nn.Sequential(model).state_dict())
    assert torch.equal(held['0.scale'], model.scale)


class Scaled(torch.nn.Linear):
    """Its state dict has what it does not register, as those of quantised layers do."""

    def __init__(self):
        super().__init__(SIZE, SIZE)
        self.absmax = torch.randn(SIZE)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + 'weight.absmax'] = self.absmax


def test_tensors_that_a_module_does_not_register_are_held(saved):
    model = torch.nn.Sequential(Scaled(), torch.nn.Linear(SIZE, 2))
    model._register_state_dict_hook(lambda module, state, prefix, _: state.update({f'{prefix}made': module[0].absmax * 2}))
    held = saved(model).model()
    assert sorted(held) == sorted(model.state_dict())
    assert all(torch.equal(held[key], value) for key, value in model.state_dict().items())


def test_packed_parameters_are_refused_by_name(ckptfs):
    model = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE)), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(TypeError, match='0._packed_params.dtype stands in state_dict.., but is neither registered by its module'):
        snapshots.Snapshotter(model, None, 'job', ckptfs.store)


class Turned(torch.nn.Linear):
    """Its state dict has its weight transposed."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + 'weight'] = destination[prefix + 'weight'].t()


def test_a_parameter_in_another_form_is_refused_by_name(ckptfs):
    with pytest.raises(TypeError, match='0.weight stands in state_dict.. in another form'):
        snapshots.Snapshotter(torch.nn.Sequential(Turned(SIZE, SIZE)), None, 'job', ckptfs.store)
