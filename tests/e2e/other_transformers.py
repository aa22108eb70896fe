# SPDX-License-Identifier: Apache-2.0
"""Loads directories with the transformers of the Python that runs it: other_transformers.py JOBS OUT.

JOBS is JSON: {name: directory}.  OUT.json says the release, and of each directory what from_pretrained did not find or
could not use, or why it failed; OUT.safetensors has the logits of each model on fixed words.
"""
import json
import sys
import warnings

import torch
import transformers
from safetensors.torch import save_file

WORDS = torch.arange(1, 65).reshape(4, 16)


def load(folder):
    """(what is said of its keys, logits)"""
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation='eager', **DTYPE)
    with torch.no_grad():
        logits = model(WORDS, use_cache=False).logits
    return {part: sorted(str(key) for key in said[part])
            for part in ('missing_keys', 'unexpected_keys', 'mismatched_keys')}, logits.float().contiguous()


DTYPE = {('torch_dtype' if transformers.__version__ < '4.56' else 'dtype'): torch.float32}


def main():
    """Every job's answer."""
    warnings.filterwarnings('ignore')
    transformers.logging.set_verbosity_error()
    with open(sys.argv[1], encoding='utf-8') as f:
        jobs = json.load(f)
    said, logits = {}, {}
    for name, folder in jobs.items():
        try:
            said[name], logits[name] = load(folder)
        except Exception as error:  # pylint: disable=broad-except
            said[name] = {'failed': f'{type(error).__name__}: {error}'[:400]}
    save_file(logits, sys.argv[2] + '.safetensors')
    with open(sys.argv[2] + '.json', 'w', encoding='utf-8') as f:
        json.dump({'release': transformers.__version__, 'said': said}, f)


if __name__ == '__main__':
    main()
