// SPDX-License-Identifier: Apache-2.0
//
// The words of a rank file, which one rank of a training job hands over as its part of a
// step.  It is a safetensors file that anyone can open, with one entry of ours in its
// __metadata__, kRankFileKey, a JSON text:
//
//   entry     = { "version": 2 | 3, "rank": n, "world": n, "step": n,
//                 "framework": text, "framework_version": text,
//                 "layout": text,                  of the job (core/model/layout.h); rank 0's
//                 "tensors": { key: tensor.. },
//                 "parameters": [ parameter.. ],   in model order
//                 "aliases": [ [alias, name].. ],
//                 "groups": [ group.. ],
//                 "documents": [ document.. ],
//                 "alike": [ [text, n].. ],
//                 "kept": { key: kept.. } }
//   tensor    = { "parameter": name, "kind": text, "optimizer": text, "number": bool,
//                 part }                           absent: it is the whole state
//   part      = "shape": shape, "pieces": [ piece.. ]
//             | "shape": shape, "flat": [begin, end]
//             | "shape": shape, "flat": [begin, end], "local_shape": shape,
//               "pieces": [ piece.. ]
//             | "shape": shape, "order": [ n.. ]
//             | "shape": shape, "order": [ n.. ], "pieces": [ piece.. ]
//   piece     = { "box": [ [begin, end].. ], "at": [ n.. ] }
//   parameter = { "name": text, "role": "trainable" | "frozen" | "buffer" }
//   group     = { "optimizer": text, "parameters": [ name.. ], "pickle": key }
//   document  = { "key": text, "scope": text, "pickle": key, "tensors": [ key.. ] }
//   kept      = { "place": text, "dtype": text, "shape": shape }
//
// Keys are of the file's tensors; each is mentioned once.  "number": it was a Python
// number.  Pickles are U8 tensors: protocol 2, a tensor in one is the persistent id of
// its place in "tensors", in decimal.
//
// A tensor is a whole state of one parameter, or a part of one: "shape" is the whole
// state's.  A piece is a box of the whole and the index in the tensor where it begins;
// of the tensor's elements those outside of its pieces are padding.  "flat": the tensor
// is a row, elements [begin, end) of the row-major state, or of the local tensor of
// "local_shape" that the pieces are of.  The parts of all ranks are the state exactly
// once.  core/state/state_part.h checks a part.
//
// Ranks that hold states alike share them out, each by itself.  "alike" has, for each set
// of ranks that this one shares with, a digest of the set and of all that these hold,
// and how many ranks it has: as many have to say it, or a state may be left out.  A text that
// begins with "bytes:" has a digest of their bytes, or of some of them: where fewer say it their
// replicas have come apart.
//
// A tensor of "kept" is a state's, and not in this file: its bytes are those of the tensor of
// the same key, dtype and shape in the file of the same name in "place", the directory of an
// earlier save of the run ("snapshots/<digest>" below the store's blobs).  A number may have
// spaces before it: headers of ranks that differ in numbers alone are equally long.
//
// All ranks must say the same of one parameter or alias; the order is rank 0's, then that
// of the others.  Their groups of one optimizer and place in the list are
// one group if their hyper-parameters are equal.  Absent lists are empty; an absent
// layout is dp<world>.  Fields that are not mentioned here are refused.
//
// "order": the rank's tensor lies in memory with its dimensions in this order, outermost first
// (channels_last: [0, 2, 3, 1]), and the file's tensor is of that shape; boxes and indices are
// in the order of the state.  Version 2 has neither "order" nor "kept", and is written where none
// is needed.  Version 1 has no "layout", no "alike" and no parts.  Framework "deepspeed" has
// documents alone: formats/rank_file/deepspeed_files.h.
//
// Another entry of __metadata__, kUnprovedKey, is a number of bytes in decimal: a write of so much
// of the rank's memory, between the save and its copy, could have gone unseen.  It may be absent.
//
// Written by snapshot/trainer/capture.cc, read by formats/rank_file.
//
// Thread safety: constants.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ckptfs {

inline constexpr std::string_view kAlikeBytes = "bytes:";
inline constexpr std::string_view kAlikeSince = "since:";
inline constexpr const char* kRankFileKey = "ckptfs.rank_file";
inline constexpr const char* kUnprovedKey = "ckptfs.unproved";
inline constexpr size_t kUnprovedDigits = 20;  // as it is written; with zeros in front
inline constexpr uint64_t kRankFileVersion = 3;
inline constexpr uint64_t kRankFileBefore = 2;  // without "order" and "kept"

}  // namespace ckptfs
