// SPDX-License-Identifier: Apache-2.0
//
// Makes files of ranks as Megatron's legacy checkpoints have them, honest or not.  Element i of a
// tensor has the value that the tensor begins with, plus i.
//
// Thread safety: none.

#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor/shape.h"
#include "formats/torch/pickle_writer.h"
#include "tests/formats/torch/zip_maker.h"

namespace ckptfs::megatron {

struct MadeTensor {
  std::string name;
  Shape shape;
  float first = 0;
};

// A torch.save file whose tensors are of fp32.
class MadeFile {
 public:
  PickleBuilder& pickle() { return pickle_; }

  NodeId Tensor(const Shape& shape, const std::vector<float>& values) {
    TensorNode node;
    node.storage_key = std::to_string(storages_.size());
    node.storage_elements = values.size();
    node.shape = shape;
    node.strides = RowMajorStrides(shape);
    const auto view = std::as_bytes(std::span(values));
    storages_.emplace_back(reinterpret_cast<const char*>(view.data()), view.size());
    return pickle_.Tensor(node);
  }

  NodeId Dict(const std::vector<std::pair<std::string, NodeId>>& items) {
    std::vector<std::pair<NodeId, NodeId>> out;
    for (const auto& [key, value] : items) out.emplace_back(pickle_.String(key), value);
    return pickle_.Dict(out);
  }

  std::string Finish(NodeId root) && {
    MadeZip zip;
    const std::string pickle = PrintPickle(std::move(pickle_).Finish(root)).value();
    zip.records.push_back({.name = "archive/data.pkl", .payload = pickle});
    for (size_t i = 0; i < storages_.size(); ++i) {
      zip.records.push_back({.name = "archive/data/" + std::to_string(i), .payload = storages_[i]});
    }
    zip.records.push_back({.name = "archive/version", .payload = "3\n"});
    return MakeZip(zip);
  }

 private:
  PickleBuilder pickle_;
  std::vector<std::string> storages_;
};

inline std::vector<float> CountedFrom(float first, const Shape& shape) {
  uint64_t elements = 1;
  for (const uint64_t size : shape) elements *= size;
  std::vector<float> out;
  for (uint64_t i = 0; i < elements; ++i) out.push_back(first + static_cast<float>(i));
  return out;
}

// A rank's file says these.
struct MadeRank {
  std::map<std::string, int64_t> args = {};
  std::map<std::string, bool> flags = {};  // arguments, too
  std::optional<double> version = 3.0;
  int64_t iteration = 3;
  std::vector<MadeTensor> model = {};
  std::vector<std::string> objects = {};  // None beside the tensors
  std::string model_key = "model";
  std::vector<std::vector<size_t>> groups = {};  // of an optimizer: tensors of the model
};

inline std::string FileOf(const MadeRank& rank) {
  MadeFile file;
  std::vector<std::pair<std::string, NodeId>> args, model, root;
  for (const auto& [name, value] : rank.args) args.emplace_back(name, file.pickle().Int(value));
  for (const auto& [name, value] : rank.flags) args.emplace_back(name, file.pickle().Bool(value));
  const NodeId fields = file.Dict(args);
  const NodeId cls = file.pickle().Global("argparse", "Namespace");
  root.emplace_back("args", file.pickle().Object(cls, file.pickle().Tuple({}), fields));
  if (rank.version) root.emplace_back("checkpoint_version", file.pickle().Float(*rank.version));
  root.emplace_back("iteration", file.pickle().Int(rank.iteration));
  for (const MadeTensor& one : rank.model) {
    model.emplace_back(one.name, file.Tensor(one.shape, CountedFrom(one.first, one.shape)));
  }
  for (const std::string& name : rank.objects) model.emplace_back(name, file.pickle().None());
  root.emplace_back(rank.model_key, file.Dict(model));
  std::vector<NodeId> groups;
  std::vector<std::pair<NodeId, NodeId>> states;
  int64_t number = 0;
  for (const auto& members : rank.groups) {
    std::vector<NodeId> numbers;
    for (const size_t i : members) {
      const Shape& shape = rank.model[i].shape;
      const NodeId moment = file.Tensor(shape, CountedFrom(rank.model[i].first + 0.5f, shape));
      states.emplace_back(file.pickle().Int(number), file.Dict({{"exp_avg", moment}}));
      numbers.push_back(file.pickle().Int(number++));
    }
    const bool decays = groups.empty();
    groups.push_back(file.Dict({{"params", file.pickle().List(std::move(numbers))},
                                {"wd_mult", file.pickle().Float(decays ? 1.0 : 0.0)},
                                {"lr", file.pickle().Float(0.5)},
                                {"step", file.pickle().Int(4)}}));
  }
  if (!groups.empty()) {
    const NodeId all = file.pickle().Dict(states);
    const NodeId list = file.pickle().List(std::move(groups));
    root.emplace_back("optimizer", file.Dict({{"state", all}, {"param_groups", list}}));
  }
  const NodeId dict = file.Dict(root);
  return std::move(file).Finish(dict);
}

// distrib_optim.pt of one buffer of fp32 parameters.
inline std::string FlatFileOf(const std::vector<float>& masters) {
  MadeFile file;
  const Shape shape = {masters.size()};
  const NodeId states =
      file.Dict({{"param", file.Tensor(shape, masters)},
                 {"exp_avg", file.Tensor(shape, CountedFrom(0.5f, shape))},
                 {"numel_unpadded", file.pickle().Int(static_cast<int64_t>(masters.size()))}});
  const NodeId single = file.pickle().Global("torch", "float32");
  const NodeId types = file.pickle().Tuple({single, single});
  const NodeId buffer = file.pickle().Dict({{types, states}});
  const NodeId coalesced = file.pickle().String("buckets_coalesced");
  const NodeId yes = file.pickle().Bool(true);
  const NodeId root = file.pickle().Dict({{coalesced, yes}, {file.pickle().Int(0), buffer}});
  return std::move(file).Finish(root);
}

}  // namespace ckptfs::megatron
