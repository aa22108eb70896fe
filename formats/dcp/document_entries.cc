// SPDX-License-Identifier: Apache-2.0

#include "formats/dcp/document_entries.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"
#include "formats/torch/python_text.h"
#include "formats/torch/torch_file.h"

namespace ckptfs::dcp {
namespace {

using Kind = PickleNode::Kind;

// Nested deeper than this is one value.
constexpr size_t kDeepest = 64;

// A dict whose items are entries of their own.  One of plain values with a key whose text is not
// known stays whole; one that runs code loses what has such a key.
bool IsTraversedDict(PickleRef value) {
  if (!value.IsDict()) return false;
  const auto items = value.Items();
  const bool known = std::ranges::all_of(
      items, [](const auto& item) { return PythonText(item.first).has_value(); });
  return known || !RunsNoCode(value);
}

// A list whose items are entries of their own.
bool IsTraversed(PickleRef list, size_t depth) {
  if (list.node().kind != Kind::kList || depth == 0) return false;
  for (size_t i = 0; i < list.size(); ++i) {
    const PickleRef item = list.at(i);
    if (item.IsDict() || item.Tensor() != nullptr || IsTraversed(item, depth - 1)) return true;
  }
  return false;
}

Status Walk(PickleRef value, std::vector<PathStep>& path, const Leaf& leaf) {
  const bool deep = path.size() < kDeepest;
  if (deep && IsTraversedDict(value)) {
    for (const auto& [key, item] : value.Items()) {
      auto name = PythonText(key);
      if (!name) continue;
      path.push_back({*std::move(name), {}});
      CKPT_RETURN_IF_ERROR(Walk(item, path, leaf));
      path.pop_back();
    }
    return {};
  }
  if (!deep || !IsTraversed(value, kDeepest - path.size())) return leaf(path, value);
  for (size_t i = 0; i < value.size(); ++i) {
    path.push_back({"", static_cast<uint32_t>(i)});
    CKPT_RETURN_IF_ERROR(Walk(value.at(i), path, leaf));
    path.pop_back();
  }
  return {};
}

class Flattener {
 public:
  Flattener(const Document& document, bool trusted, ObjectArchives& objects,
            std::vector<Entry>& entries)
      : document_(document), trusted_(trusted), objects_(objects), entries_(entries) {}

  Status Add(std::vector<PathStep>& path, PickleRef value) {
    return Walk(value, path, [&](const auto& at, PickleRef one) { return AddLeaf(at, one); });
  }

 private:
  Status AddLeaf(const std::vector<PathStep>& path, PickleRef value) {
    if (!trusted_ && AnyNode(value, IsOfClass)) return {};
    Entry entry;
    entry.key = KeyOf(path);
    entry.path = path;
    if (const StoredTensor* stored = StoredOf(value); stored != nullptr && stored->atom) {
      entry.tensor = true;
      entry.dtype = stored->dtype;
      entry.shape = stored->shape;
      entry.body = *stored->atom;
      entries_.push_back(std::move(entry));
      return {};
    }
    const bool tensors =
        AnyNode(value, [](const PickleNode& n) { return n.kind == Kind::kTensor; });
    if (!tensors) {
      PickleBuilder builder;
      const NodeId copy = builder.Copy(value);
      CKPT_ASSIGN_OR_RETURN(entry.body, objects_.Of(std::move(builder).Finish(copy)));
    } else {
      ArchiveBuilder archive;
      CKPT_ASSIGN_OR_RETURN(const NodeId copy, archive.PartOf(document_, value));
      entry.body = std::make_shared<const ArchiveContent>(std::move(archive).Finish(copy));
      if (const TensorNode* tensor = value.Tensor()) {
        entry.tensor = true;
        entry.dtype = tensor->dtype;
        entry.shape = tensor->shape;
      }
    }
    entries_.push_back(std::move(entry));
    return {};
  }

  // Returns the tensor that a value is if nothing is around it; else null.
  const StoredTensor* StoredOf(PickleRef value) const {
    if (value.node().kind != Kind::kTensor) return nullptr;
    const TensorNode& tensor = value.tree().TensorOf(value.node());
    if (tensor.form != TensorNode::Form::kTensor) return nullptr;
    return &document_.tensors.at(std::stoul(tensor.storage_key));
  }

  const Document& document_;
  const bool trusted_;
  ObjectArchives& objects_;
  std::vector<Entry>& entries_;
};

}  // namespace

Status AppendDocument(const Document& document, std::vector<PathStep> path, bool trusted,
                      ObjectArchives& objects, std::vector<Entry>& entries) {
  CKPT_ASSIGN_OR_RETURN(const PickleTree tree, ParseDocument(document));
  return AppendValue(document, RootOf(tree), std::move(path), trusted, objects, entries);
}

Status AppendValue(const Document& document, PickleRef value, std::vector<PathStep> path,
                   bool trusted, ObjectArchives& objects, std::vector<Entry>& entries) {
  return Flattener(document, trusted, objects, entries).Add(path, value);
}

Status ForEachLeaf(PickleRef value, std::vector<PathStep> path, const Leaf& leaf) {
  return Walk(value, path, leaf);
}

}  // namespace ckptfs::dcp
