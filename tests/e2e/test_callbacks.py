# SPDX-License-Identifier: Apache-2.0
"""Callbacks of training frameworks: what they save is what the live job had, and a training
that goes on from it has the losses of one that never stopped."""
import json
import os
import sys

import callback_trainer
import pytest
import torch
from callback_trainer import EVERY, UPDATES
from daemon import run_ranks, step_of, wait_until
from gathered import assert_equal, gathered
from linear_module import LinearModule
from ports import held_port
from zygote import Zygote

HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.fixture(scope='module')
def zygote():
    """Has imported what the trainings need."""
    one = Zygote(['callback_trainer', 'transformers.trainer', 'transformers.models.llama.modeling_llama',
                  'lightning.pytorch'])
    yield one
    one.close()


def receiving(ckptfs):
    """Mounts, and waits until it receives."""
    _, mount = ckptfs.start()
    wait_until(lambda: 'snapshots' in ckptfs.run('status', '--store', ckptfs.store,
                                                 '--json').stdout, 'the receiver')
    return mount


def check_steps(mount, folder, framework):
    """Every step is what the job had, bit for bit."""
    steps = range(EVERY, UPDATES + 1, EVERY)
    listed = os.path.join(mount, 'run', framework, 'step')
    wait_until(lambda: set(os.listdir(listed)) >= set(map(str, steps)), 'the steps')
    for step in steps:
        truth = torch.load(os.path.join(folder, f'truth-{step}.pt'))
        view = os.path.join(step_of(mount, framework, str(step)), 'view', 'tp1')
        assert_equal(gathered(view, 1), truth)


@pytest.mark.parametrize('framework', ['transformers', 'lightning'])
def test_one_process(ckptfs, tmp_path, framework):
    mount = receiving(ckptfs)
    whole, middle = getattr(callback_trainer, framework)(str(tmp_path), ckptfs.store)
    assert whole[-len(middle):] == middle and middle, (whole, middle)
    check_steps(mount, tmp_path, framework)


def test_an_average_that_lightning_saves_is_the_average(ckptfs, tmp_path):
    """WeightAveraging exchanges the weights in the checkpoint: ours says what Lightning's own says."""
    import ckptfs.lightning as callbacks
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(8, 8)

        def training_step(self, batch, _):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    receiving(ckptfs)
    stock = ModelCheckpoint(dirpath=tmp_path / 'stock', every_n_train_steps=4)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 8)))
    pl.Trainer(max_steps=4, accelerator='cpu', logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
               callbacks=[callbacks.SnapshotCallback(ckptfs.store, 'job', 4), EMAWeightAveraging(decay=.5), stock]).fit(Net(), data)
    made = str(tmp_path / 'ours.ckpt')
    callback_trainer.when_durable(lambda: callbacks.checkpoint(f'ckptfs://{ckptfs.store}/job/4', made))
    ours, theirs = (torch.load(path, weights_only=False) for path in (made, stock.best_model_path))
    assert not all(torch.equal(one, theirs['current_model_state'][name]) for name, one in theirs['state_dict'].items())
    for part in 'state_dict', 'current_model_state':
        assert sorted(ours[part]) == sorted(theirs[part])
        assert all(torch.equal(ours[part][name], one) for name, one in theirs[part].items() if torch.is_tensor(one))


@pytest.mark.parametrize('framework', ['transformers', 'lightning'])
@pytest.mark.parametrize('way', ['ddp', 'fsdp2'])
def test_several_ranks(ckptfs, tmp_path, zygote, framework, way):
    mount = receiving(ckptfs)
    with held_port() as port:
        run_ranks([[sys.executable, os.path.join(HERE, 'callback_trainer.py'), framework,
                    str(tmp_path), ckptfs.store, rank, '2', way] for rank in '01'],
                  tmp_path / 'log', 240, zygote.start, env={**os.environ, 'CALLBACK_PORT': str(port)})
    whole, middle = json.loads((tmp_path / 'losses.json').read_text(encoding='utf-8'))
    assert whole[-len(middle):] == middle and middle, (whole, middle)
    check_steps(mount, tmp_path, framework)


