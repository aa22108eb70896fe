// SPDX-License-Identifier: Apache-2.0
//
// torch_tool lets the Python tests drive the torch codecs:
//
//   dump FILE           JSON: the tree, and for each tensor where its bytes lie
//   print FILE OUT      the tree re-printed as a bare protocol-2 pickle
//   repack FILE OUT     the file laid out anew by ArchivePlan, bytes copied
//   document FILE OUT   the same by way of MakeDocument and ParseDocument
//   pickle FILE OUT     a bare pickle, parsed and printed
//   big OUT BYTES       an archive of two storages of BYTES zeros, as a sparse file
//   safetensors FILE    JSON: the header
//   header OUT          a safetensors file of every dtype the format knows

#include <fcntl.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "formats/torch/archive_view.h"
#include "formats/torch/pickle/pickle_reader.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/torch_file.h"
#include "tests/support/open_torch_file.h"

namespace ckptfs {
namespace {

using Json = nlohmann::ordered_json;
using Kind = PickleNode::Kind;

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void WriteAll(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

int Report(const Error& error) {
  std::cerr << ErrorCodeName(error.code) << ": " << error.message << "\n";
  return 1;
}

Json TensorJson(const TorchFile& file, const TensorNode& tensor) {
  Json json{{"dtype", TorchName(tensor.dtype)}, {"shape", tensor.shape},
            {"strides", tensor.strides},        {"offset", tensor.storage_offset},
            {"key", tensor.storage_key},        {"form", static_cast<int>(tensor.form)},
            {"parameter", tensor.is_parameter}, {"grad", tensor.requires_grad}};
  auto located = file.Locate(tensor, BlobIndex{});
  if (located) {
    json["at"] = located->Stored().offset;
    json["storage_at"] = located->Stored().offset - tensor.storage_offset * ByteWidth(tensor.dtype);
    json["storage_bytes"] = tensor.storage_elements * ByteWidth(tensor.dtype);
  } else {
    json["error"] = located.error().message;
  }
  return json;
}

// Dict entries with string keys, nested, as "a/b/c" -> tensor.
void DumpTensors(const TorchFile& file, PickleRef value, const std::string& path, int depth,
                 Json& out) {
  if (const TensorNode* tensor = value.Tensor()) {
    out[path] = TensorJson(file, *tensor);
    return;
  }
  if (depth > 30) return;
  for (auto& [key, child] : value.Items()) {
    std::string name =
        key.String() ? std::string(*key.String()) : StrCat("#", key.Int().value_or(-1));
    DumpTensors(file, child, path + "/" + name, depth + 1, out);
  }
  for (size_t i = 0; value.IsSequence() && i < value.size(); ++i) {
    DumpTensors(file, value.at(i), path + "/" + std::to_string(i), depth + 1, out);
  }
}

int Dump(const std::string& path) {
  auto file = OpenTorchFile(path);
  if (!file) return Report(file.error());
  Json tensors = Json::object();
  DumpTensors(*file, file->root(), "", 0, tensors);
  Json classes = Json::object();
  for (NodeId id = 0; id < file->tree().nodes.size(); ++id) {
    PickleRef ref(&file->tree(), id);
    if (ref.node().kind == Kind::kGlobal) classes[ref.ClassName()] = true;
  }
  std::cout << Json{{"tensors", tensors},
                    {"classes", classes},
                    {"nodes", file->tree().nodes.size()},
                    {"storages", file->storage_count()}}
                   .dump()
            << "\n";
  return 0;
}

int Print(const PickleTree& tree, const std::string& out) {
  auto printed = PrintPickle(tree);
  if (!printed) return Report(printed.error());
  WriteAll(out, *printed);
  return 0;
}

// Writes a plan of literals, blob ranges (of `source`) and zeros.
int WritePlan(const Plan& plan, const std::string& source, const std::string& out) {
  int fd = ::open(out.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0644);
  int in = source.empty() ? -1 : ::open(source.c_str(), O_RDONLY);
  for (const Segment& segment : plan.segments()) {
    std::string bytes;
    if (auto* literal = std::get_if<LiteralSegment>(&segment.body)) bytes = *literal->bytes;
    if (auto* blob = std::get_if<BlobSegment>(&segment.body)) {
      bytes.resize(blob->length);
      if (::pread(in, bytes.data(), bytes.size(), static_cast<off_t>(blob->offset)) !=
          static_cast<ssize_t>(bytes.size())) {
        return 2;
      }
    }
    if (::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(segment.begin)) !=
        static_cast<ssize_t>(bytes.size())) {
      return 2;
    }
  }
  int status = ::ftruncate(fd, static_cast<off_t>(plan.size()));
  ::close(fd);
  if (in >= 0) ::close(in);
  return status == 0 ? 0 : 2;
}

int WriteArchive(const PickleTree& tree, std::vector<ArchiveStorage> storages,
                 const std::string& source, const std::string& out) {
  std::vector<uint64_t> lengths;
  for (const ArchiveStorage& storage : storages) lengths.push_back(storage.length);
  auto printed = PrintPickle(tree);
  if (!printed) return Report(printed.error());
  uint64_t size = ArchiveSize("archive", printed->size(), lengths);
  auto plan = ArchivePlan("archive", tree, std::move(storages));
  if (!plan) return Report(plan.error());
  if (plan->size() != size) {
    std::cerr << "ArchiveSize says " << size << ", the plan has " << plan->size() << "\n";
    return 1;
  }
  return WritePlan(*plan, source, out);
}

int Repack(const std::string& path, const std::string& out) {
  auto file = OpenTorchFile(path);
  if (!file) return Report(file.error());
  std::map<std::string, size_t> positions;
  std::vector<ArchiveStorage> storages;
  PickleBuilder builder;
  NodeId root = builder.Copy(file->root(), [&](const TensorNode& tensor) {
    auto [found, added] = positions.emplace(tensor.storage_key, storages.size());
    if (added) {
      TensorNode whole = tensor;
      whole.shape = {tensor.storage_elements};
      whole.strides = {1};
      whole.storage_offset = 0;
      const StorageRecord record = file->Locate(whole, BlobIndex{}).value().Bytes().value();
      ArchiveStorage& storage = storages.emplace_back();
      storage.length = record.length;
      storage.body = BlobSegment{BlobIndex{}, record.offset, record.length};
    }
    return std::to_string(found->second);
  });
  return WriteArchive(std::move(builder).Finish(root), std::move(storages), path, out);
}

// Gathers each tensor of the document; strides are followed element by element.
int Documented(const std::string& path, const std::string& out) {
  auto file = OpenTorchFile(path);
  if (!file) return Report(file.error());
  auto document = MakeDocument("test", "", file->root(), *file, BlobIndex{});
  if (!document) return Report(document.error());
  auto tree = ParseDocument(*document);
  if (!tree) return Report(tree.error());
  std::string bytes = ReadAll(path);
  std::vector<ArchiveStorage> storages;
  for (const StoredTensor& tensor : document->tensors) {
    uint64_t count = ElementCount(tensor.shape).value();
    uint64_t width = ByteWidth(tensor.dtype);
    std::vector<uint64_t> dense = RowMajorStrides(tensor.shape);
    auto gathered = std::make_shared<std::string>();
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t at = tensor.offset;
      for (size_t d = 0; d < tensor.shape.size(); ++d) {
        at += i / dense[d] % tensor.shape[d] * tensor.strides[d] * width;
      }
      gathered->append(bytes, at, width);
    }
    ArchiveStorage& storage = storages.emplace_back();
    storage.length = gathered->size();
    storage.body = LiteralSegment{std::move(gathered)};
  }
  return WriteArchive(*tree, std::move(storages), "", out);
}

int Big(const std::string& out, uint64_t bytes) {
  PickleBuilder builder;
  std::vector<std::pair<NodeId, NodeId>> items;
  std::vector<ArchiveStorage> storages;
  for (int i = 0; i < 3; ++i) {
    uint64_t length = i == 2 ? 8 : bytes;
    TensorNode tensor;
    tensor.dtype = DType::kU8;
    tensor.storage_key = std::to_string(i);
    tensor.storage_elements = length;
    tensor.shape = {length};
    tensor.strides = {1};
    items.emplace_back(builder.String(StrCat("t", i)), builder.Tensor(tensor));
    ArchiveStorage& storage = storages.emplace_back();
    storage.length = length;
    storage.body = ZeroSegment{length};
    if (i < 2) continue;
    storage.body = LiteralSegment{std::make_shared<const std::string>("\1\2\3\4\5\6\7\10")};
  }
  NodeId root = builder.Dict(items);
  return WriteArchive(std::move(builder).Finish(root), std::move(storages), "", out);
}

int Safetensors(const std::string& path) {
  std::string bytes = ReadAll(path);
  auto header = ParseSafetensorsHeader(bytes, bytes.size());
  if (!header) return Report(header.error());
  Json entries = Json::object();
  for (const SafetensorsEntry& entry : header->entries) {
    entries[entry.name] = Json{{"dtype", SafetensorsName(entry.dtype)},
                               {"shape", entry.shape},
                               {"at", header->data_offset + entry.begin},
                               {"end", header->data_offset + entry.end}};
  }
  std::cout << Json{{"metadata", header->metadata}, {"entries", entries}}.dump() << "\n";
  return 0;
}

int Header(const std::string& out) {
  std::vector<SafetensorsEntry> entries;
  std::string data;
  for (int i = 0; i < kDTypeCount; ++i) {
    DType dtype = static_cast<DType>(i);
    if (SafetensorsName(dtype).empty() || ByteWidth(dtype) == 0) continue;
    entries.push_back(
        {.name = StrCat("t\"\n\xc3\xa9", SafetensorsName(dtype)), .dtype = dtype, .shape = {2, 3}});
    entries.push_back(
        {.name = StrCat("scalar.", SafetensorsName(dtype)), .dtype = dtype, .shape = {}});
    entries.push_back(
        {.name = StrCat("none.", SafetensorsName(dtype)), .dtype = dtype, .shape = {0, 5}});
    data.append(7 * ByteWidth(dtype), '\1');
  }
  std::map<std::string, std::string> metadata{{"format", "pt"}, {"a\\b\t", "\"\x01"}};
  auto size = SafetensorsHeaderSize(metadata, entries);
  auto header = RenderSafetensorsHeader(metadata, entries);
  if (!header) return Report(header.error());
  if (!size || *size != header->size() || *size % 4096 != 0) return 2;
  WriteAll(out, *header + data);
  return 0;
}

int Run(const std::vector<std::string>& args) {
  if (args.size() == 2 && args[0] == "dump") return Dump(args[1]);
  if (args.size() == 2 && args[0] == "safetensors") return Safetensors(args[1]);
  if (args.size() == 2 && args[0] == "header") return Header(args[1]);
  if (args.size() != 3) return 64;
  if (args[0] == "repack") return Repack(args[1], args[2]);
  if (args[0] == "document") return Documented(args[1], args[2]);
  if (args[0] == "big") return Big(args[1], std::stoull(args[2]));
  if (args[0] == "pickle") {
    auto parsed = ParsePickle(ReadAll(args[1]));
    return parsed ? Print(parsed->tree, args[2]) : Report(parsed.error());
  }
  if (args[0] != "print") return 64;
  auto file = OpenTorchFile(args[1]);
  return file ? Print(file->tree(), args[2]) : Report(file.error());
}

}  // namespace
}  // namespace ckptfs

int main(int argc, char** argv) { return ckptfs::Run({argv + 1, argv + argc}); }
