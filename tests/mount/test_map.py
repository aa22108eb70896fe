# SPDX-License-Identifier: Apache-2.0
"""`ckptfs map`: who holds what, as text, JSON and pictures."""
import json
import re
import struct
import zlib

import pytest


def png(path):
    """Width, height and rows of an RGB picture, by the specification."""
    with open(path, 'rb') as f:
        data = f.read()
    assert data[:8] == b'\x89PNG\r\n\x1a\n'
    at, chunks = 8, []
    while at < len(data):
        size, kind = struct.unpack('>I4s', data[at:at + 8])
        body = data[at + 8:at + 8 + size]
        assert struct.unpack('>I', data[at + 8 + size:at + 12 + size])[0] == zlib.crc32(kind + body)
        chunks.append((kind, body))
        at += 12 + size
    assert [k for k, _ in chunks] == [b'IHDR', b'IDAT', b'IEND']
    width, height, depth, colour = struct.unpack('>IIBB', chunks[0][1][:10])
    assert (depth, colour) == (8, 2)
    raw = zlib.decompress(chunks[1][1])
    rows = [raw[y * (1 + 3 * width):(y + 1) * (1 + 3 * width)] for y in range(height)]
    assert all(row[0] == 0 for row in rows) and len(raw) == height * (1 + 3 * width)
    return width, height, [row[1:] for row in rows]


def test_map(ckptfs, source, store):
    ckptfs.adopt(source)
    told = json.loads(ckptfs.run('map', 'tp2_pp2', '--json', *store).stdout)
    assert told['world'] == 4 and [c['rank'] for c in told['columns']] == [0, 1, 2, 3]
    tensors = json.loads(ckptfs.run('ls', 'run7', '--kind', 'weight', '--json', *store).stdout)['tensors']
    shapes = {t['name']: t['shape'] for t in tensors}
    for row in told['rows']:
        held = [h['elements'] for h in row['held']]
        whole = row['elements']
        stages = [sum(held[:2]), sum(held[2:])]
        # Whole on both ranks of a stage, or once over them; on one stage.
        assert sorted(stages)[0] == 0 and max(stages) in (whole, 2 * whole), row
        if 'qkv' in row['name']:
            assert len(row['held'][0]['runs'] or row['held'][2]['runs']) == 3
    assert {r['name'] for r in told['rows']} == set(shapes)
    text = ckptfs.run('map', 'tp2_pp2', *store).stdout
    assert 'lm_head.weight' in text and '1/2' in text and 'all' in text
    svg, picture = ckptfs.folder + '/a.svg', ckptfs.folder + '/a.png'
    ckptfs.run('map', 'tp2_pp2', '--output', svg, *store)
    with open(svg) as f:
        drawn = f.read()
    assert drawn.startswith('<svg') and 'lm_head.weight' in drawn and drawn.count('<rect') > 4 * len(told['rows'])
    ckptfs.run('map', 'tp2_pp2', '--output', picture, *store)
    width, height, rows = png(picture)
    size = re.search(r'width="(\d+)" height="(\d+)"', drawn)
    assert (width, height) == (int(size[1]), int(size[2]))
    colours = {row[3 * x:3 * x + 3] for row in rows[::5] for x in range(0, width, 3)}
    assert len(colours) >= 5
    many = json.loads(ckptfs.run('map', 'tp2_dp64', '--json', *store).stdout)
    assert len(many['columns']) == 2 and many['ranks_alike'] == 64 and 'slices' not in many
    done = ckptfs.run('map', 'tp7', *store, check=False)
    assert done.returncode == 4 and 'does not divide' in done.stderr
    assert ckptfs.run('map', 'tp2', '--output', 'x.jpg', *store, check=False).returncode == 2


def safetensor(path, name):
    """Its bytes."""
    with open(path, 'rb') as f:
        size, = struct.unpack('<Q', f.read(8))
        begin, end = json.loads(f.read(size))[name]['data_offsets']
        f.seek(8 + size + begin)
        return f.read(end - begin)


@pytest.mark.parametrize('layout', ['tp2_dp2_zero1', 'dp3_zero3'])
def test_map_shows_who_has_which_slice(ckptfs, source, store, layout):
    """Each rank's file holds what the map says of the rank."""
    mount = ckptfs.mount(adopt=[source])
    told = json.loads(ckptfs.run('map', layout, '--json', *store).stdout)
    assert told['slices']['of'] == (['weights', 'optimizer'] if 'zero3' in layout else ['optimizer'])
    rows = {row['name']: row['held'] for row in told['slices']['rows']}
    assert len(rows) == 17  # no buffers
    whole = f"{mount}/view/{layout.rsplit('_', 1)[0]}"
    for column, at in enumerate(told['columns']):
        for name in 'model.embed_tokens.weight', 'model.layers.1.self_attn.qkv_proj.bias', 'lm_head.weight':
            held = rows[name][column]
            begin, end = held['slice']
            key, rank = f'exp_avg/{name}', at['rank']
            of_all = safetensor(f'{whole}/rank{rank}/optimizer.safetensors', key)
            assert safetensor(f'{mount}/view/{layout}/rank{rank}/optimizer.safetensors', key).startswith(
                of_all[4 * begin:4 * end]) and held['elements'] == end - begin
            assert held['runs'] == [[4 * begin / len(of_all), 4 * end / len(of_all)]]
    text = ckptfs.run('map', layout, *store).stdout
    assert f'slices of {" and ".join(told["slices"]["of"])}'.replace('optimizer', 'optimizer states') in text
    assert re.search(r'^dp( +\d+)+$', text, re.M) and 'ceil(n/' in text
    svg = ckptfs.folder + '/slices.svg'
    ckptfs.run('map', layout, '--output', svg, *store)
    with open(svg) as f:
        drawn = f.read()
    assert drawn.count('lm_head.weight') == 2 and 'slices of' in drawn


def test_map_of_many_ranks_shows_some_slices(ckptfs, source, store):
    ckptfs.adopt(source)
    told = json.loads(ckptfs.run('map', 'tp2_dp64_zero1', '--json', *store).stdout)
    places = {(c['tp'], c['dp']) for c in told['columns']}
    assert len(places) == len(told['columns']) == 64 and {(0, 0), (1, 0), (0, 63), (1, 63)} < places
    assert 'there are 64 data-parallel ranks; 32 are shown' in ckptfs.run('map', 'tp2_dp64_zero1', *store).stdout
    told = json.loads(ckptfs.run('map', 'dp64_zero3', '--json', *store).stdout)
    for row in told['slices']['rows']:
        assert sum(h['elements'] for h in row['held']) == row['elements']
