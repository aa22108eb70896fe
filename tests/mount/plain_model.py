# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory of one tensor, made without torch."""
import json
import os
import struct

ROWS, COLUMNS = 8, 1000


def save(path, value):
    """Its tensor a.weight holds `value` everywhere; all may read it."""
    data = struct.pack('<f', value) * (ROWS * COLUMNS)
    header = json.dumps({'__metadata__': {'format': 'pt'}, 'a.weight': {
        'dtype': 'F32', 'shape': [ROWS, COLUMNS], 'data_offsets': [0, len(data)]}}).encode()
    os.makedirs(path)
    with open(f'{path}/model.safetensors', 'wb') as f:
        f.write(struct.pack('<Q', len(header)) + header + data)
    with open(f'{path}/config.json', 'w', encoding='utf-8') as f:
        json.dump({'architectures': ['Net'], 'model_type': 'net'}, f)
