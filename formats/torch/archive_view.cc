// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/archive_view.h"

#include <algorithm>
#include <charconv>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "formats/torch/pickle_writer.h"
#include "formats/torch/zip_format.h"

namespace ckptfs {
namespace {

using zip::Store;

constexpr std::string_view kByteOrder = "little";
constexpr std::string_view kVersion = "3\n";
constexpr uint64_t kPadHeader = 4;  // 'F' 'B' and the length of the padding

// The header fields that the sizes and offsets of one record determine.
struct RecordLayout {
  uint64_t header = 0;
  uint64_t payload = 0;
  uint64_t length = 0;
  uint64_t padding = 0;
  bool big() const { return length >= zip::kBig32; }
  bool far() const { return header >= zip::kBig32; }
  uint64_t local_zip64() const { return big() ? 20 : 0; }
  uint64_t central_zip64() const {
    return big() || far() ? 4 + (big() ? 16 : 0) + (far() ? 8 : 0) : 0;
  }
};

// Records in file order; sizes only.
class ArchiveCursor {
 public:
  RecordLayout Add(uint64_t name_bytes, uint64_t length) {
    RecordLayout record{.header = cursor_, .length = length};
    uint64_t start = cursor_ + zip::kLocalBytes + name_bytes + record.local_zip64() + kPadHeader;
    record.payload = AlignUp(start, zip::kAlignment);
    record.padding = record.payload - start;
    cursor_ = record.payload + length;
    central_ += zip::kCentralBytes + name_bytes + record.central_zip64();
    ++records_;
    return record;
  }
  uint64_t central_offset() const { return cursor_; }
  uint64_t central_bytes() const { return central_; }
  uint64_t records() const { return records_; }
  uint64_t size() const {
    return cursor_ + central_ + zip::kEnd64Bytes + zip::kLocatorBytes + zip::kEndBytes;
  }

 private:
  uint64_t cursor_ = 0;
  uint64_t central_ = 0;
  uint64_t records_ = 0;
};

uint32_t Small(uint64_t value) {
  return static_cast<uint32_t>(std::min<uint64_t>(value, zip::kBig32));
}

std::string LocalHeader(std::string_view name, const RecordLayout& record) {
  std::string out;
  Store<uint32_t>(out, zip::kLocalSignature);
  Store<uint16_t>(out, 0);
  Store<uint16_t>(out, zip::kFlagUtf8);
  Store<uint16_t>(out, 0);  // stored
  Store<uint32_t>(out, 0);  // time, date
  Store<uint32_t>(out, 0);  // CRC
  Store<uint32_t>(out, Small(record.length));
  Store<uint32_t>(out, Small(record.length));
  Store<uint16_t>(out, static_cast<uint16_t>(name.size()));
  Store<uint16_t>(out, static_cast<uint16_t>(record.local_zip64() + kPadHeader + record.padding));
  out += name;
  if (record.big()) {
    Store<uint16_t>(out, zip::kZip64Extra);
    Store<uint16_t>(out, 16);
    Store<uint64_t>(out, record.length);
    Store<uint64_t>(out, record.length);
  }
  out += "FB";
  Store<uint16_t>(out, static_cast<uint16_t>(record.padding));
  out.append(record.padding, 'Z');
  return out;
}

void AppendCentral(std::string& out, std::string_view name, const RecordLayout& record) {
  Store<uint32_t>(out, zip::kCentralSignature);
  Store<uint32_t>(out, 0);  // versions
  Store<uint16_t>(out, zip::kFlagUtf8);
  Store<uint16_t>(out, 0);
  Store<uint32_t>(out, 0);
  Store<uint32_t>(out, 0);
  Store<uint32_t>(out, Small(record.length));
  Store<uint32_t>(out, Small(record.length));
  Store<uint16_t>(out, static_cast<uint16_t>(name.size()));
  Store<uint16_t>(out, static_cast<uint16_t>(record.central_zip64()));
  Store<uint64_t>(out, 0);  // comment, disk, internal attributes; half of the external ones
  Store<uint16_t>(out, 0);
  Store<uint32_t>(out, Small(record.header));
  out += name;
  if (record.central_zip64() == 0) return;
  Store<uint16_t>(out, zip::kZip64Extra);
  Store<uint16_t>(out, static_cast<uint16_t>(record.central_zip64() - 4));
  if (record.big()) {
    Store<uint64_t>(out, record.length);
    Store<uint64_t>(out, record.length);
  }
  if (record.far()) Store<uint64_t>(out, record.header);
}

void AppendEnd(std::string& out, const ArchiveCursor& cursor) {
  uint64_t end64 = cursor.central_offset() + cursor.central_bytes();
  Store<uint32_t>(out, zip::kEnd64Signature);
  Store<uint64_t>(out, zip::kEnd64Bytes - 12);
  Store<uint16_t>(out, 0x031e);
  Store<uint16_t>(out, 0x002d);
  Store<uint64_t>(out, 0);
  Store<uint64_t>(out, cursor.records());
  Store<uint64_t>(out, cursor.records());
  Store<uint64_t>(out, cursor.central_bytes());
  Store<uint64_t>(out, cursor.central_offset());
  Store<uint32_t>(out, zip::kLocatorSignature);
  Store<uint32_t>(out, 0);
  Store<uint64_t>(out, end64);
  Store<uint32_t>(out, 1);
  Store<uint32_t>(out, zip::kEndSignature);
  Store<uint32_t>(out, 0);
  uint16_t records = static_cast<uint16_t>(std::min<uint64_t>(cursor.records(), zip::kBig16));
  Store<uint16_t>(out, records);
  Store<uint16_t>(out, records);
  Store<uint32_t>(out, Small(cursor.central_bytes()));
  Store<uint32_t>(out, Small(cursor.central_offset()));
  Store<uint16_t>(out, 0);
}

// Appends records to a plan; headers become literals.
class ArchiveWriter {
 public:
  ArchiveWriter(PlanBuilder& plan, std::string_view folder) : plan_(plan), folder_(folder) {}

