// SPDX-License-Identifier: Apache-2.0
//
// What a DCP step keeps as objects, bytes of torch.save each: hyper-parameters of groups,
// and everything that is beside model and optimizer, as documents.
//
//   document of a first word W      the value at W, dicts and lists put together again from
//                                   the keys below it: "lr_scheduler" under this key, others
//                                   under "client/W", as a DeepSpeed engine's client state
//
// Thread safety: none; one reader per step.
// Lifetime: the state must outlive it.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/dcp/state_keys.h"
#include "formats/dcp/stored_state.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs::dcp {

class ObjectReader {
 public:
  // `order`: names of numbered parameters (StateKeys).
  ObjectReader(StoredState& state, const std::vector<std::string>& order)
      : state_(state), order_(order) {}

  // A dict of hyper-parameters as a pickle; tensors of one element become numbers, and their keys
  // stay known.
  using Items = std::vector<std::pair<std::string, KeyedEntry>>;
  Result<std::string> HyperParameters(const Items& items);
  // `params` of a group.  kUnsupported if they are numbers without an order.
  Result<std::vector<std::string>> Names(KeyedEntry entry);
  // A number that is an object or a tensor: a scalar state.
  Result<std::optional<ScalarValue>> Scalar(KeyedEntry entry);

  Result<std::vector<Document>> Documents(const std::vector<KeyedEntry>& entries);
  // What the documents call the step, if they do.
  std::optional<uint64_t> iteration() const { return iteration_; }
  // Hyper-parameters that were tensors, by their keys.
  const std::map<std::string, size_t>& tensor_keys() const { return tensor_keys_; }
  // Tensors of documents that several ranks saved, of which the first's is kept.
  uint64_t dropped() const { return dropped_; }
  // Keys that no document could have: tensors in several pieces.
  const std::set<std::string>& left_out() const { return left_out_; }

 private:
  // A dict or list of a document, or a value.
  struct Child;
  struct Branch {
    std::vector<Child> children;
    std::optional<KeyedEntry> value;
  };
  struct Child {
    PathElement key;
    Branch branch;
  };

  const std::string& KeyOf(KeyedEntry entry) const;
  std::vector<PathElement> PathOf(KeyedEntry entry) const;
  Result<Document> MakeOne(const std::string& word, const Branch& branch);
  Result<std::optional<NodeId>> Build(const Branch& branch);
  Result<std::optional<NodeId>> BuildValue(KeyedEntry entry);
  Result<NodeId> CopyObject(size_t object);
  std::optional<NodeId> AddTensor(size_t tensor);

  StoredState& state_;
  const std::vector<std::string>& order_;
  std::optional<uint64_t> iteration_;
  std::set<std::string> left_out_;
  std::map<std::string, size_t> tensor_keys_;  // tensors of the metadata
  uint64_t dropped_ = 0;
  // Of the document that is being made.
  PickleBuilder builder_;
  TorchFile::Storages storages_;
};

}  // namespace ckptfs::dcp
