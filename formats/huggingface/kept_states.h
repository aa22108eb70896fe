// SPDX-License-Identifier: Apache-2.0
//
// KeptStates collects the states of an optimizer that are neither a tensor of their parameter nor a
// number: lists, dicts, None, tensors of other shapes.  They are a document, which dcp/ shows
// under the keys that the job asks for (formats/torch/source_states.h).  Values of classes are not
// kept: a view does not hand out code.
//
// Thread safety: none; one thread builds one step.
// Lifetime: the file and the values must outlive it.

#pragma once

#include <string>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::huggingface {

class KeptStates {
 public:
  explicit KeptStates(const TorchFile& file) : file_(file) {}

  // `states`: all of the parameter's.  False if dcp/ could not show the value as it is: a part is
  // of a class, empty or not in the file, or all that was kept would become too much.
  bool Keep(const std::string& parameter, const std::string& kind, PickleRef states);

  // `blob`: the file's.  Without a pickle if nothing was kept.
  Result<Document> Finish(BlobIndex blob) &&;

 private:
  struct State {
    std::string parameter;
    std::string kind;
    PickleRef value;
  };

  bool Shows(PickleRef value, int depth);

  const TorchFile& file_;
  size_t visits_ = 1 << 16;    // values that are still looked into
  uint64_t runs_ = 1 << 18;    // runs of bytes that tensors may still have
  std::vector<State> states_;  // those of one parameter together
};

}  // namespace ckptfs::huggingface
