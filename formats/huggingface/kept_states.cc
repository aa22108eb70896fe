// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/kept_states.h"

#include <algorithm>
#include <utility>

#include "formats/torch/pickle_writer.h"
#include "formats/torch/source_states.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::huggingface {
namespace {

constexpr int kDeepest = 16;

// True of numbers, text, None, plain tensors, and lists, tuples and dicts of them.
bool IsOfNoClass(PickleRef value, int depth = kDeepest) {
  if (value.Number() || value.Bool() || value.String() || value.IsNone()) return true;
  if (value.Tensor() != nullptr) return true;
  if (depth == 0) return false;
  if (value.IsSequence()) {
    for (size_t i = 0; i < value.size(); ++i) {
      if (!IsOfNoClass(value.at(i), depth - 1)) return false;
    }
    return true;
  }
  return value.IsDict() && std::ranges::all_of(value.Items(), [&](const auto& item) {
           return (item.first.String() || item.first.Int()) && IsOfNoClass(item.second, depth - 1);
         });
}

}  // namespace

bool KeptStates::Keep(const std::string& parameter, const std::string& kind, PickleRef states) {
  const PickleRef value = states[kind];
  if (!value || !IsOfNoClass(value)) return false;
  states_.push_back({parameter, kind, value});
  return true;
}

Result<Document> KeptStates::Finish(BlobIndex blob) && {
  if (states_.empty()) return Document{};
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> parameters, kinds;
  for (size_t i = 0; i < states_.size(); ++i) {
    const NodeId kind = builder.String(states_[i].kind);
    kinds.emplace_back(kind, builder.Copy(states_[i].value));
    if (i + 1 < states_.size() && states_[i + 1].parameter == states_[i].parameter) continue;
    const NodeId name = builder.String(states_[i].parameter);
    parameters.emplace_back(name, builder.Dict(std::exchange(kinds, {})));
  }
  const NodeId label = builder.String("");
  const NodeId root = builder.Dict({{label, builder.Dict(parameters)}});
  const PickleTree tree = std::move(builder).Finish(root);
  return MakeDocument(std::string(kSourceStates), "", RootOf(tree), file_, blob);
}

}  // namespace ckptfs::huggingface