def told(monkeypatch, *methods):
    """Returns a list that gets the name of each of these (class, method) when it is called."""
    events = []

    def tell(call, name):
        def telling(*words, **options):
            events.append(name)
            return call(*words, **options)
        return telling
    for owner, name in methods:
        call = tell(getattr(owner, name), name)
        kind = staticmethod if isinstance(vars(owner)[name], staticmethod) else lambda one: one
        monkeypatch.setattr(owner, name, kind(call))
    return events


def test_copies_are_done_before_the_best_weights_are_loaded(ckptfs, tmp_path, monkeypatch):
    """Trainer loads them after the last save, before any callback hears of the end."""
    import transformers as hf
    from ckptfs.saver import Saver
    from ckptfs.transformers import SnapshotCallback
    receiving(ckptfs)
    events = told(monkeypatch, (Saver, 'save'), (Saver, 'before_update'), (hf.Trainer, '_load_best_model'))
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                               num_attention_heads=2, num_key_value_heads=2))
    data = [{'input_ids': ids, 'labels': ids} for ids in torch.randint(0, 64, (16, 8))]
    words = hf.TrainingArguments(str(tmp_path / 'out'), max_steps=4, save_steps=2, eval_steps=2, eval_strategy='steps',
                                 load_best_model_at_end=True, per_device_train_batch_size=4, use_cpu=True, report_to=[],
                                 disable_tqdm=True)
    hf.Trainer(model, words, train_dataset=data, eval_dataset=data[:4], callbacks=[SnapshotCallback(ckptfs.store)]).train()
    last = len(events) - 1 - events[::-1].index('save')
    assert 'before_update' in events[last:events.index('_load_best_model')], events


def test_copies_are_done_before_lightning_swaps_averages(ckptfs, monkeypatch):
    """StochasticWeightAveraging does so at the end of the last epoch."""
    import ckptfs.lightning as callbacks
    import lightning.pytorch as pl
    from ckptfs.saver import Saver
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    receiving(ckptfs)
    events = told(monkeypatch, (Saver, 'save'), (Saver, 'before_update'), (StochasticWeightAveraging, 'transfer_weights'))
    trainer = pl.Trainer(max_epochs=3, accelerator='cpu', logger=False, enable_checkpointing=False, enable_progress_bar=False,
                         enable_model_summary=False,
                         callbacks=[StochasticWeightAveraging(.05, swa_epoch_start=1), callbacks.SnapshotCallback(ckptfs.store)])
    trainer.fit(LinearModule(), torch.utils.data.DataLoader(torch.rand(8, 4), batch_size=4))
    last = len(events) - 1 - events[::-1].index('save')
    assert 'transfer_weights' in events[last:], events
    assert 'before_update' in events[last:last + events[last:].index('transfer_weights')], events


def test_states_of_callbacks_are_those_of_the_moment(ckptfs, tmp_path):
    """The Trainer brings them up to date in its own save alone."""
    import ckptfs as snapshots
    import transformers as hf
    from ckptfs.transformers import SnapshotCallback
    receiving(ckptfs)
    live = {}

    class Patience(hf.trainer_callback.ExportableState, hf.TrainerCallback):
        count = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.count += state.global_step
            live[state.global_step] = self.count

        def state(self):
            return {'args': {}, 'attributes': {'count': self.count}}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                               num_attention_heads=2, num_key_value_heads=2))
    data = [{'input_ids': ids, 'labels': ids} for ids in torch.randint(0, 64, (16, 8))]
    words = hf.TrainingArguments(str(tmp_path / 'out'), max_steps=3, save_strategy='no', per_device_train_batch_size=4, use_cpu=True,
                                 report_to=[], disable_tqdm=True)
    hf.Trainer(model, words, train_dataset=data, callbacks=[Patience(), SnapshotCallback(ckptfs.store, every=1, full='wait')]).train()
    for number, count in live.items():
        wait_until(lambda number=number: any(one['id'] == str(number) for one in ckptfs.list()['steps']), 'the step')
        with snapshots.SavedStep(f'ckptfs://{ckptfs.store}/job/{number}') as step:
            states = step.document('trainer_state')['stateful_callbacks']
        assert states['Patience']['attributes']['count'] == count and 'TrainerControl' in states, (number, states)
