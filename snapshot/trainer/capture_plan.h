// SPDX-License-Identifier: Apache-2.0
//
// A CapturePlan is what captures that follow each other have in common: their tensors, but
// for where these lie, in the order of the rank's file, and what its header says of each.
// It is made once: a model of thousands of small tensors is described at its first save alone.
//
// Thread safety: immutable.
// Units: bytes.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/base/result.h"
#include "core/blob/safetensors_header.h"

namespace ckptfs {

struct CapturedTensor;

// A tensor's use in a rank file.  Parts come first: each rank has other whole states, and the
// parts of one state then lie at the same byte of all ranks' files.
enum class TensorUse : uint8_t { kPart = 0, kWhole = 1, kPickle = 2 };

struct PlannedTensor {
  SafetensorsEntry entry;  // without its range
  size_t given = 0;        // its place in what the plan was made of
  int device = 0;
  bool lazy = false;
  TensorUse use = TensorUse::kWhole;
  // The widest come first, so that each lies aligned; of one width those that are copied
  // at once together.
  bool Before(const PlannedTensor& other) const;
};

class CapturePlan {
 public:
  CapturePlan() = default;
  // kInvalid as CaptureFile::Make has it.
  static Result<CapturePlan> Make(std::vector<CapturedTensor> tensors);

  const std::vector<PlannedTensor>& tensors() const { return tensors_; }  // in order
  bool Has(const std::string& key) const { return keys_.contains(key); }
  // The members of "tensors" (core/state/rank_file.h), with commas between them.
  const std::string& words() const { return words_; }
  // True if one of them has an order of dimensions.
  bool ordered() const { return ordered_; }

 private:
  std::vector<PlannedTensor> tensors_;
  std::unordered_set<std::string> keys_;
  std::string words_;
  bool ordered_ = false;
};

}  // namespace ckptfs
