// SPDX-License-Identifier: Apache-2.0

#include "formats/huggingface/kept_states.h"

#include <algorithm>
#include <utility>

#include "formats/torch/pickle_writer.h"
#include "formats/torch/source_states.h"
#include "formats/torch/tail_run.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::huggingface {
namespace {

constexpr int kDeepest = 16;

// How many runs of bytes the tensor's elements lie in, in row-major order.
uint64_t RunsOf(const TensorNode& tensor) {
  uint64_t elements = 1;
  for (const uint64_t size : tensor.shape) elements *= size;
  const uint64_t run = TailRunOf(tensor.shape, tensor.strides).elements;
  return run == 0 ? 0 : elements / run;
}

}  // namespace

// Values may share what they hold, so each is counted as often as dcp/ would show it.
bool KeptStates::Shows(PickleRef value, int depth) {
  if (visits_ == 0) return false;
  --visits_;
  if (value.Number() || value.Bool() || value.String() || value.IsNone()) return true;
  if (const TensorNode* tensor = value.Tensor()) {
    const auto located = file_.Locate(*tensor, BlobIndex{});
    const uint64_t runs = located ? RunsOf(*tensor) : runs_ + 1;
    if (runs > runs_) return false;
    runs_ -= runs;
    return true;
  }
  if (depth == 0) return false;
  if (value.IsSequence()) {
    for (size_t i = 0; i < value.size(); ++i) {
      if (!Shows(value.at(i), depth - 1)) return false;
    }
    return true;
  }
  // An empty dict has no key to be shown under.
  return value.IsDict() && value.size() != 0 &&
         std::ranges::all_of(value.Items(), [&](const auto& item) {
           return (item.first.String() || item.first.Int()) && Shows(item.second, depth - 1);
         });
}

bool KeptStates::Keep(const std::string& parameter, const std::string& kind, PickleRef states) {
  const PickleRef value = states[kind];
  if (!value || AnyNode(value, IsOfClass) || !Shows(value, kDeepest)) return false;
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
