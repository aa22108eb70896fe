// SPDX-License-Identifier: Apache-2.0
//
// FindModel says which tensors of a DCP directory are the model: it makes a candidate of
// every dict that the planner flattened (its paths say where one ends), and of what stands
// behind a word for a model where no path tells, and core/state chooses.
//
//   {"app": {"model": sd, "ema": sd}}     candidates "app.model" and "app.ema"
//   {**sd, "ema": sd} (torchtitan)        "" and "ema"
//   keys without paths                    "", and behind words for a model as far as an
//                                         optimizer has such names
//
// Thread safety: pure.

#pragma once

#include <cstddef>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/state/trained_module.h"
#include "formats/dcp/metadata.h"

namespace ckptfs::dcp {

// "model" of "model.a.weight".
inline std::string_view FirstWord(std::string_view key) { return key.substr(0, key.find('.')); }

// The keys that are not an optimizer's.
struct KeysBeside {
  std::vector<size_t> tensors;  // of the metadata
  std::vector<size_t> objects;
  // Parts of the optimizers' keys that may be names of parameters.
  std::set<std::string_view, std::less<>> owners;
  bool flattened = false;  // an optimizer's keys stand among the tensors of the top dict
};

struct FoundModel {
  std::string prefix;                   // of the weights' keys: "model.", ""
  std::vector<size_t> tensors;          // in the file's order; empty: there is no model
  std::vector<TrainableModule> others;  // what looks like a model, too
  std::string why;                      // it is none of those
};

// `asked`: --model.  Errors as ChooseModel (core/state), but for a directory without a model.
Result<FoundModel> FindModel(const DcpMetadata& metadata, const KeysBeside& keys,
                             std::string_view asked);

}  // namespace ckptfs::dcp