  void Add(std::string_view name, std::vector<std::pair<uint64_t, SegmentBody>> parts,
           uint64_t length) {
    std::string full = StrCat(folder_, "/", name);
    RecordLayout record = cursor_.Add(full.size(), length);
    plan_.Literal(LocalHeader(full, record));
    for (auto& part : parts) plan_.Append(part.first, std::move(part.second));
    AppendCentral(central_, full, record);
  }

  void AddLiteral(std::string_view name, std::string bytes) {
    uint64_t length = bytes.size();
    LiteralSegment literal{std::make_shared<const std::string>(std::move(bytes))};
    std::vector<std::pair<uint64_t, SegmentBody>> parts;
    parts.emplace_back(length, std::move(literal));
    Add(name, std::move(parts), length);
  }

  void Finish() {
    AppendEnd(central_, cursor_);
    plan_.Literal(std::move(central_));
  }

 private:
  PlanBuilder& plan_;
  std::string_view folder_;
  ArchiveCursor cursor_;  // from the archive's begin on
  std::string central_;
};

// Every tensor's storage is there and long enough, and the sum of its parts.
Status CheckStorages(const PickleTree& tree, const std::vector<ArchiveStorage>& storages) {
  for (size_t i = 0; i < storages.size(); ++i) {
    uint64_t sum = storages[i].parts.empty() ? storages[i].length : 0;
    for (const auto& [bytes, body] : storages[i].parts) sum += bytes;
    if (sum == storages[i].length) continue;
    return Fail(ErrorCode::kInternal, StrCat("the parts of storage ", i, " have ", sum,
                                             " bytes instead of ", storages[i].length));
  }
  for (const PickleNode& node : tree.nodes) {
    if (node.kind == PickleNode::Kind::kPersistent) {
      return Fail(ErrorCode::kInvalid,
                  "a persistent id that is not a torch storage cannot be stored");
    }
  }
  for (const TensorNode& tensor : tree.tensors) {
    const std::string& key = tensor.storage_key;
    uint64_t index = 0;
    auto [end, code] = std::from_chars(key.data(), key.data() + key.size(), index);
    if (code != std::errc() || end != key.data() + key.size() || index >= storages.size()) {
      return Fail(ErrorCode::kInternal,
                  StrCat("tensor of storage '", key, "', but there are only ", storages.size()));
    }
    CKPT_ASSIGN_OR_RETURN(uint64_t bytes, CheckedMul(tensor.storage_elements,
                                                     ByteWidth(tensor.dtype), "storage size"));
    if (bytes > storages[index].length) {
      return Fail(ErrorCode::kInternal, StrCat("storage '", key, "' has ", storages[index].length,
                                               " bytes, but its tensors need ", bytes));
    }
  }
  return {};
}

}  // namespace

uint64_t ArchiveSize(std::string_view folder, uint64_t pickle_bytes,
                     const std::vector<uint64_t>& storage_lengths) {
  ArchiveCursor cursor;
  uint64_t prefix = folder.size() + 1;
  cursor.Add(prefix + std::string_view("data.pkl").size(), pickle_bytes);
  cursor.Add(prefix + std::string_view("byteorder").size(), kByteOrder.size());
  uint64_t digits = 1;
  uint64_t next_digit = 10;
  for (size_t i = 0; i < storage_lengths.size(); ++i) {
    if (i == next_digit) {
      ++digits;
      next_digit *= 10;
    }
    cursor.Add(prefix + std::string_view("data/").size() + digits, storage_lengths[i]);
  }
  cursor.Add(prefix + std::string_view("version").size(), kVersion.size());
  return cursor.size();
}

Status AppendArchive(PlanBuilder& plan, std::string_view folder, const PickleTree& tree,
                     std::vector<ArchiveStorage> storages) {
  if (folder.empty() || folder.size() > 255 || folder.find('/') != std::string_view::npos) {
    return Fail(ErrorCode::kInvalid, StrCat("'", folder, "' cannot name the folder of a zip"));
  }
  CKPT_RETURN_IF_ERROR(CheckStorages(tree, storages));
  CKPT_ASSIGN_OR_RETURN(std::string pickle, PrintPickle(tree));
  ArchiveWriter writer(plan, folder);
  writer.AddLiteral("data.pkl", std::move(pickle));
  writer.AddLiteral("byteorder", std::string(kByteOrder));
  for (size_t i = 0; i < storages.size(); ++i) {
    ArchiveStorage& storage = storages[i];
    if (storage.parts.empty()) storage.parts.emplace_back(storage.length, std::move(storage.body));
    writer.Add(StrCat("data/", i), std::move(storage.parts), storage.length);
  }
  writer.AddLiteral("version", std::string(kVersion));
  writer.Finish();
  return {};
}

Result<Plan> ArchivePlan(std::string_view folder, const PickleTree& tree,
                         std::vector<ArchiveStorage> storages) {
  PlanBuilder plan;
  CKPT_RETURN_IF_ERROR(AppendArchive(plan, folder, tree, std::move(storages)));
  return std::move(plan).Finish();
}

}  // namespace ckptfs
