// SPDX-License-Identifier: Apache-2.0
//
// ObjectReader reads the objects of a DCP step, bytes of torch.save each: the hyper-parameters of
// groups, and everything beside model and optimizer, as documents.
//
//   document of a first word W      the value at W, dicts and lists put together again from
//                                   the keys below it: "lr_scheduler" under this key, others
//                                   under "client/W", as a DeepSpeed engine's client state
//
// Thread safety: none; one reader per step.
// Lifetime: the state must outlive it.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/result.h"
#include "core/model/step_model.h"
#include "formats/dcp/beside.h"
#include "formats/dcp/state_keys.h"
#include "formats/dcp/stored_state.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/stored_tensor.h"

namespace ckptfs::dcp {

// Members of an optimizer's group: names, or numbers.
struct Members {
  std::vector<std::string> names;
  std::vector<uint64_t> numbers;
};

class ObjectReader {
 public:
  ObjectReader(StoredState& state, BesideTensors& beside) : state_(state), beside_(beside) {}

  // A dict of hyper-parameters as a pickle, its dicts and lists put together again; tensors of one
  // element become numbers, and their keys stay known.  A value that has no room there (a tensor
  // of several elements, an object that holds tensors) is appended to `others` instead, with all
  // that stood in one dict or list with it.
  struct Item {
    std::string key;
    KeyedEntry entry;
    std::vector<PathElement> path = {};  // in the group, if it stood in a dict or a list there
  };
  using Items = std::vector<Item>;
  Result<std::string> HyperParameters(const Items& items, std::vector<KeyedEntry>& others);
  // `params` of a group; nothing if it is not a list of either.
  Result<std::optional<Members>> MembersOf(KeyedEntry entry);
  // A number that is an object or a tensor: a scalar state.
  Result<std::optional<ScalarValue>> Scalar(KeyedEntry entry);

  // By the first words of their keys.
  Result<std::vector<Document>> Documents(const std::vector<KeyedEntry>& entries);
  // One document of values at places in it; without a pickle if nothing of them can be kept.
  struct Placed {
    std::vector<PathElement> path;
    KeyedEntry entry;
  };
  Result<Document> DocumentOf(std::string_view key, const std::vector<Placed>& values);
  // Where a value stood in the state dict.
  std::vector<PathElement> PathOf(KeyedEntry entry) const;
  const std::string& KeyOf(KeyedEntry entry) const;
  // The step's number as the documents say it, if they do.
  std::optional<uint64_t> iteration() const { return iteration_; }
  // Hyper-parameters that were tensors, by their keys.
  const std::map<std::string, size_t>& tensor_keys() const { return tensor_keys_; }
  // Tensors of documents that several ranks saved, of which the first's is kept.
  uint64_t dropped() const { return dropped_; }
  // Keys that no document could have, and why.
  const std::map<std::string, std::string>& left_out() const { return left_out_; }

 private:
  // A dict or list of a document, or a value.
  struct Child;
  struct Branch {
    std::vector<Child> children;
    std::map<std::pair<std::string, bool>, size_t> places;  // of children, by their keys
    std::optional<KeyedEntry> value;
  };
  struct Child {
    PathElement key;
    Branch branch;
  };

  void Add(Branch& top, const std::vector<PathElement>& path, KeyedEntry entry);
  Result<Document> MakeOne(std::string_view key, const Branch& branch);
  using MakeValue = std::function<Result<std::optional<NodeId>>(KeyedEntry)>;
  Result<std::optional<NodeId>> Build(const Branch& branch, const MakeValue& make);
  Result<std::optional<NodeId>> BuildPlain(KeyedEntry entry);
  Result<std::optional<StoredState::Object>> Open(size_t object);
  Result<std::optional<NodeId>> BuildValue(KeyedEntry entry);
  Result<std::optional<NodeId>> CopyObject(size_t object);
  // Takes the step that the job counted, if the key is one for that.
  Status TakeIteration(const std::string& key, const ReadScalar& read);
  Result<std::optional<NodeId>> AddTensor(size_t tensor);

  StoredState& state_;
  BesideTensors& beside_;
  std::optional<uint64_t> iteration_;
  std::map<std::string, std::string> left_out_;
  std::map<std::string, size_t> tensor_keys_;  // tensors of the metadata
  uint64_t dropped_ = 0;
  // The tensors of the document that is being made.
  PickleBuilder builder_;
  TorchFile::Storages storages_;
  StorageAtoms atoms_;
};

}  // namespace ckptfs::dcp
