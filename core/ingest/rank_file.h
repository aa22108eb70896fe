// SPDX-License-Identifier: Apache-2.0
//
// The words of a rank file: what one rank of a training job hands over as its part of
// a step.  It is a safetensors file that anyone can open, with one entry of ours in its
// __metadata__, kRankFileKey, a JSON text:
//
//   entry     = { "version": 1, "rank": n, "world": n, "step": n,
//                 "framework": text, "framework_version": text,
//                 "tensors": { key: tensor.. },
//                 "parameters": [ parameter.. ],   in model order; of rank 0 alone,
//                 "aliases": [ [alias, name].. ],  as are these
//                 "groups": [ group.. ],           and these
//                 "documents": [ document.. ] }
//   tensor    = { "parameter": name, "kind": text, "optimizer": text, "number": bool }
//   parameter = { "name": text, "role": "trainable" | "frozen" | "buffer" }
//   group     = { "optimizer": text, "parameters": [ name.. ], "pickle": key }
//   document  = { "key": text, "scope": text, "pickle": key, "tensors": [ key.. ] }
//
// Keys are of the file's tensors; each is mentioned once.  A tensor is a whole state of
// one parameter; "number": it was a Python number.  Pickles are U8 tensors: protocol
// 2, a tensor in one is the persistent id of its place in "tensors", in decimal.
//
// Written by snapshot/rank_file.cc, read by formats/snapshot.
//
// Thread safety: constants.

#pragma once

#include <cstdint>

namespace ckptfs {

inline constexpr const char* kRankFileKey = "ckptfs.rank_file";
inline constexpr uint64_t kRankFileVersion = 1;

}  // namespace ckptfs
