# SPDX-License-Identifier: Apache-2.0
"""Changes directories of Megatron as later cores, or accidents, would have."""
import io
import json
import os
import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex


def rewrite(step, change):
    """Changes what .metadata says."""
    with open(f'{step}/.metadata', 'rb') as f:
        metadata = pickle.load(f)
    change(metadata)
    with open(f'{step}/.metadata', 'wb') as f:
        pickle.dump(metadata, f)


def as_the_newest_cores_save(step):
    """No common.pt, its state as an object, and two keys in metadata.json."""
    common = torch.load(f'{step}/common.pt', weights_only=False)
    os.unlink(f'{step}/common.pt')
    buffer = io.BytesIO()
    torch.save([common], buffer)
    with open(f'{step}/__9_0.distcp', 'wb') as f:
        f.write(buffer.getvalue())

    def add(metadata):
        key = 'common_state/shard_0_1'
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo('__9_0.distcp', 0, len(buffer.getvalue()))

    rewrite(step, add)
    with open(f'{step}/metadata.json', 'w', encoding='utf-8') as f:
        json.dump({'sharded_backend': 'torch_dist', 'sharded_backend_version': 1}, f)
