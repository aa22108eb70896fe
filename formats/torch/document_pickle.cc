// SPDX-License-Identifier: Apache-2.0
//
// Documents: a value of a torch file as a protocol-2 pickle whose tensors are
// persistent ids, and back.
//
//   id   = index ["p"] ["g"] ["a"] ["s" storage class]     in Document::tensors, decimal
//          p = parameter, g = requires_grad, a = TensorNode::Form::kArguments, s = kStorage

#include <charconv>

#include "core/base/strings.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"

namespace ckptfs {
namespace {

using Kind = PickleNode::Kind;
using Form = TensorNode::Form;

std::string SpellId(size_t index, const TensorNode& tensor) {
  std::string id = std::to_string(index);
  if (tensor.is_parameter) id += 'p';
  if (tensor.requires_grad) id += 'g';
  if (tensor.form == Form::kArguments) id += 'a';
  if (tensor.form == Form::kStorage) id += StrCat("s", tensor.storage_class);
  return id;
}

Result<TensorNode> ParseId(std::string_view id, const std::vector<StoredTensor>& tensors) {
  size_t index = 0;
  auto [end, code] = std::from_chars(id.data(), id.data() + id.size(), index);
  if (code != std::errc() || index >= tensors.size()) {
    return Refuse("document: no tensor '", id, "'");
  }
  const StoredTensor& stored = tensors[index];
  CKPT_ASSIGN_OR_RETURN(uint64_t elements, ElementCount(stored.shape));
  TensorNode tensor;
  tensor.dtype = stored.dtype;
  tensor.storage_key = std::to_string(index);
  tensor.storage_elements = elements;
  tensor.shape = stored.shape;
  tensor.strides = RowMajorStrides(stored.shape);
  std::string_view marks(end, static_cast<size_t>(id.data() + id.size() - end));
  for (size_t i = 0; i < marks.size(); ++i) {
    if (marks[i] == 'p') tensor.is_parameter = true;
    if (marks[i] == 'g') tensor.requires_grad = true;
    if (marks[i] == 'a') tensor.form = Form::kArguments;
    if (marks[i] == 's') {
      tensor.form = Form::kStorage;
      tensor.storage_class = marks.substr(i + 1);
      break;
    }
  }
  return tensor;
}

// Where the elements of a document's tensor are.
Result<StoredTensor> StoredOf(const TensorNode& tensor, const TorchFile& file, BlobIndex blob,
                              const StorageAtoms& atoms) {
  if (const auto atom = atoms.find(tensor.storage_key); atom != atoms.end()) {
    return StoredTensor{.dtype = tensor.dtype,
                        .shape = tensor.shape,
                        .strides = RowMajorStrides(tensor.shape),
                        .atom = atom->second};
  }
  CKPT_ASSIGN_OR_RETURN(const FileTensor located, file.Locate(tensor, blob));
  return located.Stored();
}

}  // namespace

Result<Document> MakeDocument(std::string key, std::string scope, PickleRef value,
                              const TorchFile& file, BlobIndex blob, const StorageAtoms& atoms) {
  Document document{.key = std::move(key), .scope = std::move(scope), .pickle = {}, .tensors = {}};
  if (!value) return Refuse("document '", document.key, "' has no value");
  PickleBuilder builder;
  NodeId root = builder.Copy(value);
  PickleTree tree = std::move(builder).Finish(root);
  size_t nodes = tree.nodes.size();
  for (size_t i = 0; i < nodes; ++i) {
    if (tree.nodes[i].kind == Kind::kPersistent) {
      return Refuse("document '", document.key, "': a persistent id that is not a torch storage");
    }
    if (tree.nodes[i].kind != Kind::kTensor) continue;
    const TensorNode& tensor = tree.TensorOf(tree.nodes[i]);
    auto stored = StoredOf(tensor, file, blob, atoms);
    if (!stored) {
      return Fail(std::move(stored).error().WithContext("document '" + document.key + "'"));
    }
    PickleNode id;
    id.kind = Kind::kString;
    id.text = SpellId(document.tensors.size(), tensor);
    document.tensors.push_back(*std::move(stored));
    tree.nodes[i].kind = Kind::kPersistent;
    tree.nodes[i].children = {static_cast<NodeId>(tree.nodes.size())};
    tree.nodes.push_back(std::move(id));
  }
  tree.tensors.clear();
  CKPT_ASSIGN_OR_RETURN(document.pickle, PrintPickle(tree));
  return document;
}

Result<PickleTree> ParseDocument(const Document& document) {
  auto parsed = ParsePickle(document.pickle);
  if (!parsed)
    return Fail(std::move(parsed).error().WithContext("document '" + document.key + "'"));
  PickleTree tree = std::move(parsed->tree);
  tree.tensors.clear();
  for (PickleNode& node : tree.nodes) {
    if (node.kind == Kind::kTensor)
      return Refuse("document: a storage in place of a tensor's index");
    if (node.kind != Kind::kPersistent) continue;
    const PickleNode& id = tree.nodes[node.children[0]];
    if (id.kind != Kind::kString) return Refuse("document: a tensor's index is not a string");
    CKPT_ASSIGN_OR_RETURN(TensorNode tensor, ParseId(id.text, document.tensors));
    node.kind = Kind::kTensor;
    node.children.clear();
    node.integer = static_cast<int64_t>(tree.tensors.size());
    tree.tensors.push_back(std::move(tensor));
  }
  return tree;
}

}  // namespace ckptfs
